"""Nothing of a session outlives it, without garbage collection: keys, values, recorded graphs."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from simulated_cuda import Graph, memory_in_use, simulated_cuda, to_cuda
from tiny_hybrids import CONFIGS, make_hybrid
from triton_twins import triton_twins

from groupgrad.engines.base import Request, SamplingOptions, sample_all
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.kv_cache import KVBuffer
from groupgrad.engines.native.runner import DecodeRunner

OPTIONS = SamplingOptions(max_new_tokens=12, eos_ids=(1,), pad_id=0)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Names of what sessions have made and what still lives, without garbage collection."""
    made: list[tuple[str, Any]] = []

    def note(kind: type, of: Callable[[Any], Any] = lambda made: made) -> None:
        make = kind.__init__

        def making(thing: Any, *arguments: Any, **options: Any) -> None:
            make(thing, *arguments, **options)
            made.append((kind.__name__, weakref.ref(of(thing))))

        monkeypatch.setattr(kind, "__init__", making)

    for kind in (DecodeRunner, KVBuffer, Graph):
        note(kind)
    resize = KVBuffer.resize

    def resizing(buffer: KVBuffer, *arguments: Any) -> None:
        resize(buffer, *arguments)
        tensors = [tensor for pair in buffer.tensors.values() for tensor in pair] + buffer.states
        made.extend(("keys and values", weakref.ref(tensor)) for tensor in tensors)

    monkeypatch.setattr(KVBuffer, "resize", resizing)
    gc.collect()
    gc.disable()
    yield lambda: sorted({name for name, thing in made if thing() is not None})
    gc.enable()


def requests() -> list[Request]:
    return [Request([3 + i % 3] * (1 + 4 * (i % 3)), i, 3 + i % 4, keep=i % 2 == 0) for i in range(6)]


def models(build: Callable[..., Any], name: str) -> Any:
    if name == "adapter":
        return get_peft_model(build("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    return make_hybrid(name) if name in CONFIGS else build(name)


@pytest.mark.quick("qwen3_5")
@pytest.mark.parametrize("name", ["adapter", "gemma2 (soft caps)", "qwen3_5"])
def test_nothing_of_a_session_lives_on(name: str, build, alive):
    """Though the caller keeps the session, whose rows are partly retained for further turns."""
    engines = [NativeEngine(models(build, name))]
    with simulated_cuda(), triton_twins():
        engines.append(NativeEngine(to_cuda(models(build, name))))
        for engine in engines:
            for _ in range(2):
                before = memory_in_use()
                with engine.session(OPTIONS) as session:
                    sample_all(session, requests())
                    session.submit(requests()[0])
                    session.advance()
                    assert "keys and values" in alive()
                assert alive() == []
                assert memory_in_use() - before < 1000  # the numbers of EOS tokens
                session.release(0)
        assert engines[1].statistics.num_recorded > 0 and engines[1].statistics.left_bytes < 1000


def test_nor_of_one_that_failed(build, alive, monkeypatch):
    def full(graph: Graph, **_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with simulated_cuda(), triton_twins():
        engine = NativeEngine(to_cuda(build("qwen3")))
        monkeypatch.setattr(Graph, "capture_begin", full)
        engine.sample(requests(), OPTIONS)
        assert alive() == []
        monkeypatch.setattr(torch.nn.functional, "embedding", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.sample(requests(), OPTIONS)
        assert alive() == []


def test_what_a_session_leaves_is_measured(build, caplog):
    kept: list[Any] = []
    with simulated_cuda(), triton_twins(), caplog.at_level(logging.WARNING):
        engine = NativeEngine(to_cuda(build("qwen3")))
        with engine.session(OPTIONS) as session:
            sample_all(session, requests())
            kept += [tensor for pair in session._cache.suffixes.tensors.values() for tensor in pair]
        # Storages that the test keeps; the session itself, which it keeps too, has the numbers of EOS tokens.
        left = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in kept}
        found = engine.metrics()["sampling/memory_left"].read()
        assert found == pytest.approx(sum(left.values()) / 2**20, rel=0.01) and found > 0
