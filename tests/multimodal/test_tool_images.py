"""Agents with images: of rows, of environments and of tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny_vlms
import torch
from PIL import Image
from scripted_agents import PlayingEngine, ask, call, make_agents

from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.multimodal.vlm_prompts import VisionPromptMaker
from groupgrad.rollout.agent import AgentRollouts
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.types import Rollout

RED, BLUE = tiny_vlms.make_image("red"), tiny_vlms.make_image("blue", (48, 24))


def look(place: str) -> Image.Image:
    """Show a place.

    Args:
        place: Which one.
    """
    return BLUE if place == "sea" else RED


def lose() -> list[dict[str, Any]]:
    """Show a file that is not there."""
    return [{"type": "text", "text": "here:"}, {"type": "image", "path": "no/such/file.png"}]


def agents(
    built: tiny_vlms.TinyVLM, script: dict[int, list[str]], tools: Any = (), environment: Any = None
) -> tuple[AgentRollouts, PlayingEngine]:
    maker = VisionPromptMaker(built.processor, built.processor.tokenizer)
    engine = PlayingEngine(maker.tokenizer, script)
    return make_agents(engine, maker.tokenizer, tools, environment, budget=400, maker=maker), engine


def query(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "what?"}], **columns}


@pytest.fixture(scope="module", params=tiny_vlms.NAMES)
def built(request: pytest.FixtureRequest) -> tiny_vlms.TinyVLM:
    return tiny_vlms.build(request.param)


@pytest.fixture(scope="module")
def qwen() -> tiny_vlms.TinyVLM:
    return tiny_vlms.build("qwen2_vl")


def test_the_path_of_a_tool_does_not_lead_out_of_the_images_folder(qwen, tmp_path):
    (tmp_path / "images").mkdir()
    RED.save(tmp_path / "secret.png")

    def show() -> list[dict[str, Any]]:
        """Show a file."""
        return [{"type": "image", "path": "../secret.png"}]

    makers, _ = agents(qwen, {0: [call("show"), "ok"]}, [show])
    makers.sampling = replace(makers.sampling, max_new_tokens=4000)
    makers.prompt_maker.image_root = str(tmp_path / "images")
    (rollout,) = makers(ask({0: query()}))
    assert "out of image_root=" in rollout.completion[1]["content"]
    assert rollout.media is None


def test_a_prompt_with_images_is_made_once_a_group(qwen, monkeypatch):
    makers, engine = agents(qwen, {0: ["a"], 1: ["b"]}, [look])
    calls: list[int] = []
    encode = VisionPromptMaker.encode

    def counted(self: Any, text: str, images: Any = (), **kwargs: Any) -> Any:
        calls.append(len(images))
        return encode(self, text, images, **kwargs)

    monkeypatch.setattr(VisionPromptMaker, "encode", counted)
    first, second = makers(ask({0: query(images=[RED, BLUE])}, size=2))
    assert calls == [2]
    assert first.prompt is second.prompt
    assert first.prompt.media.images == (RED, BLUE)
    assert first.media is None
    assert [request.media for request in engine.asked] == [first.prompt.media] * 2
    assert [block["type"] for block in first.prompt.row["prompt"][0]["content"]] == ["image", "image", "text"]


def conversation(built: tiny_vlms.TinyVLM, first: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The ids of a rollout, and the processor's inputs for all its images in one call."""
    images = [*first.prompt.media.images, *first.media.images[len(first.prompt.media.images) :]]
    placeholder = built.processor.image_token
    made = built.processor(text=[placeholder * len(images)], images=[images], return_tensors="pt")
    return torch.tensor([first.prompt.ids + first.completion_ids]), dict(made)


def test_tool_images_are_in_completions_and_in_training(built):
    """Sampled text is unchanged, the tool's image is in the completion, and one forward pass over the conversation with
    all images gives the log-probs of training."""
    script = {0: [call("look", place="sea"), "blue"], 1: ["red"]}
    makers, engine = agents(built, script, [look])
    first, second = makers(ask({0: query(image=RED)}, size=2))
    assert first.finish_reason == "eos"
    assert first.completion[1]["content"] == [{"type": "image", "image": BLUE}]
    assert first.media.images == (RED, BLUE)
    assert second.media is None
    # The request of the second turn has both images, that of the first the prompt's.
    assert [len(request.media.images) for request in engine.asked] == [1, 1, 2]
    assert engine.asked[2].media.key != engine.asked[0].media.key
    # Tokens of the tool reply are not trained.
    own = [len(built.processor.tokenizer(text)["input_ids"]) + 1 for text in script[0]]
    flags = first.sampled
    assert flags[: own[0]] == [True] * own[0]
    assert flags[-own[1] :] == [True] * own[1]
    assert sum(flags) == sum(own)
    batch = collate([first, second], [1.0, -1.0], mask_truncated=False)
    assert batch.row_media is not None
    assert [media is None for media in batch.row_media] == [False, True]
    ids, made = conversation(built, first)
    types = {}
    for name, known in first.media.token_tensors.items():
        types[name] = torch.cat([known, known.new_zeros(ids.shape[1] - len(known))])[None]
    tensors = {name: value for name, value in made.items() if name in first.media.tensors}
    accepted = {"token_type_ids", "mm_token_type_ids"} & set(types)
    if built.model.config.model_type not in ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        accepted = set()
    with torch.no_grad():
        logits = built.model(input_ids=ids, **tensors, **{name: types[name] for name in accepted}).logits[0]
        expected = torch.log_softmax(logits.float(), -1)
    length = len(first.prompt.ids)
    places = torch.arange(length - 1, ids.shape[1] - 1)
    expected = expected[places, ids[0, length:]]
    mine = torch.tensor(flags)
    for layout in ("shared", "packed", "dense"):
        found = score_tokens(built.model, batch, ForwardOptions(layout=layout)).logprobs[: len(flags)]
        torch.testing.assert_close(found[mine], expected[mine], atol=2e-5, rtol=0, msg=f"{layout} layout")
    # The second row does not depend on the first.
    alone = score_tokens(built.model, batch.select([1]), ForwardOptions()).logprobs
    beside = score_tokens(built.model, batch, ForwardOptions()).logprobs[len(flags) :]
    torch.testing.assert_close(alone, beside, atol=2e-5, rtol=0)


def test_a_row_that_ends_at_its_budget_keeps_its_own_images_alone(qwen):
    """The reply with the image does not fit, so the row ends before it; its neighbour keeps its images."""
    script = {0: [call("look", place="sea") + "x" * 390, ""], 1: [call("look", place="sea"), "b"]}
    makers, _ = agents(qwen, {0: [script[0][0]], 1: script[1]}, [look])
    first, second = makers(ask({0: query(image=RED)}, size=2))
    assert first.finish_reason in ("length", "tool_budget")
    assert first.media is None
    assert second.media.images == (RED, BLUE)


def test_a_missing_tool_image_is_an_error_message_to_the_model(qwen):
    makers, _ = agents(qwen, {0: [call("lose"), "a"]}, [lose])
    (rollout,) = makers(ask({0: query()}))
    assert "No such file" in rollout.completion[1]["content"]
    assert rollout.media is None
    assert rollout.finish_reason == "eos"


class Gallery:
    """An environment whose first message has an image."""

    def reset(self, image: Any = None, **row: Any) -> Any:
        return [{"type": "text", "text": "beside:"}, {"type": "image", "image": BLUE}]

    def look(self, place: str) -> Image.Image:
        """Show a place.

        Args:
            place: Which one.
        """
        return RED


class Window:
    """An environment whose first message is an image alone."""

    def reset(self, **row: Any) -> Any:
        return BLUE


def test_images_of_an_environment_follow_those_of_the_row(qwen):
    makers, engine = agents(qwen, {0: [call("look", place="x"), "a"], 1: ["b"]}, environment=Gallery)
    first, second = makers(ask({0: query(image=RED)}, size=2))
    content = first.prompt.row["prompt"][0]["content"]
    assert [block["type"] for block in content] == ["image", "text", "text", "image"]
    assert first.prompt.media.images == (RED, BLUE)
    assert first.prompt is second.prompt
    assert first.media.images == (RED, BLUE, RED)
    # The tool may answer before the second rollout is requested.
    assert sorted(len(request.media.images) for request in engine.asked) == [2, 2, 3]
    makers.close()


def test_an_environment_may_begin_with_a_picture_alone():
    makers, _ = agents(tiny_vlms.build("gemma3"), {0: ["a"]}, environment=Window)
    (rollout,) = makers(ask({0: query()}))
    assert rollout.prompt.media.images == (BLUE,)
    makers.close()


def test_images_of_rows_survive_selecting_and_concatenating():
    built = tiny_vlms.build("idefics3")
    script = {0: [call("look", place="sea"), "a"], 1: ["b"], 2: [call("look", place="hill"), "c"]}
    makers, _ = agents(built, script, [look])
    rollouts = makers(ask({0: query(image=RED)}, size=3))
    batch = collate(rollouts, [0.0] * 3, mask_truncated=False)
    assert batch.select([1]).row_media is None
    assert batch.select([2, 0]).row_media == (rollouts[2].media, rollouts[0].media)
    again = Batch.concat([batch.select([1]), batch.select([0])])
    assert again.row_media == (None, rollouts[0].media)
    assert Batch.concat([batch.select([1]), batch.select([1])]).row_media is None
