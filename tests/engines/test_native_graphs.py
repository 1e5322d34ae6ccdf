"""Steps of fixed sizes, as CUDA graphs record them: here "recorded" work is merely computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, graphs

PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [12, 16])
OPTIONS = SamplingOptions(max_new_tokens=70, eos_ids=(1,), pad_id=0)


class Recorder:
    """Computes the work twice, as a recording does before anything is asked for, and then whenever it is repeated."""

    def __init__(self) -> None:
        self.num_recorded = self.num_repeated = 0

    def __call__(self, work: graphs.Work) -> graphs.Work:
        self.num_recorded += 1
        work()
        work()

        def replay() -> torch.Tensor:
            self.num_repeated += 1
            return work()

        return replay


def requests() -> list[Request]:
    return [Request(PROMPTS[i // 6], i, 4 + 6 * (i % 12)) for i in range(24)]


@pytest.mark.parametrize(
    ("kind", "bounds"),
    [
        ("qwen3", {}),
        ("qwen3", {"max_rows": 5}),
        ("qwen3-moe", {"kv_memory": 300 * 256}),
        ("gemma2 (soft caps)", {}),
        ("mistral (sliding window)", {"max_rows": 5}),
        ("mistral (sliding window)", {"kv_memory": 300 * 256}),
        ("gpt2", {}),
    ],
)
def test_recorded_steps_give_the_same_texts(kind: str, bounds: dict[str, int], build: Callable[..., Any], monkeypatch):
    sizes = {"n_positions": 256} if kind == "gpt2" else {"max_position_embeddings": 256}
    model = build(kind, **sizes)
    expected = NativeEngine(model).sample(requests(), OPTIONS)
    recorder = Recorder()
    engine = NativeEngine(model, **bounds)
    monkeypatch.setattr(engine, "_recorder", lambda devices: recorder)
    found = engine.sample(requests(), OPTIONS)
    assert [s.ids for s in found] == [s.ids for s in expected]
    for ours, theirs in zip(found, expected):
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=1e-5, abs=1e-5)
    assert recorder.num_repeated == engine.statistics.num_steps
    assert recorder.num_recorded <= engine.statistics.num_steps / 2


def test_what_cannot_be_recorded_is_computed_and_said_once(build, monkeypatch, caplog):
    def record(work: graphs.Work) -> graphs.Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = build("qwen3", max_position_embeddings=256)
    expected = NativeEngine(model).sample(requests(), OPTIONS)
    engine = NativeEngine(model)
    monkeypatch.setattr(engine, "_recorder", lambda devices: record)
    with caplog.at_level(logging.WARNING):
        assert engine.sample(requests(), OPTIONS) == expected
    assert len(caplog.records) == 1
    assert "Qwen3ForCausalLM" in caplog.text
    assert "not permitted" in caplog.text


def test_nothing_is_recorded_on_a_cpu():
    assert graphs.cuda_recorder({torch.device("cpu")}) is None
    assert graphs.cuda_recorder({torch.device("cuda", 0), torch.device("cuda", 1)}) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_give_what_the_modules_give(dtype: torch.dtype, build, monkeypatch, caplog):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = build("qwen3", max_position_embeddings=256).to("cuda", dtype)
    asked = requests()
    with caplog.at_level(logging.WARNING):
        recorded = NativeEngine(model).sample(asked, OPTIONS)
    assert not caplog.records
    eager = NativeEngine(model)
    monkeypatch.setattr(eager, "_recorder", lambda devices: None)
    expected = eager.sample(asked, OPTIONS)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    for ours, theirs in zip(recorded, expected):
        if dtype == torch.float32:
            assert ours.ids == theirs.ids
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs[:1] == pytest.approx(theirs.logprobs[:1], abs=tolerance)


@pytest.mark.gpu
def test_a_cuda_model_follows_the_trainer(build):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = build("qwen3", max_position_embeddings=256).to("cuda")
    for request, sample in zip(requests(), NativeEngine(model).sample(requests(), OPTIONS)):
        ids = torch.tensor([[*request.prompt_ids, *sample.ids]], device="cuda")
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
        chosen = torch.tensor(sample.ids, device="cuda")[:, None]
        expected = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).tolist()
        assert sample.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)
