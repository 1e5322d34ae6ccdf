"""Sampling from vision-language models: the completions of `generate` with the log-probs of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from known_decoders import direct_form
from noted_calls import note_calls
from tiny_vlms import make_image
from vlm_batches import HYBRID, NAMES, VLMSetup, adapted, concat_media, make_batch, make_vlm_setup

from groupgrad.batching.collate import collate
from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
from groupgrad.engines.native import NativeEngine
from groupgrad.engines.native.cpp_step import CompiledModel
from groupgrad.engines.native.runner import DecodeRunner
from groupgrad.engines.native.sequence import Group
from groupgrad.engines.native.session import _start_of_last_pass
from groupgrad.engines.selection import EngineOptions, choose_engine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.kernels import library
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.scoring import vlm as vision
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.types import Media, Rollout

LENGTH = 6
GREEDY = SamplingOptions(max_new_tokens=LENGTH, extra={"do_sample": False})
FREE = SamplingOptions(max_new_tokens=LENGTH)
PROMPTS = (0, 1, 2, 0, 2, 1, 0)
"""Prompt of each row: several rows of each prompt; they have two images, none and one."""


FEW = ("qwen3_vl", "gemma3", "idefics3")
"""Image features in several layers; attention both ways within an image; images in tiles of several shapes."""


@pytest.fixture(scope="module", params=FEW)
def vlm(request) -> VLMSetup:
    return make_vlm_setup(request.param)


def requests(vlm: VLMSetup, prompts: Sequence[int] = PROMPTS) -> list[Request]:
    made = [vlm.cases[number].prompt for number in prompts]
    return [Request(prompt.ids, seed=i, max_new_tokens=LENGTH, media=prompt.media) for i, prompt in enumerate(made)]


def generated(model: Any, vlm: VLMSetup, number: int) -> list[int]:
    """Greedy completion by transformers' `generate` from the processor's inputs."""
    inputs = vlm.cases[number].inputs
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()


def mismatch(model: Any, vlm: VLMSetup, samples: list[Sample], prompts: Sequence[int] = PROMPTS) -> float:
    """The largest difference between log-probs of sampling and training."""
    batch = make_batch(vlm, [(number, []) for number in prompts], samples)
    with torch.no_grad():
        scores = score_tokens(model, batch, ForwardOptions()).logprobs
    sampled = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
    assert len(sampled) == batch.num_tokens
    return float((scores - sampled).abs().max())


@pytest.mark.quick("gemma3-full", "qwen2_5_vl-lora_all", "qwen3_5-lora_all")
@pytest.mark.parametrize(
    ("name", "adapters"), [*((name, "lora_all") for name in (*NAMES, HYBRID)), *((name, "full") for name in FEW)]
)
def test_path(name: str, adapters: str, caplog):
    """Adapters everywhere include those of the language model."""
    vlm = make_vlm_setup(name)
    model = adapted(vlm.model, adapters)
    chosen = choose_engine(model, EngineOptions(), FREE, example=example_prompt(vlm.processor))
    reason = "it samples from the modules that train, and its log-probs agree"
    assert (chosen.name, chosen.reason) == ("native", reason)
    expected = [generated(model, vlm, number) for number in range(3)]
    assert len({tuple(ids) for ids in expected}) > 1
    for sampler in (NativeEngine(model), TransformersEngine(model)):
        actual = sampler.sample(requests(vlm), GREEDY)
        assert [sample.ids for sample in actual] == [expected[number] for number in PROMPTS]
        assert mismatch(model, vlm, sampler.sample(requests(vlm), FREE)) <= 1e-5
    assert "the direct form differs" not in caplog.text


@pytest.mark.parametrize("kind", [NativeEngine, TransformersEngine])
def test_a_row_of_its_own_says_the_same_as_among_others(vlm: VLMSetup, kind: Any):
    together = kind(vlm.model).sample(requests(vlm), FREE)
    for place in (0, 1, 4):
        alone = kind(vlm.model).sample([requests(vlm)[place]], FREE)
        assert alone[0].ids == together[place].ids


@pytest.mark.parametrize("kind", [NativeEngine, TransformersEngine])
def test_placeholders_may_be_sampled(vlm: VLMSetup, kind: Any):
    """Only two tokens can be sampled, one of them the image placeholder."""
    vocabulary = vlm.model.config.get_text_config().vocab_size
    others = [token for token in range(vocabulary) if token not in (vlm.placeholder, 40)]
    options = replace(FREE, extra={"suppress_tokens": others})
    samples = kind(vlm.model).sample(requests(vlm), options)
    assert {token for sample in samples for token in sample.ids} == {vlm.placeholder, 40}
    batch = make_batch(vlm, [(number, []) for number in PROMPTS], samples)
    scores = score_tokens(vlm.model, batch, ForwardOptions(layout="dense")).logprobs.detach()
    sampled = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
    torch.testing.assert_close(scores, sampled, rtol=0, atol=1e-5)


def test_a_prompt_is_computed_once_with_its_images(vlm: VLMSetup, monkeypatch):
    calls = note_calls(monkeypatch, vlm.model.model, "get_image_features")
    engine = NativeEngine(vlm.model)
    engine.sample(requests(vlm), FREE)
    assert len(calls) == 1
    assert engine.statistics.num_prefilled == sum(len(case.prompt.ids) for case in vlm.cases)


def test_the_same_words_under_another_picture_are_another_prompt():
    vlm = make_vlm_setup("qwen2_vl")
    prompts = [example_prompt(vlm.processor, images=[make_image(color)]) for color in ("red", "blue")]
    assert prompts[0].ids == prompts[1].ids
    made = [Request(prompt.ids, seed=0, max_new_tokens=LENGTH, media=prompt.media) for prompt in prompts]
    first, second = NativeEngine(vlm.model).sample(made, FREE)
    assert first.logprobs[0] != pytest.approx(second.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3"])
def test_rows_that_gave_way_go_on_behind_their_images(name: str):
    """Memory for one long prompt and a few rows: the others wait, are preempted and computed again."""
    vlm = make_vlm_setup(name)
    free = NativeEngine(vlm.model)
    expected = free.sample(requests(vlm, PROMPTS * 2), FREE)
    tight = NativeEngine(vlm.model, kv_memory=free.statistics.peak_bytes // 3)
    actual = tight.sample(requests(vlm, PROMPTS * 2), FREE)
    assert tight.statistics.num_waited > 0
    assert [sample.ids for sample in actual] == [sample.ids for sample in expected]
    assert mismatch(vlm.model, vlm, actual, PROMPTS * 2) <= 1e-5


@pytest.mark.parametrize("way", ["kept", "anew", "transformers"])
def test_turns_go_on_behind_images(vlm: VLMSetup, way: str):
    """The context of the second turn has a sampled placeholder without an image."""
    engine: Any = TransformersEngine(vlm.model) if way == "transformers" else NativeEngine(vlm.model)
    first, between = vlm.cases[0].prompt, [vlm.placeholder, 30, 31]
    with engine.session(FREE) as session:
        said = sample_all(session, [Request(first.ids, 1, LENGTH, keep=way == "kept", media=first.media)])[0]
        context = [*first.ids, *said.ids, *between]
        again = Request(context, 2, LENGTH, continues=0 if way == "kept" else None, media=first.media)
        second = sample_all(session, [again])[0]
    if way == "kept":
        assert engine.statistics.num_restored == LENGTH - 1
    row = [*said.ids, *between, *second.ids]
    scores = score_tokens(vlm.model, make_batch(vlm, [(0, row)]), ForwardOptions()).logprobs.detach()
    sampled = torch.tensor([*(said.logprobs or ()), *(second.logprobs or ())])
    own = torch.cat([scores[: len(said.ids)], scores[len(said.ids) + len(between) :]])
    torch.testing.assert_close(own, sampled, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["kept", "anew", "transformers"])
def test_new_images_come_between_turns(vlm: VLMSetup, way: str):
    """The second turn adds an image to the context, the third only text."""
    engine: Any = TransformersEngine(vlm.model) if way == "transformers" else NativeEngine(vlm.model)
    prompt, tool = vlm.cases[0].prompt, vlm.cases[2].prompt
    context, media, row, sampled, told = list(prompt.ids), prompt.media, [], [], []
    with engine.session(FREE) as session:
        for turn, between in enumerate([tool.ids, [33, 34], []]):
            continues = turn - 1 if way == "kept" and turn else None
            request = Request(context, turn, LENGTH, continues=continues, keep=way == "kept", media=media)
            said = sample_all(session, [request])[0]
            row += [*said.ids, *between]
            sampled += [True] * len(said.ids) + [False] * len(between)
            told += said.logprobs or []
            context = [*prompt.ids, *row]
            if not turn:
                media = concat_media(prompt.media, len(said.ids), tool.media)
    if way == "kept":
        # A turn with a new image computes its whole context; the last turn continues the second.
        assert engine.statistics.num_restored == LENGTH - 1
    rollout = Rollout(prompt, 0, row, "eos", "", "", sampled=sampled, media=media)
    batch = collate([rollout], [0.0], mask_truncated=False)
    scores = score_tokens(vlm.model, batch, ForwardOptions()).logprobs[batch.trained].detach()
    torch.testing.assert_close(scores, torch.tensor(told), rtol=0, atol=1e-5)


def test_images_that_the_native_engine_would_see_otherwise_are_left_to_generate(monkeypatch, caplog):
    vlm = make_vlm_setup("gemma3")
    monkeypatch.setattr(vision, "has_bidirectional_images", lambda _type: False)
    assert choose_engine(vlm.model, EngineOptions(), FREE).name == "native"
    chosen = choose_engine(vlm.model, EngineOptions(), FREE, example=example_prompt(vlm.processor))
    assert chosen.name == "transformers"
    assert "Gemma3ForConditionalGeneration is sampled by generate: its log-probs differ by" in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_decoders_of_a_known_kind_take_the_direct_step(name: str):
    """Also under adapters of the vision tower; Gemma's layers have other norms."""
    vlm = make_vlm_setup(name)
    for adapters in ("full", "lora_all"):
        direct = direct_form(adapted(vlm.model, adapters))
        assert isinstance(direct, str) == (name == "gemma3")
        if adapters == "full" and name != "gemma3":
            assert isinstance(direct, CompiledModel) == (library() is not None)


@pytest.mark.parametrize("name", ["qwen2_vl", "llava_next"])
def test_positions_that_are_no_places_are_left_to_the_model(name: str, monkeypatch):
    """The direct step assumes that positions count tokens, which rotary positions behind Qwen's images do not."""
    vlm, left, plain = make_vlm_setup(name), [], DecodeRunner.disable_direct

    def leave(steps: DecodeRunner) -> None:
        left.append(steps)
        plain(steps)

    monkeypatch.setattr(DecodeRunner, "disable_direct", leave)
    NativeEngine(vlm.model).sample(requests(vlm, (1, 1)), FREE)
    assert not left
    samples = NativeEngine(vlm.model).sample(requests(vlm), FREE)
    assert bool(left) == (name == "qwen2_vl")
    assert mismatch(vlm.model, vlm, samples) <= 1e-5


@pytest.mark.parametrize(("places", "start"), [([True, True, False], 2), ([False, True, True], 0), (None, 2)])
def test_a_stored_prompt_is_computed_from_its_last_token_unless_an_image_is_there(places, start):
    """The features of an image need the whole prompt."""
    media = Media((), {}, {}, "")
    images = None if places is None else vision.PromptImages(media, torch.tensor(places))
    assert _start_of_last_pass(Group([5, 6, 7], 0, prompt_images=images)) == start
