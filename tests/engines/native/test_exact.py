"""In float32 on a CPU the log-prob of a token is equal to the last bit in sampling and in training."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import peft
import pytest
import torch
import transformers
from known_decoders import SIZES
from transformers import AutoModelForCausalLM

from groupgrad.batch import Batch, TokenScores
from groupgrad.batching.collate import collate
from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.kernels import library, status
from groupgrad.scoring.attention import unplug
from groupgrad.scoring.forward import ForwardOptions, forward_inputs, score_tokens, score_without_gradient
from groupgrad.scoring.fused_modules import restore_modules
from groupgrad.scoring.tiled_head import PrecomputedGradient
from groupgrad.types import Prompt, Rollout

pytestmark = pytest.mark.skipif(library() is None, reason=status())

OPTIONS = SamplingOptions(max_new_tokens=40, eos_ids=(1,), pad_id=0)
WIDTHS = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
BASE: dict[str, Any] = {**SIZES, **WIDTHS, "max_position_embeddings": 1024, "tie_word_embeddings": False}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
ODD = {"hidden_size": 45, "intermediate_size": 77, "head_dim": 10, "vocab_size": 129, "num_attention_heads": 3}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, biases, one key head": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama, tied, a large vocabulary": ("Llama", {"tie_word_embeddings": True, "vocab_size": 4500}),
    "mistral, window": ("Mistral", {"sliding_window": 9}),
    "mistral, window of one": ("Mistral", {"sliding_window": 1}),
    "mistral, odd widths": ("Mistral", {**ODD, "num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", {"hidden_size": 200, "intermediate_size": 250, "head_dim": 50}),
    "qwen2, tied, window in one layer": ("Qwen2", {"tie_word_embeddings": True, **WINDOWS}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": YARN}),
    "qwen3, tied, odd widths": ("Qwen3", {**ODD, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "qwen3, eight queries a key": ("Qwen3", {"num_attention_heads": 16, "head_dim": 64}),
}


def make(kind: str, seed: int = 0) -> Any:
    family, changes = KINDS[kind]
    torch.manual_seed(seed)
    return enlarged(AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**{**BASE, **changes})))


def enlarged(model: Any) -> Any:
    """Gives the model widely spread log-probs: large weights, non-zero biases, norm weights other than 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.train()


@dataclass
class Row:
    """A completion: its tokens, which of them were sampled, and their scores."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    sampled: list[bool] | None = None

    def add(self, ids: list[int], sample: Sample | None) -> None:
        """Appends sampled tokens, or tokens of a reply."""
        missing = [math.nan] * len(ids)
        self.ids += ids
        self.logprobs += missing if sample is None else sample.logprobs or missing
        self.entropies += missing if sample is None else sample.entropies or missing
        self.sampled = [*(self.sampled or ()), *[sample is not None] * len(ids)]


def requests(vocabulary: int, num_rows: int = 14, longest: int = 40) -> list[Request]:
    """Rows of different budgets behind a prompt of one token, a short one and two long ones."""
    generator = random.Random(0)
    prompts = [[generator.randrange(3, vocabulary) for _ in range(length)] for length in (1, 11, 83, 230)]
    return [Request(prompts[i % 4], 7 * i, 1 + (i * 29) % longest if i else longest) for i in range(num_rows)]


def rows_of(submitted: Sequence[Request], samples: Sequence[Sample]) -> list[Row]:
    return [Row(r.prompt_ids, s.ids, s.logprobs or [], s.entropies or []) for r, s in zip(submitted, samples)]


def batch_of(rows: Sequence[Row]) -> Batch:
    groups: dict[tuple[int, ...], int] = {}
    rollouts = []
    for i, row in enumerate(rows):
        prompt = Prompt(row.prompt, {"prompt": ""}, groups.setdefault(tuple(row.prompt), len(groups)))
        numbers: dict[str, Any] = {"sampling_logprobs": row.logprobs, "sampling_entropy": row.entropies}
        rollouts.append(Rollout(prompt, i, row.ids, "eos", "", "", sampled=row.sampled, **numbers))
    return collate(rollouts, [1.0] * len(rows), mask_truncated=False)


def assert_equal(scores: TokenScores, batch: Batch) -> None:
    """Log-probs and entropies of the trained tokens equal those of sampling to the last bit."""
    for name, actual, known in (
        ("log-probs", scores.logprobs, batch.sampling_logprobs),
        ("entropies", scores.entropy, batch.sampling_entropy),
    ):
        assert known is not None
        actual, known = actual.detach()[batch.trained], known[batch.trained]
        off = (actual - known).abs()
        assert torch.equal(actual, known), f"{name}: {int((off > 0).sum())} of {len(off)} differ, by up to {off.max()}"


def assert_trained_alike(model: Any, rows: Sequence[Row], temperature: float = 1.0) -> Batch:
    """With and without gradients; the batch of the rows."""
    batch, options = batch_of(rows), ForwardOptions(temperature)
    known = batch.sampling_logprobs
    assert known is not None and known[batch.trained].std() > 0.3, "log-probs differ widely"
    assert_equal(score_without_gradient(model, batch, options), batch)
    scores = score_tokens(model, batch, options)
    assert scores.logprobs.requires_grad
    assert_equal(scores, batch)
    return batch


@pytest.mark.quick(4)
@pytest.mark.parametrize(("kind", "num_threads"), [(kind, 1 + i % 2) for i, kind in enumerate(sorted(KINDS))])
def test_trained_as_sampled(kind: str, num_threads: int, threads: Callable[[int], None]):
    threads(num_threads)
    model = make(kind)
    submitted = requests(model.config.vocab_size)
    samples = NativeEngine(model).sample(submitted, OPTIONS)
    threads(3 - num_threads)
    assert_trained_alike(model, rows_of(submitted, samples))


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_decoder_in_bfloat16_computes_in_float32(kind: str):
    """As one in float32 does that has the same weights."""
    model, twin = make(kind), make(kind)
    for parameter in model.parameters():  # as loaded: buffers stay in float32
        parameter.data = parameter.data.bfloat16()
    twin.load_state_dict(model.state_dict())
    submitted, engine = requests(model.config.vocab_size), NativeEngine(model)
    samples = engine.sample(submitted, OPTIONS)
    assert engine.path == "compiled"
    batch = assert_trained_alike(model, rows_of(submitted, samples))
    assert_equal(score_tokens(twin, batch, ForwardOptions()), batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"min_p": 0.02, "repetition_penalty": 1.2},
        {"extra": {"do_sample": False}},
        {"eos_ids": tuple(range(40))},
        {"eos_ids": tuple(range(40)), "top_p": 0.8, "temperature": 0.7},
    ],
    ids=", ".join,
)
def test_however_tokens_are_chosen(changes: dict[str, Any]):
    options = replace(OPTIONS, **changes)
    model = make("qwen3, tied, odd widths")
    submitted = requests(model.config.vocab_size)
    samples = NativeEngine(model).sample(submitted, options)
    if "eos_ids" in changes:
        assert len({len(sample.ids) for sample in samples}) > 3, "rows of many lengths"
    assert_trained_alike(model, rows_of(submitted, samples), options.temperature)


@pytest.mark.parametrize("kind", ["mistral, window", "qwen3"])
def test_rows_that_gave_way_and_were_computed_anew(kind: str):
    model, options = make(kind), replace(OPTIONS, max_new_tokens=150, eos_ids=())
    config = model.config
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    prompts = ([5, 6, 7, 8, 9], [10, 11], [12, 13, 14])
    submitted = [Request(prompts[i // 3], i, 40 + 12 * i) for i in range(9)]
    tight = NativeEngine(model, kv_memory=300 * bytes_per_token)
    samples = tight.sample(submitted, options)
    assert tight.statistics.num_preempted > 0
    assert tight.statistics.num_prefilled > 100, "some were long when they were preempted"
    assert samples == NativeEngine(model).sample(submitted, options)
    assert samples == NativeEngine(model, max_rows=2).sample(submitted, options)
    assert_trained_alike(model, rows_of(submitted, samples))


@pytest.mark.parametrize("kind", ["mistral, window", "qwen3, tied, odd widths"])
def test_rows_longer_than_a_tile_of_keys(kind: str):
    model = make(kind)
    submitted = requests(model.config.vocab_size, num_rows=8, longest=240)
    options = replace(OPTIONS, max_new_tokens=240, eos_ids=())
    batch = assert_trained_alike(model, rows_of(submitted, NativeEngine(model).sample(submitted, options)))
    assert batch.num_tokens > 512, "more than a tile of tokens"


def sample_turns(engine: NativeEngine, submitted: Sequence[Request], vocabulary: int, *, keep: bool) -> list[Row]:
    """Rows of up to three turns, the later ones behind replies of 0 to 30 tokens."""
    generator = random.Random(1)
    rows = [Row(request.prompt_ids, [], [], [], []) for request in submitted]
    tickets: list[int | None] = [None] * len(rows)
    with engine.session(OPTIONS) as session:
        for turn in range(3):
            open_rows: dict[int, Row] = {}
            for i, row in enumerate(rows[: len(rows) - 2 * turn]):
                reply = [generator.randrange(3, vocabulary) for _ in range((0, 1, 5, 30)[i % 4])] if turn else []
                row.add(reply, None)
                context, before = [*row.prompt, *row.ids], tickets[i] if keep else None
                ticket = session.submit(Request(context, 50 * turn + i, 4 + 3 * i, continues=before, keep=keep))
                open_rows[ticket], tickets[i] = row, ticket
            while session.num_open:
                for ticket, sample in session.advance():
                    open_rows[ticket].add(sample.ids, sample)
    return rows


@pytest.mark.parametrize("kind", ["mistral, window", "qwen2", "qwen3"])
def test_turns_with_given_tokens_between_them(kind: str):
    model = make(kind)
    submitted = requests(model.config.vocab_size, num_rows=8)
    engine = NativeEngine(model)
    rows = sample_turns(engine, submitted, model.config.vocab_size, keep=True)
    assert engine.statistics.num_restored > 0
    assert_trained_alike(model, rows)
    tight = NativeEngine(model, kv_memory=engine.statistics.peak_bytes // 2)
    assert sample_turns(tight, submitted, model.config.vocab_size, keep=True) == rows
    assert tight.statistics.num_restored < engine.statistics.num_restored, "some were dropped"


def test_turns_that_nothing_was_kept_of_are_close():
    """Sampling takes the whole context as prompt, training that of the first turn, so sums have another order."""
    model = make("qwen3")
    submitted = requests(model.config.vocab_size, num_rows=8)
    batch = batch_of(sample_turns(NativeEngine(model), submitted, model.config.vocab_size, keep=False))
    scores = score_tokens(model, batch, ForwardOptions())
    assert batch.sampling_logprobs is not None
    at = batch.trained
    torch.testing.assert_close(scores.logprobs[at], batch.sampling_logprobs[at], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral, odd widths", "qwen3, eight queries a key"])
def test_many_rows_behind_one_prompt(kind: str):
    model = make(kind)
    submitted = [Request([5, 6, 7, *range(10, 40)], i, 1 + i % 9) for i in range(139)]
    assert_trained_alike(model, rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["mistral, window", "qwen3", "qwen3, eight queries a key"])
def test_prompts_that_begin_alike(kind: str):
    """Each of them samples as it does alone; two have more in common than the others."""
    model, system, more = make(kind), [5 + i * i % 90 for i in range(150)], [*range(10, 80)]
    prompts = [[*system, 7, 8], [*system, *more, 9], [*system, *more, 11, 12], [*system, *range(90, 200)]]
    submitted = [Request(prompts[i % 4], i, 3 + 5 * i) for i in range(8)]
    engine = NativeEngine(model)
    samples = engine.sample(submitted, OPTIONS)
    assert engine.statistics.num_prefilled == 150 + 2 + (70 + 1) + 2 + 110
    assert samples == [NativeEngine(model).sample([request], OPTIONS)[0] for request in submitted]
    rows = rows_of(submitted, samples)
    inputs = forward_inputs(model, batch_of(rows), ForwardOptions())
    assert len(inputs.ids) == 150 + 2 + (70 + 1) + 2 + 110 + sum(len(row.ids) - 1 for row in rows)
    assert_trained_alike(model, rows)


@pytest.mark.parametrize("kind", ["llama, tied, a large vocabulary", "mistral, window", "qwen3"])
def test_any_micro_batch(kind: str):
    model = make(kind)
    submitted = requests(model.config.vocab_size)
    batch = batch_of(rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)))
    for rows in ([0], [5], [3, 7, 11], [2, 1, 0], [13, 4, 9, 8, 6]):
        part = batch.select(rows)
        assert_equal(score_tokens(model, part, ForwardOptions()), part)


def training_passes(model: Any) -> dict[str, Callable[[Batch], TokenScores]]:
    """Training passes with different computations in the output head."""

    def precomputed(batch: Batch, shift: float) -> TokenScores:
        assert batch.sampling_logprobs is not None
        known = PrecomputedGradient(batch.sampling_logprobs + shift, torch.randn(batch.num_tokens))
        return score_tokens(model, batch, ForwardOptions(), known)

    def frozen(batch: Batch) -> TokenScores:
        model.lm_head.requires_grad_(False)
        scores = score_tokens(model, batch, ForwardOptions())
        model.lm_head.requires_grad_(True)
        return scores

    def checkpointed(batch: Batch) -> TokenScores:
        model.activation_checkpointing_enable()
        scores = score_tokens(model, batch, ForwardOptions())
        scores.logprobs.sum().backward()
        unplug(model)
        restore_modules(model)
        model.activation_checkpointing_disable()
        assert not any("forward" in module.__dict__ for module in model.modules())
        return scores

    return {
        "precomputed gradient": lambda batch: precomputed(batch, 0.0),
        "wrong precomputed gradient": lambda batch: precomputed(batch, 0.5),
        "a frozen head": frozen,
        "gradients of entropies": lambda batch: score_tokens(model, batch, ForwardOptions(entropy_gradient=True)),
        "checkpointing": checkpointed,
    }


@pytest.mark.parametrize("kind", ["llama, tied, a large vocabulary", "mistral, window", "qwen3"])
def test_every_way_of_training(kind: str):
    model = make(kind)
    submitted = requests(model.config.vocab_size)
    rows = rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS))
    batch = batch_of(rows)
    for score in training_passes(model).values():
        assert_equal(score(batch), batch)
        assert rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)) == rows
    assert_trained_alike(model, rows)


# ------------------------------------------------------------------------------------------------ other decoders

OTHERS: dict[str, dict[str, Any]] = {
    "Gemma": {},
    "Gemma3Text": {"sliding_window": 9},
    "Granite": {"head_dim": None},
    "GPTNeoX": {"head_dim": None, "num_key_value_heads": None},
    "Olmo2": {"head_dim": None},
    "Phi3": {"head_dim": None},
}
"""Decoders without a direct form: the kernels compute the matrix products and attention of their modules."""


def make_other(family: str) -> Any:
    settings = {name: value for name, value in {**BASE, **OTHERS[family]}.items() if value is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings))
    return enlarged(model)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_other_decoders(family: str):
    model = make_other(family)
    submitted = requests(300, num_rows=8, longest=14)
    unbounded = NativeEngine(model)
    samples = unbounded.sample(submitted, OPTIONS)
    assert_trained_alike(model, rows_of(submitted, samples))
    assert NativeEngine(model, max_rows=3).sample(submitted, OPTIONS) == samples
    assert_trained_alike(model, sample_turns(unbounded, submitted[:6], 300, keep=True))


def test_threads_cut_no_activation_elsewhere(threads: Callable[[int], None]):
    """PyTorch computes the last numbers of a thread's part by other code, whose GELU rounds otherwise."""
    model, submitted = make_other("Gemma"), requests(300, longest=20)
    threads(2)
    assert_trained_alike(model, rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters_within_layers(targets: Any, dtype: torch.dtype):
    config = peft.LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    model: Any = peft.get_peft_model(make("qwen3").to(dtype), config)
    submitted = requests(300)
    assert_trained_alike(model, rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)))


# ------------------------------------------------------------------------------------------------ the model itself


def test_sampling_leaves_no_part_replaced_that_is_computed_again():
    model = make("qwen3")
    model.activation_checkpointing_enable()
    NativeEngine(model).sample(requests(300, num_rows=2), OPTIONS)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_sampling_between_two_passes_that_are_computed_again():
    model = make("qwen3")
    submitted = requests(300)
    batch = batch_of(rows_of(submitted, NativeEngine(model).sample(submitted, OPTIONS)))
    plain = score_tokens(model, batch, ForwardOptions())
    expected = torch.autograd.grad(plain.logprobs.sum(), model.model.layers[0].mlp.up_proj.weight)[0]
    model.activation_checkpointing_enable()
    for _ in range(2):
        scores = score_tokens(model, batch, ForwardOptions())
        assert_equal(scores, batch)
        (actual,) = torch.autograd.grad(scores.logprobs.sum(), model.model.layers[0].mlp.up_proj.weight)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        again = NativeEngine(model).sample(submitted, OPTIONS)
        assert_equal(scores, batch_of(rows_of(submitted, again)))
