"""Vision-language models: scores and gradients equal one forward pass a row on the processor's own inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_vlms import make_image
from torch import nn
from vlm_batches import HYBRID, NAMES, VLMSetup, adapted, concat_media, make_batch, make_vlm_setup, plain_logprobs

from groupgrad.batching.collate import collate
from groupgrad.models.reference import Reference
from groupgrad.models.unwrapping import arguments, is_multimodal, placeholder_ids
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.scoring import vlm as vlm_module
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.forward import ForwardOptions, InputLayout, OldAndRefScorer, score_tokens
from groupgrad.scoring.self_check import check_layout, random_batch
from groupgrad.scoring.vlm import BidirectionalImageLayout, concat_media_tensors, prompt_images
from groupgrad.types import Media, Rollout

LAYOUTS: tuple[InputLayout, ...] = ("dense", "packed", "shared")
FEW = ("qwen3_vl", "gemma3", "idefics3")
"""Image features in several layers; attention both ways within an image; images in tiles of several shapes."""


@pytest.fixture(scope="module", params=FEW)
def vlm(request) -> VLMSetup:
    return make_vlm_setup(request.param)


@pytest.fixture(scope="module")
def qwen() -> VLMSetup:
    return make_vlm_setup("qwen2_vl")


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the trained parameters that have one."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    actual = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, actual) if g is not None}


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within 1e-5 of each gradient's norm, or of 1% of the largest norm for gradients of mere rounding."""
    assert actual.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        gap = float((actual[name] - value).norm())
        assert gap <= 1e-5 * max(float(value.norm()), 0.01 * largest), (name, gap, float(value.norm()))


PATHS = [(name, "lora_all") for name in (*NAMES, HYBRID)]
PATHS += [(name, adapters) for name in FEW for adapters in ("full", "lora_text")]


@pytest.mark.quick("gemma3-full", "qwen3_vl-lora_text", "qwen2_5_vl-lora_all", "qwen3_5-lora_all")
@pytest.mark.parametrize(("name", "adapters"), PATHS)
def test_path(name: str, adapters: str):
    """Adapters everywhere include those of the language model; alone these train without the vision tower."""
    vlm = make_vlm_setup(name)
    model, batch = adapted(vlm.model, adapters), make_batch(vlm)
    expected = plain_logprobs(model, vlm)
    weights = torch.linspace(-1, 2, batch.num_tokens)
    plain = gradients(model, (weights * expected).sum())
    in_vision = [n for n, g in plain.items() if ("visual" in n or "vision" in n) and float(g.norm()) > 1e-4]
    assert bool(in_vision) == (adapters != "lora_text")
    for layout in LAYOUTS:
        scores = score_tokens(model, batch, ForwardOptions(layout=layout))
        torch.testing.assert_close(scores.logprobs, expected, rtol=0, atol=1e-5, msg=layout)
        assert_same_gradients(gradients(model, (weights * scores.logprobs).sum()), plain)


@pytest.mark.parametrize("name", NAMES)
def test_the_images_matter(name: str):
    """The comparison above depends on the images: others give other log-probs."""
    vlm = make_vlm_setup(name)
    batch, options = make_batch(vlm), ForwardOptions(layout="shared")
    before = score_tokens(vlm.model, batch, options).logprobs
    assert batch.media is not None
    turned = [
        None
        if media is None
        else replace(media, tensors={**media.tensors, "pixel_values": -media.tensors["pixel_values"]})
        for media in batch.media
    ]
    after = score_tokens(vlm.model, replace(batch, media=tuple(turned)), options).logprobs
    blind = torch.tensor([group == 1 for group in batch.prompt_of_row.tolist()])[batch.row_of_token]
    torch.testing.assert_close(after[blind], before[blind], rtol=0, atol=1e-5)
    assert float((after - before)[~blind].abs().mean()) > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sliding_window_shorter_than_an_image(layout: InputLayout):
    """An image has 4 tokens and the window 2: earlier tokens leave the window, later ones of the image do not."""
    vlm = make_vlm_setup("gemma3")
    vlm.model.config.text_config.sliding_window = 2
    for module in vlm.model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = 2
    scores = score_tokens(vlm.model, make_batch(vlm), ForwardOptions(layout=layout)).logprobs
    torch.testing.assert_close(scores, plain_logprobs(vlm.model, vlm), rtol=0, atol=1e-5)


def test_a_sampled_placeholder_is_an_ordinary_token(vlm: VLMSetup):
    """Another token with the same embedding gives the same log-probs afterwards."""
    model, other = vlm.model, 60
    embedding = model.get_input_embeddings().weight
    kept = embedding[other].detach().clone()
    rows = ((0, [20, vlm.placeholder, 30, 40]), (2, [vlm.placeholder, 33]), (1, [vlm.placeholder, 24]))
    others = tuple((group, [other if token == vlm.placeholder else token for token in ids]) for group, ids in rows)
    batch = make_batch(vlm, rows)
    scores = [score_tokens(model, batch, ForwardOptions(layout=layout)).logprobs for layout in LAYOUTS]
    try:
        with torch.no_grad():
            embedding[other] = embedding[vlm.placeholder]
        expected = plain_logprobs(model, vlm, others)
    finally:
        with torch.no_grad():
            embedding[other] = kept
    ordinary = torch.tensor([token != vlm.placeholder for _, ids in rows for token in ids])
    for found in scores:
        torch.testing.assert_close(found[ordinary], expected[ordinary], rtol=0, atol=1e-5)
        assert bool(found.isfinite().all())


def test_rows_without_images_need_none(vlm: VLMSetup):
    rows = ((1, [20, 21]), (1, [vlm.placeholder, 23, 1]))
    batch = make_batch(vlm, rows)
    assert batch.media is None
    dense, *flat = (score_tokens(vlm.model, batch, ForwardOptions(layout=layout)).logprobs for layout in LAYOUTS)
    for scores in flat:
        torch.testing.assert_close(scores, dense, rtol=0, atol=1e-5)


def test_tool_images_in_a_completion(vlm: VLMSetup):
    """A prompt with images, sampled text, a tool reply with another image, sampled text; beside a row that shares the
    prompt and a row without images."""
    prompt, tool = vlm.cases[0].prompt, vlm.cases[2].prompt
    said, more = [20, 21, 22], [30, 31, 32]
    completion, sampled = [*said, *tool.ids, *more], [True] * 3 + [False] * len(tool.ids) + [True] * 3
    media = concat_media(prompt.media, len(said), tool.media)
    rollouts = [
        Rollout(prompt, 0, [40, 41], "eos", "", ""),
        Rollout(prompt, 1, completion, "eos", "", "", sampled=sampled, media=media),
        Rollout(vlm.cases[1].prompt, 2, [50, 51], "eos", "", ""),
    ]
    batch = collate(rollouts, [0.0] * 3, mask_truncated=False)
    ids = torch.tensor([prompt.ids + completion])
    types = {name: torch.cat([value, value.new_zeros(3)])[None] for name, value in media.token_tensors.items()}
    taken = {name: value for name, value in types.items() if name in arguments(vlm.model)}
    logits = vlm.model(input_ids=ids, use_cache=False, **concat_media_tensors([media]), **taken).logits[0].double()
    expected = torch.log_softmax(logits[len(prompt.ids) - 1 : -1], dim=-1)
    expected = expected.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)[torch.tensor(sampled)].float()
    others = plain_logprobs(vlm.model, vlm, ((0, [40, 41]), (1, [50, 51])))
    everything = torch.cat([others[:2], expected, others[2:]])
    plain = gradients(vlm.model, everything.sum())
    for layout in LAYOUTS:
        scores = score_tokens(vlm.model, batch, ForwardOptions(layout=layout))
        torch.testing.assert_close(scores.logprobs[batch.trained], everything, rtol=0, atol=1e-5, msg=layout)
        assert_same_gradients(gradients(vlm.model, scores.logprobs.sum()), plain)


def test_parts_of_a_batch_keep_their_images(vlm: VLMSetup):
    batch = make_batch(vlm)
    whole = score_tokens(vlm.model, batch, ForwardOptions()).logprobs
    for rows in ([0, 1], [3, 5, 4], [2]):
        picked = torch.isin(batch.row_of_token, torch.tensor(rows))
        part = batch.select(sorted(rows))
        torch.testing.assert_close(
            score_tokens(vlm.model, part, ForwardOptions()).logprobs, whole[picked], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_gradient_checkpointing_changes_nothing(vlm: VLMSetup, reentrant: bool):
    model, batch = vlm.model, make_batch(vlm)
    weights = torch.linspace(-1, 2, batch.num_tokens)

    def actual() -> dict[str, torch.Tensor]:
        scores = score_tokens(model, batch, ForwardOptions())
        model.zero_grad()
        (weights * scores.logprobs).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.train()
    try:
        expected = actual()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert_same_gradients(actual(), expected)
    finally:
        model.gradient_checkpointing_disable()
        model.zero_grad()
        model.eval()


@pytest.mark.parametrize(("name", "adapters"), [("qwen3_vl", "full"), ("gemma3", "lora_all")])
def test_the_reference_gets_the_images_of_the_policy(name: str, adapters: str):
    vlm = make_vlm_setup(name)
    model, batch = adapted(vlm.model, adapters), make_batch(vlm)
    before = plain_logprobs(model, vlm).detach()
    reference = Reference(model, adapter_is_fresh=False, is_synced=False)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.mul_(0.9)
    scorer = OldAndRefScorer(model, reference, ForwardOptions(), "cpu")
    torch.testing.assert_close(scorer.reference_logprobs(batch), before, rtol=0, atol=1e-5)
    torch.testing.assert_close(scorer.policy(batch).logprobs, plain_logprobs(model, vlm).detach(), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ the start-up check


@pytest.mark.parametrize("name", [*NAMES, HYBRID])
def test_the_layout_check_includes_images(name: str):
    vlm = make_vlm_setup(name)
    example = example_prompt(vlm.processor)
    batch = random_batch(vlm.model, example)
    assert batch.media is not None
    assert batch.num_rows == random_batch(vlm.model).num_rows + 2
    assert vlm.placeholder in batch.completion_ids.tolist()
    report = check_layout(vlm.model, ForwardOptions(), example=example)
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    assert report.difference is not None
    assert report.difference < 1e-4


def test_unknown_bidirectional_attention_is_run_dense(monkeypatch):
    """Text alone would not show it."""
    vlm = make_vlm_setup("gemma3")
    monkeypatch.setattr(vlm_module, "has_bidirectional_images", lambda _type: False)
    assert check_layout(vlm.model, ForwardOptions()).layout == "shared"
    report = check_layout(vlm.model, ForwardOptions(), example=example_prompt(vlm.processor))
    assert report.layout == "dense"
    assert "log-probs of the shared layout with the tiled head differ by" in str(report.reason)
    scores = score_tokens(vlm.model, make_batch(vlm), report.options(ForwardOptions())).logprobs
    torch.testing.assert_close(scores, plain_logprobs(vlm.model, vlm), rtol=0, atol=1e-5)


def test_a_processor_that_does_not_fit_is_an_error_before_training(qwen: VLMSetup):
    example = example_prompt(make_vlm_setup("llava_next").processor)
    with pytest.raises(Exception):  # noqa: B017 - whatever the model's code raises
        check_layout(qwen.model, ForwardOptions(), example=example)


# ------------------------------------------------------------------------------------ the parts


def media(types: list[int] | None = None, **tensors: torch.Tensor) -> Media:
    token_tensors = {} if types is None else {"mm_token_type_ids": torch.tensor(types)}
    return Media((), tensors, token_tensors, "key")


def test_tensors_of_several_shapes_are_padded_with_zeros():
    first, second = torch.ones(1, 2, 3), 2 * torch.ones(2, 1, 4)
    actual = concat_media_tensors([media(pixels=first), media(pixels=second, sizes=torch.tensor([5]))])
    assert actual["pixels"].tolist() == [
        [[1, 1, 1, 0], [1, 1, 1, 0]],
        [[2, 2, 2, 2], [0, 0, 0, 0]],
        [[2, 2, 2, 2], [0, 0, 0, 0]],
    ]
    assert actual["sizes"].tolist() == [5]


def test_positions_follow_the_images(qwen: VLMSetup):
    """An image of 2 by 3 merged patches spans 3 positions: text, image at 2 + (row, column), text from 5 on."""
    token = qwen.placeholder
    ids = torch.tensor([50, 51, *[token] * 6, 52])
    images = prompt_images(
        qwen.model, ids, media([0, 0, 1, 1, 1, 1, 1, 1, 0], image_grid_thw=torch.tensor([[1, 4, 6]]))
    )
    assert images.rope_at(0, 11).tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert images.shift == -3
    assert images.rope_at(10, 2).tolist() == [[7, 8]] * 3
    assert images.rope_at(7, 2).tolist() == [[2, 5], [3, 5], [4, 5]]


def test_is_multimodal(model):
    assert not is_multimodal(model)
    assert placeholder_ids(model) == ()
    vlm = make_vlm_setup("gemma3")
    assert is_multimodal(vlm.model)
    assert vlm.placeholder in placeholder_ids(vlm.model)
    assert prompt_images(vlm.model, torch.tensor(vlm.cases[2].prompt.ids), vlm.cases[2].prompt.media).image_spans == (
        (9, 13),
    )


def test_the_same_picture_is_one_prompt(qwen: VLMSetup):
    twice = [example_prompt(qwen.processor, images=[make_image("red")]) for _ in range(2)]
    other = example_prompt(qwen.processor, images=[make_image("blue")])
    assert twice[0].identity == twice[1].identity
    assert twice[0].identity != other.identity


class _NoAttention:
    """An attention layout whose outputs are zeros."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return torch.zeros(query.shape[1], query.shape[0], value.shape[2])


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0])])
def test_tokens_of_an_image_attend_to_the_end_of_the_image(softcap, window, sinks):
    """A row from index 1 on, its image at 3 to 5, two query heads and one key head; other tokens keep their output."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, 4), torch.randn(1, 8, 4), torch.randn(1, 8, 4)
    call = AttentionCall(layer=0, scale=0.7, softcap=softcap, window=window, sinks=sinks)
    actual = BidirectionalImageLayout(_NoAttention(), [(1, 3, 6)]).attend(query, key, value, call)
    for head in range(2):
        for place in range(3, 6):
            keys = [i for i in range(1, 6) if window is None or place - i < window]
            scores = torch.stack([0.7 * (query[head, place] @ key[0, i]) for i in keys])
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp() / (scores.exp().sum() + (0.0 if sinks is None else sinks[head].exp()))
            torch.testing.assert_close(actual[place, head], weights @ value[0, keys])
    assert not actual[[0, 1, 2, 6, 7]].any()
