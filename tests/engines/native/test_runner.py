"""Decode steps recorded as CUDA graphs, on a simulated CUDA device and on a real one."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from noted_calls import note_calls, note_results
from peft import LoraConfig, get_peft_model
from sample_checks import PROMPTS, assert_same_samples, drained
from simulated_cuda import GPU, Generator, Graph, SimulatedTensor, Stream, simulated_cuda, to_cuda, with_random_adapters
from tiny_hybrids import CONFIGS, make_hybrid
from torch import nn

from groupgrad.engines.base import Request, SamplingOptions, sample_all
from groupgrad.engines.native import NativeEngine, cuda_graphs, decode_kernels
from groupgrad.engines.native import session as sessions
from groupgrad.engines.native.attention_layouts import causal_attention, products
from groupgrad.engines.native.logits import cast_bytes
from groupgrad.engines.native.run_ahead import AHEAD_FRACTION
from groupgrad.scoring.attention_layout import AttentionCall

OPTIONS = SamplingOptions(max_new_tokens=70, eos_ids=(1,), pad_id=0)


def requests(count: int = 12) -> list[Request]:
    return [Request(PROMPTS[4 * i // count], i, 4 + 3 * (i % 12)) for i in range(count)]


def long_context(build: Callable[..., Any], name: str) -> Any:
    """The named model with room for 256 positions; "adapters" are unmerged."""
    if name in CONFIGS:
        return make_hybrid(name)
    if name == "adapters":
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        return with_random_adapters(get_peft_model(long_context(build, "llama"), config))
    return build(name, **({"n_positions": 256} if name == "gpt2" else {"max_position_embeddings": 256}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Graph, "num_recorded", 0)
    monkeypatch.setattr(Graph, "num_replayed", 0)
    with simulated_cuda():
        yield


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("qwen3", {"max_rows": 5}),
        ("gemma2 (soft caps)", {}),
        ("mistral (sliding window)", {"kv_memory": 150 * 256}),
        ("gpt-oss (experts, sinks)", {}),
        ("gpt2", {}),
        ("adapters", {}),
        ("qwen3_5", {}),
        ("nemotron_h", {"kv_memory": 2**16}),
        ("lfm2", {}),
    ],
)
def test_recorded_steps_give_the_same_texts(name: str, bounds: dict[str, int], build, gpu):
    model, asked = long_context(build, name), requests()
    expected = NativeEngine(model).sample(asked, OPTIONS)
    engine = NativeEngine(to_cuda(model), **bounds)
    actual = engine.sample(asked, OPTIONS)
    assert_same_samples(actual, expected)
    assert Graph.num_replayed == engine.statistics.num_steps
    assert Graph.num_recorded <= engine.statistics.num_steps / 2


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "keep"), [("qwen3", True), ("qwen3_5", False), ("qwen3_5", True)])
def test_the_host_reads_the_tokens_of_several_steps_at_once(name: str, keep: bool, build, gpu, monkeypatch):
    """Steps are launched ahead for an eighth of the tokens so far, not where a state has to end with its row."""
    monkeypatch.setattr(sessions, "RUN_SECONDS", 1e9)
    looks: list[int] = []
    decode = sessions.NativeSession._decode
    monkeypatch.setattr(sessions.NativeSession, "_decode", lambda session: looks.append(1) or decode(session))
    model = long_context(build, name)
    asked = [replace(request, max_new_tokens=70 + 10 * (i % 3), keep=keep) for i, request in enumerate(requests(6))]
    options = replace(OPTIONS, max_new_tokens=90)
    expected = NativeEngine(model).sample(asked, options)
    looks.clear()
    engine = NativeEngine(to_cuda(model))
    with engine.session(options) as session:
        actual = sample_all(session, asked)
    lengths = [len(sample.ids) for sample in actual]
    assert_same_samples(actual, expected)
    assert len(set(lengths)) > 1 and max(lengths) > 60, "rows end at different steps"
    num_steps = engine.statistics.num_steps
    assert Graph.num_replayed == num_steps <= max(lengths) * (1 + AHEAD_FRACTION) + 1
    if name == "qwen3_5" and keep:
        assert len(looks) == num_steps
    else:
        assert len(looks) < num_steps / 2


def test_frozen_weights_are_cast_once_and_not_in_each_step(build, gpu, monkeypatch):
    recorded = note_results(monkeypatch, Graph, "capture_end", lambda _, graph: graph)
    inner = long_context(build, "llama")
    inner.requires_grad_(False)
    model = to_cuda(get_peft_model(inner, LoraConfig(r=2, target_modules=["q_proj"])))
    before = [p.requires_grad for p in model.parameters()]
    engine = NativeEngine(model, precision=lambda: torch.autocast("cuda", dtype=torch.bfloat16))
    engine.sample(requests(4), OPTIONS)
    weights = {id(p.inner) for p in model.parameters()}
    work = [(run, args[0]) for graph in recorded for run, args, *_ in graph.calls if args]
    assert any(run is torch.ops.aten.mm.default for run, _ in work)
    assert not [x for run, x in work if run is torch.ops.aten._to_copy.default and id(x) in weights]
    assert [p.requires_grad for p in model.parameters()] == before


def recorded(work: Callable[[], torch.Tensor], owned: Sequence[torch.Tensor] = ()) -> Any:
    """The recording of work on the simulated device."""
    record = cuda_graphs.cuda_recorder({GPU})
    assert record is not None
    return record(work, owned, work)


def add_one() -> torch.Tensor:
    return SimulatedTensor(torch.ones(3)) + 1


def test_what_a_graph_reads_lives_as_long(gpu):
    """Autocast frees its casts when any thread leaves it, such as a tool's."""
    cast, stored = SimulatedTensor(torch.ones(2, 3)), SimulatedTensor(torch.ones(3))
    replay = recorded(lambda: cast.t().mul(2).t().add(stored), [stored])
    inputs = [tensor.inner.untyped_storage()._cdata for tensor in replay.inputs]
    assert inputs == [cast.inner.untyped_storage()._cdata]
    assert replay().tolist() == [[3.0] * 3] * 2


def test_memory_for_casts_is_left_beside_keys_and_values(build, gpu):
    model = to_cuda(build("llama", max_position_embeddings=256))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert cast_bytes(model, GPU) == 0
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert cast_bytes(model, GPU) == 2 * matrices
        assert cast_bytes(model, torch.device("cpu")) == 0


@pytest.mark.slow
def test_rows_that_arrive_one_after_the_other_are_recorded_few_times(build, gpu):
    engine = NativeEngine(to_cuda(long_context(build, "qwen3")))
    with engine.session(replace(OPTIONS, max_new_tokens=50, eos_ids=())) as session:
        for i in range(24):
            session.submit(Request([5 + i, 6], i, 50))
            session.advance()
            session.advance()
        drained(session)
    assert Graph.num_recorded <= 14


@pytest.mark.slow
def test_a_ragged_batch_is_recorded_few_times(build, gpu):
    """128 rows in groups of 16, lengths geometric up to 120: 128, 96, 64, ..., 1 rows, 64 or 120 places."""
    lengths = random.Random(0)
    submitted = [Request([5 + i // 16] * 30, i, min(120, 1 + int(lengths.expovariate(1 / 30)))) for i in range(128)]
    engine = NativeEngine(to_cuda(long_context(build, "qwen3")))
    engine.sample(submitted, replace(OPTIONS, max_new_tokens=120, eos_ids=()))
    assert engine.statistics.num_steps == max(request.max_new_tokens for request in submitted) - 1
    assert Graph.num_recorded <= 12


def test_prompts_are_not_computed_by_cudnn(build, gpu, monkeypatch):
    """It would build a plan for each length of a prompt."""
    is_allowed = lambda *_, **__: torch.backends.cuda.cudnn_sdp_enabled()  # noqa: E731
    allowed = note_calls(monkeypatch, torch.nn.functional, "scaled_dot_product_attention", is_allowed)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    NativeEngine(to_cuda(long_context(build, "qwen3"))).sample(requests(4), OPTIONS)
    assert set(allowed) == {False}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_scores_are_not_rounded_to_half_precision(gpu):
    query, key = (
        torch.full((1, 1, 2), 3.0, dtype=torch.bfloat16),
        torch.tensor([[[5.0, 0.03125]]], dtype=torch.bfloat16),
    )
    actual = products(SimulatedTensor(query), SimulatedTensor(key), 0.5)
    assert actual.dtype == torch.float32
    assert actual.tolist() == [[[7.546875]]]  # has one bit more than bfloat16


class Synchronising(nn.Module):
    """Reads a number from the GPU, which synchronises with it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) if float(hidden.sum()) < 1e9 else hidden


def test_what_cannot_be_recorded_is_computed_and_said_once(build, gpu, caplog, monkeypatch):
    closed = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: closed.append(where), raising=False)
    model = long_context(build, "qwen3")
    expected = NativeEngine(model).sample(requests(4), OPTIONS)
    model.model.layers[0].mlp = Synchronising(model.model.layers[0].mlp)
    engine = NativeEngine(to_cuda(model))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [s.ids for s in engine.sample(requests(4), OPTIONS)] == [s.ids for s in expected]
    assert sum("not recorded as CUDA graphs" in record.getMessage() for record in caplog.records) == 1
    assert "Qwen3ForCausalLM" in caplog.text
    assert "not permitted" in caplog.text
    assert Graph.recording is None
    assert Stream.current is Stream.default
    assert closed == [(0, (0, 1))]


def test_all_sessions_record_on_one_stream(gpu, monkeypatch):
    """The allocator and cuBLAS keep memory for each stream that was ever used."""
    used: set[Stream] = set()
    begin = Graph.capture_begin
    monkeypatch.setattr(Graph, "capture_begin", lambda graph, **more: (used.add(Stream.current), begin(graph, **more)))
    for _ in range(2):
        recorded(add_one)
    assert len(used) == 1


def test_the_pool_of_recordings_is_never_without_a_graph(gpu):
    """The allocator refuses to record into a pool whose graphs are all gone, as when keys and values have moved."""
    record = cuda_graphs.cuda_recorder({GPU})
    assert record is not None
    graphs = []
    for _ in range(2):
        replay: Any = record(add_one, (), add_one)
        graphs.append(weakref.ref(replay.graph))
        del replay
    assert [graph() is not None for graph in graphs] == [False, True]


def test_a_recording_that_fails_at_its_end_cleans_up(gpu, monkeypatch):
    closed, released = [], []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *where: closed.append(where), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *where: released.append(where), raising=False)

    def work() -> torch.Tensor:
        if Graph.recording is not None:
            Graph.recording.is_broken = True
        return add_one()

    with pytest.raises(RuntimeError, match="previous error during capture"):
        recorded(work)
    assert closed == released == [(0, (0, 1))]
    assert Stream.current is Stream.default
    assert not Generator.default.is_captured


def test_a_pool_that_is_closed_already_is_not_released_twice(gpu, monkeypatch):
    """A graph that was recorded, and could not be made to run, releases its pool itself."""

    def closed(*where: Any) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    released = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", closed, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *where: released.append(where), raising=False)
    end = Graph.capture_end

    def end_and_fail(graph: Graph) -> None:
        end(graph)
        raise RuntimeError("cannot instantiate")

    monkeypatch.setattr(Graph, "capture_end", end_and_fail)
    with pytest.raises(RuntimeError, match="cannot instantiate"):
        recorded(add_one)
    assert not released


def test_where_memory_ran_out_the_next_generation_batch_records_again(build, gpu, caplog, monkeypatch):
    model = to_cuda(long_context(build, "qwen3"))
    engine = NativeEngine(model)

    def full(graph: Graph, **_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "capture_begin", full)
        expected = engine.sample(requests(4), OPTIONS)
    assert "not recorded as CUDA graphs" in caplog.text
    assert Graph.num_replayed == 0
    assert [s.ids for s in engine.sample(requests(4), OPTIONS)] == [s.ids for s in expected]
    assert Graph.num_replayed == engine.statistics.num_steps


def test_cached_memory_is_given_back_to_a_recording_that_needs_it(build, gpu, caplog, monkeypatch):
    """The allocator does so outside of recordings alone; a pool whose graphs are gone cannot be recorded into again."""
    model = long_context(build, "qwen3")
    expected = NativeEngine(model).sample(requests(4), OPTIONS)
    given_back: list[bool] = []
    pools: list[Any] = []
    begin = Graph.capture_begin

    def begin_if_there_is_memory(graph: Graph, pool: Any = None, **more: Any) -> None:
        pools.append(pool)
        if not given_back:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin(graph, pool=pool, **more)

    monkeypatch.setattr(Graph, "capture_begin", begin_if_there_is_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(Graph.recording is None))
    handles = iter(range(1, 100))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    engine = NativeEngine(to_cuda(model))
    assert [s.ids for s in engine.sample(requests(4), OPTIONS)] == [s.ids for s in expected]
    assert given_back == [True]
    assert pools[:2] == [(0, 1), (0, 2)] and set(pools[1:]) == {(0, 2)}
    assert Graph.num_replayed == engine.statistics.num_steps
    assert "CUDA graphs" not in caplog.text


def test_nothing_is_recorded_on_a_cpu():
    assert cuda_graphs.cuda_recorder({torch.device("cpu")}) is None
    assert cuda_graphs.cuda_recorder({torch.device("cuda", 0), torch.device("cuda", 1)}) is None


def on_card(name: str, build: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Any:
    """The named model on a real GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return long_context(build, name).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "nemotron_h", "lfm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_graphs_give_what_the_modules_give(name: str, dtype: torch.dtype, build, monkeypatch, caplog):
    model = on_card(name, build, dtype)
    submitted = requests()
    with caplog.at_level(logging.WARNING):
        recorded = NativeEngine(model).sample(submitted, OPTIONS)
    # Torch's grouped product of experts reads on the host how many tokens each has, but for bfloat16 on these devices.
    has_experts = any(".experts." in parameter for parameter, _ in model.named_parameters())
    is_grouped = dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)
    warnings = [record.getMessage() for record in caplog.records]
    assert ["cannot be recorded" in text for text in warnings] == [True] * (has_experts and not is_grouped)
    eager = NativeEngine(model)
    monkeypatch.setattr(eager, "_recorder", lambda devices: None)
    expected = eager.sample(submitted, OPTIONS)
    tolerance = 1e-4 if dtype == torch.float32 else 0.3
    for ours, theirs in zip(recorded, expected):
        if dtype == torch.float32:
            assert ours.ids == theirs.ids
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs[:1] == pytest.approx(theirs.logprobs[:1], abs=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma2 (soft caps)", "mistral (sliding window)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_attends_as_matrix_products_do(name: str, dtype: torch.dtype, build, monkeypatch, caplog):
    pytest.importorskip("triton")
    model = on_card(name, build, dtype)
    found = NativeEngine(model).sample(requests(), OPTIONS)
    assert not caplog.records
    monkeypatch.setenv(decode_kernels.SWITCH, "0")
    for ours, theirs in zip(found, NativeEngine(model).sample(requests(), OPTIONS)):
        if dtype == torch.float32:
            assert ours.ids == theirs.ids
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "nemotron_h"])
def test_a_cuda_model_follows_the_trainer(name: str, build):
    model = on_card(name, build)
    for request, sample in zip(requests(), NativeEngine(model).sample(requests(), OPTIONS)):
        ids = torch.tensor([[*request.prompt_ids, *sample.ids]], device="cuda")
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
        chosen = torch.tensor(sample.ids, device="cuda")[:, None]
        expected = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).tolist()
        assert sample.logprobs == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(
    ("window", "num_queries", "num_keys"), [(None, 5, 9), (None, 300, 420), (7, 300, 420), (40, 6, 300)]
)
def test_prefill_behind_earlier_tokens(heads, window, num_queries, num_keys, gpu):
    """Continuations of rows, and windows, against products of all pairs in float64."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, t, 16) for n, t in ((heads[0], num_queries), *[(heads[1], num_keys)] * 2))
    wide = [x.double().repeat_interleave(heads[0] // heads[1], dim=0) for x in (key, value)]
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    hidden = (distance < 0) | (distance >= (window or num_keys))
    scores = (query.double() @ wide[0].transpose(1, 2) / 4).masked_fill(hidden, float("-inf"))
    expected = torch.softmax(scores, dim=-1) @ wide[1]
    found = causal_attention(*(SimulatedTensor(x) for x in (query, key, value)), AttentionCall(0, 0.25, window=window))
    torch.testing.assert_close(found.inner.double(), expected, rtol=1e-5, atol=1e-5)
