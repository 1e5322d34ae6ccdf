"""The flat layouts against the plain dense one: every loss, every head, adapters, gradient checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_batches import random_rows
from torch import nn
from transformers import BertConfig, BertLMHeadModel

from groupgrad.batch import Batch, StepTotals
from groupgrad.kernels.compile import SWITCH
from groupgrad.objectives import LOSSES, PolicyOptions, policy_loss
from groupgrad.scoring import blocks as blocks_module
from groupgrad.scoring.attention import attention_dropout, flat_obstacle
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.block_attention import BlockLayout
from groupgrad.scoring.blocks import TokenSpan, make_blocks
from groupgrad.scoring.forward import ForwardOptions, build_batch, layout_for, score_tokens
from groupgrad.scoring.layout import flat_layout
from groupgrad.types import Media

DENSE = ForwardOptions(layout="dense", tiled_head=False, entropy_gradient=True)
WAYS = [("shared", True), ("shared", False), ("packed", True), ("packed", False), ("dense", True)]


@st.composite
def batches(draw: Any) -> Batch:
    """Ragged batches: prompts of 1 to 9 tokens, 1 to 9 rows of 0 to 12 tokens in any order."""
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    rows = draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 12)), min_size=1, max_size=9))
    batch = random_batch(prompts, rows, seed=draw(st.integers(0, 2**20)))
    return begun_alike(batch) if draw(st.booleans()) else batch


def random_batch(prompts: list[int], rows: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Random rows with random advantages, a few tokens that are not trained, and totals of a larger step."""
    stream, batch = torch.Generator().manual_seed(seed), random_rows(prompts, rows, seed=seed)
    trained = torch.rand(batch.num_tokens, generator=stream) < 0.9
    totals = StepTotals(rows=len(rows) + 2.0, tokens=float(trained.sum()) + 5.0)
    return replace(batch, trained=trained, advantages=torch.randn(len(rows), generator=stream), totals=totals)


def begun_alike(batch: Batch) -> Batch:
    """The batch with the first prompt's tokens at the beginning of every prompt."""
    starts, ids = batch.prompt_offsets.tolist(), batch.prompt_ids.clone()
    for start, end in itertools.pairwise(starts):
        length = min(end - start, starts[1])
        ids[start : start + length] = ids[:length]
    return replace(batch, prompt_ids=ids)


def adapt(model: Any) -> Any:
    """The model with a LoRA adapter on attention and MLP, not at its starting point."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted


def loss_and_gradient(
    model: nn.Module, batch: Batch, way: ForwardOptions, loss_type: str, level: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy loss with KL and entropy bonus, and all gradients end to end."""
    model.zero_grad()
    options = PolicyOptions(
        loss_type=loss_type,  # pyright: ignore[reportArgumentType]
        importance_sampling_level=level,  # pyright: ignore[reportArgumentType]
        beta=0.05,
        epsilon_high=5.0 if loss_type == "cispo" else 0.2,
        max_completion_length=12,
    )
    loss = policy_loss(score_tokens(model, batch, way), batch, options, entropy_coef=0.01).loss
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    return loss.detach(), torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


@pytest.fixture(scope="module")
def policies(make_model: Callable[..., Any]) -> dict[tuple[bool, bool], Any]:
    """The models of the property test, by (adapter, gradient checkpointing)."""
    made = {}
    for adapter, recompute in ((False, False), (True, True)):
        model = make_model(initializer_range=0.1)
        if adapter:
            model = adapt(model)
        model.train()
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        made[adapter, recompute] = model
    return made


@pytest.mark.quick("dapo", "luspo", "vespo")
@pytest.mark.parametrize("loss_type", sorted(LOSSES))
@pytest.mark.usefixtures("short_beginnings")
@settings(max_examples=2, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches(), level=st.sampled_from(["token", "sequence"]))
def test_layouts_and_heads_agree_for_every_loss(loss_type: str, policies, batch, level):
    for (adapter, recompute), model in policies.items():
        # An older policy and a reference near the present one, as in a run: far off, ratios blow rounding up.
        noise = [0.02 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        with torch.no_grad():
            now = score_tokens(model, batch, DENSE).logprobs
        batch = replace(batch, old_logprobs=now + noise[0], ref_logprobs=now + noise[1])
        loss, gradient = loss_and_gradient(model, batch, DENSE, loss_type, level)
        for layout, tiled in WAYS:
            way = ForwardOptions(layout=layout, tiled_head=tiled, entropy_gradient=True)  # pyright: ignore
            actual, found_gradient = loss_and_gradient(model, batch, way, loss_type, level)
            where = f"{layout}, tiled head {tiled}, adapter {adapter}, checkpointing {recompute}"
            # vespo weighs a row by the product of its up to twelve ratios. Log-probs here are about -4, where float32
            # steps by 4.8e-7, so the two ways' log weights differ by up to 4e-6 before the loss is computed at all
            # (sums in float64 change nothing), and rows of opposite signs cancel: 7e-6 was found in 60 batches.
            slack = 10 if loss_type == "vespo" else 1
            assert float((actual - loss).abs()) <= slack * 1e-6 * max(1.0, float(loss.abs())), where
            assert float((found_gradient - gradient).norm()) <= 1e-5 * float(gradient.norm()), where


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_layers_see_the_plan_of_their_own_forward_pass(make_model, use_reentrant):
    first = random_batch([5, 3], [(0, 4), (1, 6), (0, 2)])
    second = random_batch([2, 9], [(1, 3), (0, 5)], seed=1)
    model = make_model(initializer_range=0.1).train()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        scores = [score_tokens(model, batch, ForwardOptions()) for batch in (first, second)]
        sum(s.logprobs.sum() for s in scores).backward()  # pyright: ignore
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    torch.testing.assert_close(gradient(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("short_beginnings")
def test_every_architecture_gives_the_dense_numbers(any_model, monkeypatch):
    if flat_obstacle(any_model) is not None:
        pytest.skip(str(flat_obstacle(any_model)))
    batch = begun_alike(random_batch([3, 7, 12], [(p, n) for n in (0, 1, 5, 9, 13) for p in (2, 0, 1)]))
    expected = score_tokens(any_model, batch, DENSE)
    for layout, tile in (("shared", 4), ("shared", 256), ("packed", 7)):
        monkeypatch.setattr(blocks_module, "QUERY_TILE", tile)
        scores = score_tokens(any_model, batch, ForwardOptions(layout=layout))
        # In qwen3-tied the dense layout is 8.1e-6 from float64, the shared one 4.8e-6.
        torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=0, atol=2e-5)
        torch.testing.assert_close(scores.entropy, expected.entropy, rtol=0, atol=2e-5)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=20),
    tile=st.sampled_from([4, 9, 256]),
    bound=st.sampled_from([1, 200, 1 << 19]),
)
def test_every_token_is_a_query_once(prompts, lengths, tile, bound):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "QUERY_TILE", tile)
        patch.setattr(blocks_module, "BLOCK_SCORES", bound)
        spans, end = [], 0
        for length in prompts:
            spans.append(TokenSpan(end, length))
            end += length
        for number, (prompt, length) in enumerate(lengths):
            shared = spans[prompt % len(prompts)]
            seen = shared.length if number % 3 else 1 + number % shared.length
            spans.append(TokenSpan(end, length, shared=replace(shared, length=seen)))
            end += length
        blocks = make_blocks(spans)
    places = torch.cat([block.queries.flatten() for block in blocks])
    assert sorted(places[places < end].tolist()) == list(range(end))
    for block in blocks:
        places = torch.zeros(0) if block.prompts is None else block.prompts[block.prompts < end]
        assert len(places.unique()) == len(places), "a block has a prompt's token twice"


def test_a_prompt_that_begins_another_is_a_part_of_it():
    """The first two of three prompts are beginnings of the third; a row sees only the tokens that it continues."""
    batch = build_batch([[5], [5, 6], [5, 6, 7], [8]], [1, 2, 0, 3, 1], [[1] * 3, [2] * 2, [3] * 2, [4] * 2, []])
    flat = flat_layout(batch, shared_prefixes=True)
    assert flat.ids.tolist() == [5, 6, 7, 1, 1, 2, 3, 8, 4]
    assert flat.positions.tolist() == [0, 1, 2, 2, 3, 3, 1, 0, 1]
    assert flat.predictors.tolist() == [1, 3, 4, 2, 5, 0, 6, 7, 8]
    zeros, ones = torch.zeros(1, 9, 16), torch.eye(9, 16)[None]
    weights = flat.attention.attend(zeros, zeros, ones, AttentionCall(layer=0, scale=1.0))[:, 0, :9]
    seen = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [0, 1, 2, 5], [0, 6], [7], [7, 8]]
    expected = [[1 / len(places) if place in places else 0.0 for place in range(9)] for places in seen]
    torch.testing.assert_close(weights, torch.tensor(expected))
    assert len(flat_layout(batch).ids) == 12  # where a recurrent layer has a state at the end of a prompt only


@pytest.mark.parametrize("window", [None, 2, 4])
def test_attention_against_float64(window):
    """Grouped queries, soft cap, window and sinks against a masked softmax over all pairs, gradients included."""
    batch = random_batch([3, 5], [(0, 6), (1, 2), (0, 4)])
    flat = flat_layout(batch)
    # A prompt of 3 tokens and its rows of 5 and 3, then one of 5 and its row of 1: who is who's prompt.
    prompt_of = torch.tensor([0] * 3 + [0] * 5 + [0] * 3 + [3] * 5 + [3])
    row = torch.tensor([0] * 3 + [1] * 5 + [2] * 3 + [3] * 5 + [4])
    allowed = (row[:, None] == row) | (prompt_of[:, None] == row)
    position = flat.positions
    distance = position[:, None] - position
    seen = allowed & (distance >= 0) & (distance < (window or 99))
    torch.manual_seed(0)
    inputs = [torch.randn(h, 17, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    query, key, value = inputs
    scores = 3.0 * torch.tanh(query @ key.repeat_interleave(2, 0).transpose(1, 2) * 0.7 / 3.0)
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(4, 17, 1)], dim=-1)
    expected = (scores.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 0)).transpose(0, 1)
    weights = torch.randn(17, 4, 4, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), [*inputs, sinks])
    single = [x.detach().float().requires_grad_() for x in (*inputs, sinks)]
    call = AttentionCall(layer=0, scale=0.7, softcap=3.0, window=window, sinks=single[3])
    actual = flat.attention.attend(single[0], single[1], single[2], call)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad((actual * weights.float()).sum(), single)
    for gradient, want in zip(gradients, wanted):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-5)


def test_attention_dropout_is_left_to_the_dense_layout(build):
    model = build("llama", attention_dropout=0.5).train()
    batch = random_batch([4], [(0, 5)])
    torch.manual_seed(0)
    first = score_tokens(model, batch, ForwardOptions()).logprobs
    assert not torch.allclose(first, score_tokens(model, batch, ForwardOptions()).logprobs)
    with pytest.raises(ValueError, match=r"dropout of 0\.5"):
        score_tokens(model, batch, ForwardOptions(layout="shared"))


def test_attention_dropout_in_a_layer_of_plain_dropout_is_found():
    """BERT's attention calls its layer `dropout`; a decoder is trained in the dense layout for it."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = BertLMHeadModel(BertConfig(**sizes, num_attention_heads=4, is_decoder=True)).train()
    assert attention_dropout(model) == 0.1
    assert layout_for(model, ForwardOptions()) == "dense"
    assert layout_for(model.eval(), ForwardOptions()) == "shared"


def test_a_row_with_images_of_its_own_has_its_own_prompt(batch):
    """Rows 1 and 4 share a prompt of one token; with images of its own, row 1 lies as in the packed layout."""
    images = Media((), {}, {}, "images")
    shared = flat_layout(batch)
    mixed = flat_layout(replace(batch, row_media=(None, images, None, None, None)))
    assert [(part.prompt, part.row) for part in shared.spans if part.prompt == 1] == [(1, None), (1, 1), (1, 4)]
    assert [(part.prompt, part.row, part.position, part.length) for part in mixed.spans if part.prompt == 1] == [
        (1, None, 0, 1),
        (1, 1, 0, 7),
        (1, 4, 1, 2),
    ]
    assert mixed.ids[mixed.predictors[3:10]].tolist() == [11, 22, 23, 24, 25, 26, 27]
    alone = flat_layout(replace(batch, row_media=(None, images, None, None, images)))
    assert [(part.row, part.position) for part in alone.spans if part.prompt == 1] == [(1, 0), (4, 0)]


@pytest.mark.parametrize("width", [16, 64])
def test_scores_behind_few_keys_are_rounded_once(width: int, monkeypatch):
    monkeypatch.setenv(SWITCH, "0")
    torch.manual_seed(0)
    prompt = TokenSpan(0, 9)
    rows = [TokenSpan(9 + 20 * i, 20, shared=prompt) for i in range(4)]
    query, key, value = (torch.randn(4, 89, width) for _ in range(3))
    query *= 6  # scores of up to 30: two thirds of the weight on one key
    call = AttentionCall(0, width**-0.5)
    actual = BlockLayout([prompt, *rows]).attend(query, key, value, call)
    for row in rows:
        places = torch.cat([torch.arange(9), torch.arange(row.start, row.start + 20)])
        q, k, v = (x[:, places].double() for x in (query, key, value))
        hidden = torch.ones(29, 29, dtype=torch.bool).triu(1)
        weights = (width**-0.5 * q @ k.transpose(1, 2)).masked_fill(hidden, float("-inf")).softmax(-1)
        off = actual[row.start : row.start + 20].double() - (weights @ v)[:, 9:].transpose(0, 1)
        assert off.square().mean().sqrt() < 1.4e-7
