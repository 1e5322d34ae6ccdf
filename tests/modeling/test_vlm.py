"""Models that see: scores and gradients are those of one call a row with what the model's own processor gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sights import ADAPTERS, NAMES, Seen, adapted, joined_media, make_batch, make_hybrid, make_seen, plain_logprobs
from torch import nn
from vision import picture

from groupgrad.batching.collate import collate
from groupgrad.modeling import vlm as vision
from groupgrad.modeling.reference import Reference
from groupgrad.modeling.scoring.attention import AttentionCall, arguments
from groupgrad.modeling.scoring.forward import ForwardOptions, Layout, score_tokens
from groupgrad.modeling.scoring.old_and_ref import OldAndRefScorer
from groupgrad.modeling.self_check import check_layout, random_batch
from groupgrad.modeling.vlm import (
    BidirectionalImagePlan,
    concat_media_tensors,
    is_multimodal,
    placeholder_ids,
    prompt_images,
)
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.types import Media, Rollout

LAYOUTS: tuple[Layout, ...] = ("dense", "packed", "shared")


@pytest.fixture(scope="module", params=NAMES)
def seen(request) -> Seen:
    return make_seen(request.param)


@pytest.fixture(scope="module")
def qwen() -> Seen:
    return make_seen("qwen2_vl")


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the parameters that train and have one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found) if g is not None}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To 1e-5 of each parameter's gradient; of one that is all rounding, of the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        gap = float((found[name] - value).norm())
        assert gap <= 1e-5 * max(float(value.norm()), 0.01 * largest), (name, gap, float(value.norm()))


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_path(name: str, layout: Layout, adapters: str):
    seen = make_seen(name)
    model, batch = adapted(seen.model, adapters), make_batch(seen)
    expected = plain_logprobs(model, seen)
    scores = score_tokens(model, batch, ForwardOptions(layout=layout))
    torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=1e-5)
    weights = torch.linspace(-1, 2, batch.num_tokens)
    found = gradients(model, (weights * scores.logprobs).sum())
    assert_same_gradients(found, gradients(model, (weights * expected).sum()))
    in_vision = [n for n, g in found.items() if ("visual" in n or "vision" in n) and float(g.norm()) > 1e-4]
    assert bool(in_vision) == (adapters != "lora_text")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_images_matter(seen: Seen, layout: Layout):
    """What is compared above is not blind to its images: others give other log-probs."""
    batch = make_batch(seen)
    options = ForwardOptions(layout=layout)
    before = score_tokens(seen.model, batch, options).logprobs
    assert batch.media is not None
    turned = [
        None
        if media is None
        else replace(media, tensors={**media.tensors, "pixel_values": -media.tensors["pixel_values"]})
        for media in batch.media
    ]
    after = score_tokens(seen.model, replace(batch, media=tuple(turned)), options).logprobs
    blind = torch.tensor([group == 1 for group in batch.prompt_of_row.tolist()])[batch.row_of_token]
    torch.testing.assert_close(after[blind], before[blind], rtol=0, atol=1e-5)
    assert float((after - before)[~blind].abs().mean()) > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_that_looks_back_less_than_an_image_is_long(layout: Layout):
    """An image has 4 tokens, of which a layer's window holds 2: those before it are out of sight, those behind not."""
    seen = make_seen("gemma3")
    seen.model.config.text_config.sliding_window = 2
    for module in seen.model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 2
    scores = score_tokens(seen.model, make_batch(seen), ForwardOptions(layout=layout)).logprobs
    torch.testing.assert_close(scores, plain_logprobs(seen.model, seen), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sampled_placeholder_is_a_token_like_any_other(seen: Seen, layout: Layout):
    """Another token with the same embedding makes the same of what follows."""
    model, other = seen.model, 60
    embedding = model.get_input_embeddings().weight
    kept = embedding[other].detach().clone()
    rows = ((0, [20, seen.placeholder, 30, 40]), (2, [seen.placeholder, 33]), (1, [seen.placeholder, 24]))
    others = tuple((group, [other if token == seen.placeholder else token for token in ids]) for group, ids in rows)
    scores = score_tokens(model, make_batch(seen, rows), ForwardOptions(layout=layout)).logprobs
    try:
        with torch.no_grad():
            embedding[other] = embedding[seen.placeholder]
        expected = plain_logprobs(model, seen, others)
    finally:
        with torch.no_grad():
            embedding[other] = kept
    ordinary = torch.tensor([token != seen.placeholder for _, ids in rows for token in ids])
    torch.testing.assert_close(scores[ordinary], expected[ordinary], rtol=0, atol=1e-5)
    assert bool(scores.isfinite().all())


def test_rows_without_images_need_none(seen: Seen):
    rows = ((1, [20, 21]), (1, [seen.placeholder, 23, 1]))
    batch = make_batch(seen, rows)
    assert batch.media is None
    dense, *flat = (score_tokens(seen.model, batch, ForwardOptions(layout=layout)).logprobs for layout in LAYOUTS)
    for scores in flat:
        torch.testing.assert_close(scores, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_that_a_tool_puts_into_a_completion(seen: Seen, layout: Layout):
    """A prompt with images, sampled text, a tool's output with another image, sampled text; beside rows that share the
    prompt and rows without any image."""
    prompt, tool = seen.cases[0].prompt, seen.cases[2].prompt
    said, more = [20, 21, 22], [30, 31, 32]
    completion, sampled = [*said, *tool.ids, *more], [True] * 3 + [False] * len(tool.ids) + [True] * 3
    media = joined_media(prompt.media, len(said), tool.media)
    rollouts = [
        Rollout(prompt, 0, [40, 41], "eos", "", ""),
        Rollout(prompt, 1, completion, "eos", "", "", sampled=sampled, media=media),
        Rollout(seen.cases[1].prompt, 2, [50, 51], "eos", "", ""),
    ]
    batch = collate(rollouts, [0.0] * 3, mask_truncated=False)
    scores = score_tokens(seen.model, batch, ForwardOptions(layout=layout))
    ids = torch.tensor([prompt.ids + completion])
    types = {name: torch.cat([value, value.new_zeros(3)])[None] for name, value in media.token_tensors.items()}
    taken = {name: value for name, value in types.items() if name in arguments(seen.model)}
    logits = seen.model(input_ids=ids, use_cache=False, **concat_media_tensors([media]), **taken).logits[0].double()
    expected = torch.log_softmax(logits[len(prompt.ids) - 1 : -1], dim=-1)
    expected = expected.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)[torch.tensor(sampled)].float()
    others = plain_logprobs(seen.model, seen, ((0, [40, 41]), (1, [50, 51])))
    everything = torch.cat([others[:2], expected, others[2:]])
    torch.testing.assert_close(scores.logprobs[batch.trained], everything, rtol=0, atol=1e-5)
    found = gradients(seen.model, scores.logprobs.sum())
    assert_same_gradients(found, gradients(seen.model, everything.sum()))


def test_parts_of_a_batch_keep_their_images(seen: Seen):
    batch = make_batch(seen)
    whole = score_tokens(seen.model, batch, ForwardOptions()).logprobs
    for rows in ([0, 1], [3, 5, 4], [2]):
        picked = torch.isin(batch.row_of_token, torch.tensor(rows))
        part = batch.select(sorted(rows))
        torch.testing.assert_close(
            score_tokens(seen.model, part, ForwardOptions()).logprobs, whole[picked], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_gradient_checkpointing_changes_nothing(seen: Seen, reentrant: bool):
    model, batch = seen.model, make_batch(seen)
    weights = torch.linspace(-1, 2, batch.num_tokens)

    def found() -> dict[str, torch.Tensor]:
        scores = score_tokens(model, batch, ForwardOptions())
        model.zero_grad()
        (weights * scores.logprobs).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.train()
    try:
        expected = found()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert_same_gradients(found(), expected)
    finally:
        model.gradient_checkpointing_disable()
        model.zero_grad()
        model.eval()


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
@pytest.mark.parametrize("adapters", ["full", "lora_all"])
def test_the_reference_sees_what_the_policy_saw(name: str, adapters: str):
    seen = make_seen(name)
    model, batch = adapted(seen.model, adapters), make_batch(seen)
    before = plain_logprobs(model, seen).detach()
    reference = Reference(model, adapter_is_fresh=False, is_synced=False)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.mul_(0.9)
    scored = OldAndRefScorer(model, reference, ForwardOptions(), "cpu")(batch, old=True)
    torch.testing.assert_close(scored.ref_logprobs, before, rtol=0, atol=1e-5)
    torch.testing.assert_close(scored.old_logprobs, plain_logprobs(model, seen).detach(), rtol=0, atol=1e-5)


def test_a_model_that_carries_a_state_sees_in_rows():
    seen = make_hybrid()
    report = check_layout(seen.model, ForwardOptions(), example=example_prompt(seen.processor))
    assert (report.layout, report.tiled_head, report.reason) == ("dense", True, "it carries a recurrent state")
    scores = score_tokens(seen.model, make_batch(seen), report.options(ForwardOptions())).logprobs
    expected = plain_logprobs(seen.model, seen)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(seen.model, scores.sum()), gradients(seen.model, expected.sum()))


# ------------------------------------------------------------------------------------ the look before a run


def test_the_check_tries_the_images(seen: Seen):
    example = example_prompt(seen.processor)
    batch = random_batch(seen.model, example)
    assert batch.media is not None
    assert batch.num_rows == random_batch(seen.model).num_rows + 2
    assert seen.placeholder in batch.completion_ids.tolist()
    report = check_layout(seen.model, ForwardOptions(), example=example)
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    assert report.difference is not None
    assert report.difference < 1e-4


def test_a_model_whose_images_look_ahead_in_a_way_that_is_not_known_is_run_dense(monkeypatch):
    """Without images nobody would notice."""
    seen = make_seen("gemma3")
    monkeypatch.setattr(vision, "has_bidirectional_images", lambda _type: False)
    assert check_layout(seen.model, ForwardOptions()).layout == "shared"
    report = check_layout(seen.model, ForwardOptions(), example=example_prompt(seen.processor))
    assert report.layout == "dense"
    assert "log-probs of the shared layout with the tiled head differ by" in str(report.reason)
    scores = score_tokens(seen.model, make_batch(seen), report.options(ForwardOptions())).logprobs
    torch.testing.assert_close(scores, plain_logprobs(seen.model, seen), rtol=0, atol=1e-5)


def test_a_processor_that_does_not_fit_is_an_error_before_training(qwen: Seen):
    example = example_prompt(make_seen("llava_next").processor)
    with pytest.raises(ValueError, match=r"Qwen2VLForConditionalGeneration fails at a prompt with one small image"):
        check_layout(qwen.model, ForwardOptions(), example=example)


# ------------------------------------------------------------------------------------ the parts


def media(types: list[int] | None = None, **tensors: torch.Tensor) -> Media:
    token_tensors = {} if types is None else {"mm_token_type_ids": torch.tensor(types)}
    return Media((), tensors, token_tensors, "key")


def test_tensors_of_several_shapes_are_filled_with_zeros():
    first, second = torch.ones(1, 2, 3), 2 * torch.ones(2, 1, 4)
    found = concat_media_tensors([media(pixels=first), media(pixels=second, sizes=torch.tensor([5]))])
    assert found["pixels"].tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 0]],
        [[2, 2, 2, 2], [0, 0, 0, 0]],
        [[2, 2, 2, 2], [0, 0, 0, 0]],
    ]
    assert found["sizes"].tolist() == [5]


def test_positions_follow_the_images(qwen: Seen):
    """An image of 2 by 3 merged patches spans 3 positions: text, image at 2 + (row, column), text from 5 on."""
    token = qwen.placeholder
    ids = torch.tensor([50, 51, *[token] * 6, 52])
    seen = prompt_images(qwen.model, ids, media([0, 0, 1, 1, 1, 1, 1, 1, 0], image_grid_thw=torch.tensor([[1, 4, 6]])))
    assert seen.rope_at(0, 11).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert seen.shift == -3
    assert seen.rope_at(10, 2).tolist() == [[7, 8]] * 3
    assert seen.rope_at(7, 2).tolist() == [[2, 5], [3, 5], [4, 5]]


def test_placeholders_behind_the_prompt_are_no_images(qwen: Seen):
    token = qwen.placeholder
    ids = torch.tensor([50, token, 51, token, 52])
    grid: dict[str, Any] = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    assert prompt_images(qwen.model, ids, media([0, 1, 0], **grid)).mask.tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_which_models_see(model):
    assert not is_multimodal(model)
    assert placeholder_ids(model) == ()
    seen = make_seen("gemma3")
    assert is_multimodal(seen.model)
    assert seen.placeholder in placeholder_ids(seen.model)
    assert prompt_images(seen.model, torch.tensor(seen.cases[2].prompt.ids), seen.cases[2].prompt.media).spans == (
        (9, 13),
    )


def test_the_same_picture_is_one_prompt(qwen: Seen):
    twice = [example_prompt(qwen.processor, images=[picture("red")]) for _ in range(2)]
    other = example_prompt(qwen.processor, images=[picture("blue")])
    assert twice[0].identity == twice[1].identity
    assert twice[0].identity != other.identity


class _NoAttention:
    """A plan under which every token gets zeros."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return torch.zeros(query.shape[1], query.shape[0], value.shape[2])


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0])])
def test_tokens_of_an_image_see_their_row_up_to_the_images_end(softcap, window, sinks):
    """A row from place 1 on, its image at 3 to 5, two heads over one of keys; the others keep what the plan gave."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, 4), torch.randn(1, 8, 4), torch.randn(1, 8, 4)
    call = AttentionCall(layer=0, scale=0.7, softcap=softcap, window=window, sinks=sinks)
    found = BidirectionalImagePlan(_NoAttention(), [(1, 3, 6)]).attend(query, key, value, call)
    for head in range(2):
        for place in range(3, 6):
            seen = [i for i in range(1, 6) if window is None or place - i < window]
            scores = torch.stack([0.7 * (query[head, place] @ key[0, i]) for i in seen])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp() / (scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp()))
            torch.testing.assert_close(found[place, head], weights @ value[0, seen])
    assert not found[[0, 1, 2, 6, 7]].any()
