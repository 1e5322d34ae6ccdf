"""Imports search for no garbage, bitsandbytes compiles its functions late, and integrations wait for their use."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from groupgrad.imports import quick_imports


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the functions that `torch.compile` has compiled, while bitsandbytes is not imported yet."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compile, **options)
        calls.append((model.__module__, options))
        return lambda value: ("compiled", model(value))

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    return calls


def function_of(module: str) -> Any:
    def function(value: int) -> int:
        return value + 1

    function.__module__ = module
    return function


def test_bitsandbytes_compiles_a_function_on_its_first_call(compiled):
    before = torch.compile
    with quick_imports():
        importlib.util.find_spec("bitsandbytes")
        called = torch.compile(function_of("bitsandbytes.backends.default.ops"), dynamic=False)
        decorated = torch.compile(dynamic=True)(function_of("bitsandbytes.functional"))
    assert torch.compile is before
    assert compiled == []
    assert (called(1), called(2), decorated(3)) == (("compiled", 2), ("compiled", 3), ("compiled", 4))
    assert compiled == [
        ("bitsandbytes.backends.default.ops", {"dynamic": False}),
        ("bitsandbytes.functional", {"dynamic": True}),
    ]


def test_functions_of_others_are_compiled_at_once(compiled):
    with quick_imports():
        importlib.util.find_spec("bitsandbytes")
        torch.compile(function_of("transformers.integrations.flex_attention"))
        torch.compile(dynamic=True)(function_of("mine"))
        assert compiled == [("transformers.integrations.flex_attention", {}), ("mine", {"dynamic": True})]


def test_the_warning_of_a_kernel_that_nobody_needs_is_dropped(caplog):
    """Other warnings of the module stay, and so does the same one outside."""
    log, text = logging.getLogger("bitsandbytes.backends.cpu.ops"), "Failed to load CPU gemm_4bit_forward from %s"
    with quick_imports(), quick_imports():
        log.warning(text, "kernels-community")
        log.warning("the library is missing")
    with quick_imports():
        with quick_imports():
            pass
        log.warning(text, "an outer import")
    log.warning(text, "elsewhere")
    assert caplog.messages == ["the library is missing", text % "elsewhere"]


def test_nothing_of_torch_changes_without_bitsandbytes(compiled):
    before = torch.compile
    with quick_imports():
        importlib.util.find_spec("bits_and_bytes")
        assert torch.compile is before


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects):
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_what_is_imported_is_left_out_of_later_collections(monkeypatch):
    gc.unfreeze()
    monkeypatch.delitem(sys.modules, "torch")
    with quick_imports():
        monkeypatch.setitem(sys.modules, "torch", torch)
    assert gc.get_freeze_count() > 0


def test_objects_of_a_process_that_has_torch_may_become_garbage(monkeypatch):
    gc.unfreeze()
    with quick_imports():
        pass
    assert gc.get_freeze_count() == 0
    monkeypatch.delitem(sys.modules, "torch")
    with quick_imports():
        pass
    assert gc.get_freeze_count() == 0, "torch was not imported"


def test_the_interpreter_ends_without_a_list_of_what_triton_has_left():
    """Triton 3.8 prints it of objects that no collection at the end has found."""
    code = (
        "import atexit, gc, sys, types\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))\n"  # called after all that is registered later
        "from groupgrad.imports import quick_imports\n"
        "with quick_imports():\n"
        "    sys.modules['torch'] = types.ModuleType('torch')\n"
        "    {triton}\n"
    )
    for triton, expected in (("sys.modules['triton'] = types.ModuleType('triton')", True), ("pass", False)):
        command = [sys.executable, "-c", code.format(triton=triton)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (int(ended.stdout) == 0) == expected


def test_a_run_on_one_device_imports_no_integration(tmp_path):
    """Training with a reference and an evaluation, and a save."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import ranks\n"
        "trainer = ranks.build('dapo', Path(sys.argv[1]), max_steps=1, beta=0.1, eval=True)\n"
        "trainer.train()\n"
        "trainer.save_model()\n"
        "print(*(name for name in sys.modules if name.startswith('groupgrad.integrations')))\n"
    )
    folders = [str(Path(__file__).parent / name) for name in ("helpers", "trainer")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.splitlines()[-1] == ""
