"""The compiled decode step: the results of the model's modules, and the fallback where it cannot be compiled."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from base_fixtures import build_family
from filelock import FileLock
from known_decoders import SIZES, direct_form
from noted_calls import note_calls
from torch import nn

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, runner
from groupgrad.engines.native.cpp_step import CompiledModel
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.kernels import build, library, status
from groupgrad.kernels import compile as loading

OPTIONS = SamplingOptions(max_new_tokens=40, eos_ids=(1,), pad_id=0)
WIDTHS = {"vocab_size": 53, "hidden_size": 36, "intermediate_size": 50, "max_position_embeddings": 512}
BASE: dict[str, Any] = {**SIZES, **WIDTHS}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MANY_HEADS = {"hidden_size": 40, "num_attention_heads": 20, "num_key_value_heads": 1, "head_dim": 6}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, one key head": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "twenty heads a key head": ("Llama", MANY_HEADS),
    "window": ("Mistral", {"sliding_window": 6}),
    "window in one layer": ("Qwen2", {"hidden_size": 32, **WINDOWS}),
    "norms of heads, tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "work for three threads": ("Qwen3", {"hidden_size": 150, "intermediate_size": 300, "head_dim": 32}),
    "wide heads": ("Qwen3", {"head_dim": 76, "rope_parameters": YARN}),
}

needs_kernels = pytest.mark.skipif(library() is None, reason=status())


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No kernel has been loaded in this process, and the cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loading._library.cache_clear()
    yield tmp_path / "groupgrad" / "kernels"
    monkeypatch.undo()
    loading._library.cache_clear()


@pytest.fixture
def quick(fresh, monkeypatch, tmp_path):
    """The same, and none of the kernels computes anything."""
    sources = "".join(source.read_text() for source in build.SOURCES)
    names = sorted(set(re.findall(r"\b(groupgrad_\w+)\(", sources)))
    small = tmp_path / "small.cpp"
    small.write_text("".join(f'extern "C" void {name}() {{}}\n' for name in names))
    monkeypatch.setattr(build, "SOURCES", [small])
    return fresh


def make(family: str, changes: dict[str, Any]) -> Any:
    return build_family(family, **{**BASE, **changes})


def requests() -> list[Request]:
    lengths = (1, 6, 11, 230)
    return [Request([3 + i % 4] * lengths[i % 4], i, 8 + 5 * (i % 7)) for i in range(12)]


def logprobs(model: Any, request: Request, ids: list[int]) -> list[float]:
    """Log-probs of the tokens `ids` in a plain forward pass."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, len(request.prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None]).squeeze(-1).tolist()


# ------------------------------------------------------------------------------------------------ numbers


def has_fused_sums() -> bool:
    """True if the machine has fused multiply-add, which rounds once."""
    return platform.machine() in ("aarch64", "arm64") or "fma" in Path("/proc/cpuinfo").read_text().split()


def sums_in_order(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(rows, outputs) float32: runs of 192 terms, or of two halves up to 384, summed in order and then added up."""
    width = inputs.shape[1]
    size = (width + 1) // 2 if 192 < width <= 384 else 192
    output = None
    for start in range(0, width, size):
        total = np.zeros((len(inputs), len(weight)), np.float32)
        for k in range(start, min(start + size, width)):
            # A product of two float32 numbers is exact in float64, so only the sum is rounded.
            exact = np.outer(inputs[:, k].astype(np.float64), weight[:, k].astype(np.float64)) + total
            total = exact.astype(np.float32)
        output = total if output is None else output + total
    assert output is not None
    return output


@needs_kernels
@pytest.mark.skipif(not has_fused_sums(), reason="this machine rounds products before it sums them")
@pytest.mark.parametrize("width", [1, 20, 192, 193, 256, 384, 385, 515])
def test_sums_are_taken_number_by_number_whatever_the_rows(width: int):
    torch.manual_seed(width)
    kernels = library()
    assert kernels is not None
    inputs, weight = torch.randn(120, width), torch.randn(53, width)
    expected = torch.from_numpy(sums_in_order(inputs.numpy(), weight.numpy()))
    for rows in (1, 3, 8, 13, 16, 24, 31, 40, 56, 64, 77, 120):
        output = torch.empty(rows, 53)
        pointers = [None if x is None else x.data_ptr() for x in (inputs, weight, None, output)]
        assert kernels.groupgrad_linear(*pointers, rows, width, 53, False, 2) == 0
        assert torch.equal(output, expected[:rows]), rows


@needs_kernels
def test_what_is_behind_a_weight_or_an_output_is_not_touched():
    kernels = library()
    assert kernels is not None
    inputs, behind = torch.ones(3, 5), torch.full((5 * 5,), torch.nan)
    behind[:20] = 2.0
    output = torch.full((4, 4), 7.0)
    kernels.groupgrad_linear(inputs.data_ptr(), behind.data_ptr(), None, output.data_ptr(), 3, 5, 4, False, 1)
    assert output.tolist() == [*[[10.0] * 4] * 3, [7.0] * 4]
    halves, output[:3] = behind.bfloat16(), 0.0
    kernels.groupgrad_linear(inputs.data_ptr(), halves.data_ptr(), None, output.data_ptr(), 3, 5, 4, True, 1)
    assert output.tolist() == [*[[10.0] * 4] * 3, [7.0] * 4]


@needs_kernels
@pytest.mark.parametrize(("name", "max_rows"), [*((name, None) for name in sorted(MODELS)), ("window", 5)])
def test_steps_give_the_numbers_of_the_model(name: str, max_rows: int | None, threads, monkeypatch, caplog):
    threads(3 if "threads" in name else 1)
    model = make(*MODELS[name])
    assert isinstance(direct_form(model), CompiledModel)
    own = note_calls(monkeypatch, runner, "step_logits")
    with caplog.at_level(logging.WARNING):
        engine = NativeEngine(model, max_rows=max_rows)
        samples = engine.sample(requests(), OPTIONS)
    assert not caplog.records
    assert not own and engine.path == "compiled"
    for request, sample in zip(requests(), samples):
        assert sample.logprobs == pytest.approx(logprobs(model, request, sample.ids), rel=1e-5, abs=2e-5)


@needs_kernels
@pytest.mark.parametrize("num_rows", [2, 7])
def test_rows_of_one_prompt_that_threads_share_out_keep_their_bits(num_rows: int, threads):
    family, changes = MODELS["work for three threads"]
    model = make(family, {**changes, "hidden_size": 450})
    rows = [Request([3, 4], i, 90) for i in range(num_rows)]  # their own tokens soon outnumber the prompt by far
    found = []
    for count in (1, 3, 16):
        threads(count)
        found.append([(x.ids, x.logprobs) for x in NativeEngine(model).sample(rows, OPTIONS)])
    assert max(len(ids) for ids, _ in found[0]) > 40
    assert found[1] == found[0] == found[2]


@needs_kernels
def test_weights_are_read_anew_for_each_generation_batch():
    model = make(*MODELS["norms of heads, tied"])
    engine = NativeEngine(model)
    engine.sample(requests(), OPTIONS)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.neg_()
        model.model.norm.weight = nn.Parameter(1.5 * model.model.norm.weight)
    for request, sample in zip(requests(), engine.sample(requests(), OPTIONS)):
        assert sample.logprobs == pytest.approx(logprobs(model, request, sample.ids), rel=1e-5, abs=2e-5)
        model.float()


@needs_kernels
def test_modules_that_are_not_plain_are_called():
    model = make(*MODELS["window"])
    layer = model.model.layers[0]
    assert isinstance(direct_form(model), CompiledModel)
    for place, name, other in (
        (layer.mlp, "act_fn", nn.GELU()),
        (layer.self_attn, "q_proj", nn.Sequential(layer.self_attn.q_proj)),
        (model.model, "norm", nn.Sequential(model.model.norm)),
        (model.model.rotary_emb, "rope_type", "dynamic"),
        (layer.mlp.up_proj, "weight", nn.Parameter(layer.mlp.up_proj.weight.T.contiguous().T)),
        (layer.mlp.up_proj, "out_features", 49),
    ):
        original = getattr(place, name)
        setattr(place, name, other)
        assert isinstance(direct_form(model), DirectModel)
        setattr(place, name, original)
    layer.mlp.up_proj.forward = lambda input: torch.zeros(*input.shape[:-1], 50)
    assert isinstance(direct_form(model), DirectModel)


# ------------------------------------------------------------------------------------------------ compiling


@needs_kernels
def test_the_kernels_compute_on_the_threads_of_torch():
    command = [sys.executable, str(Path(__file__).parents[2] / "helpers/one_pool.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout == f"{status()}; 0; 1\n", run.stderr


@pytest.mark.slow
@needs_kernels
def test_of_two_processes_one_compiles_and_the_other_waits(quick: Path):
    small = f"import pathlib; build.SOURCES = [pathlib.Path({str(build.SOURCES[0])!r})]"
    code = f"from groupgrad.kernels import build, status; {small}; print(status())"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": os.environ.copy()}
    quick.mkdir(parents=True)
    with FileLock(quick.parent / loading.LOCK):  # both meet while a third process compiles
        started = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
        first_words = [process.stderr.readline() for process in started if process.stderr is not None]
    said = [process.communicate(timeout=120) for process in started]
    assert [output.strip() for output, _ in said] == ["compiled here"] * 2
    assert all("waiting for another process that compiles the kernels" in words for words in first_words)
    assert sum("compiling its kernels" in errors for _, errors in said) == 1
    assert len(list(quick.iterdir())) == 1


@needs_kernels
def test_a_process_that_has_waited_too_long_compiles_by_itself(quick: Path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "LOCK_S", 0.2)
    quick.mkdir(parents=True)
    with FileLock(quick.parent / loading.LOCK, thread_local=False):
        assert library() is not None
    first, second = capsys.readouterr().err.splitlines()
    assert "waiting" in first and str(quick.parent / loading.LOCK) in first
    assert "compiling" in second


@needs_kernels
def test_a_cache_that_cannot_be_written_is_done_without(quick: Path):
    quick.parent.write_text("no folder")
    assert library() is not None


@pytest.fixture
def wheel(quick: Path, monkeypatch, tmp_path) -> Path:
    """The same in an installed wheel, whose library suits every processor."""
    built = build.build(next(build.compilers()), "native", tmp_path)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "LEVELS", {"x86-64-v3": ""})
    return built.rename(build.packaged("x86-64-v3"))


@needs_kernels
def test_the_library_of_a_wheel_is_used_and_nothing_is_compiled(wheel: Path, quick: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert status() == "packaged for x86-64-v3"
    assert capsys.readouterr().err == "" and not quick.exists()


@needs_kernels
def test_the_best_level_of_a_wheel_that_the_processor_has_is_used(wheel: Path, monkeypatch):
    for better in ("x86-64-v4", "x86-64-v5"):
        build.packaged(better).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(build, "LEVELS", {"x86-64-v3": "", "x86-64-v4": "", "x86-64-v5": "not_of_this_world"})
    assert status() == "packaged for x86-64-v4"


@needs_kernels
def test_a_library_of_a_wheel_that_cannot_be_used_is_replaced(wheel: Path, caplog):
    wheel.write_bytes(b"")
    assert status() == "compiled here"
    assert "the kernels of the wheel cannot be used on this machine" in caplog.text


def test_without_a_compiler_everything_stays_as_it_is(fresh: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO):
        assert isinstance(direct_form(make(*MODELS["window"])), DirectModel)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "no C++ compiler" in caplog.text
    assert "no C++ compiler" in status()


def test_a_compiler_that_fails_is_warned_of_once(fresh: Path, monkeypatch, caplog):
    fresh.mkdir(parents=True)
    compiler = fresh / "c++"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fresh}")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO):
        assert library() is None
        assert library() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no such option" in caplog.text


def test_kernels_may_be_turned_off(monkeypatch):
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")
    assert library() is None
    assert status() == "off: GROUPGRAD_NATIVE_KERNELS=0"
    assert isinstance(direct_form(make(*MODELS["window"])), DirectModel)


@needs_kernels
def test_the_first_compile_says_what_it_does_and_happens_once(quick, capsys):
    assert library() is not None
    assert capsys.readouterr().err == (
        f"groupgrad: compiling its kernels for this CPU, about ten seconds, once; kept in {quick}\n"
    )
    loading._library.cache_clear()
    assert library() is not None
    assert capsys.readouterr().err == ""
