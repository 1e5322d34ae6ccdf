"""Agents that see: images of rows, of environments and of tools."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vision
from PIL import Image
from scripted_agents import EOS, SEED, PlayingEngine, ask, call

from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.chat import ChatFormat
from groupgrad.engines.base import SamplingOptions
from groupgrad.envs.environments import Environments
from groupgrad.envs.tools import ToolOptions, make_tools
from groupgrad.modeling.scoring.forward import ForwardOptions, score_tokens
from groupgrad.multimodal.vlm_prompts import VisionPromptMaker
from groupgrad.rollout.agent import AgentOptions, AgentRollouts
from groupgrad.types import Rollout

RED, BLUE = vision.picture("red"), vision.picture("blue", (48, 24))


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
    built: vision.Built, script: dict[int, list[str]], tools: Any = (), environment: Any = None
) -> tuple[AgentRollouts, PlayingEngine]:
    maker = VisionPromptMaker(built.processor, built.processor.tokenizer)
    engine = PlayingEngine(maker.tokenizer, script)
    made = make_tools(list(tools))
    environments = None if environment is None else Environments(environment, made)
    schemas = [tool.schema for tool in made]
    if environments is not None:
        schemas = [schema for of_kind in environments.schemas.values() for schema in of_kind]
    chat = ChatFormat(maker.tokenizer, schemas=schemas, prepare_messages=maker.template_messages)
    return AgentRollouts(
        maker,
        engine,
        SamplingOptions(400, eos_ids=(EOS,)),
        chat,
        tools=made,
        environments=environments,
        options=AgentOptions(None, ToolOptions()),
        seed=SEED,
    ), engine


def asked(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "what?"}], **columns}


@pytest.fixture(scope="module", params=vision.NAMES)
def built(request: pytest.FixtureRequest) -> vision.Built:
    return vision.build(request.param)


def test_a_prompt_with_images_is_made_once_a_group(built, monkeypatch):
    makers, engine = agents(built, {0: ["a"], 1: ["b"]}, [look])
    calls: list[int] = []
    encode = VisionPromptMaker.encode

    def counted(self: Any, text: str, images: Any = (), **kwargs: Any) -> Any:
        calls.append(len(images))
        return encode(self, text, images, **kwargs)

    monkeypatch.setattr(VisionPromptMaker, "encode", counted)
    first, second = makers(ask({0: asked(images=[RED, BLUE])}, size=2))
    assert calls == [2]
    assert first.prompt is second.prompt
    assert first.prompt.media.images == (RED, BLUE)
    assert first.media is None
    assert [request.media for request in engine.asked] == [first.prompt.media] * 2
    assert [block["type"] for block in first.prompt.row["prompt"][0]["content"]] == ["image", "image", "text"]


def conversation(built: vision.Built, first: Rollout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The ids of a rollout, and what the processor makes of all its images in one call."""
    images = [*first.prompt.media.images, *first.media.images[len(first.prompt.media.images) :]]
    placeholder = built.processor.image_token
    made = built.processor(text=[placeholder * len(images)], images=[images], return_tensors="pt")
    return torch.tensor([first.prompt.ids + first.completion_ids]), dict(made)


def test_images_of_tools_are_seen_in_completions_and_by_training(built):
    """Sampled text is as it was, the tool's image is in the completion, and a forward pass over the whole conversation
    with all images at once gives the numbers that training gives."""
    script = {0: [call("look", place="sea"), "blue"], 1: ["red"]}
    makers, engine = agents(built, script, [look])
    first, second = makers(ask({0: asked(image=RED)}, size=2))
    assert first.finish_reason == "eos"
    assert first.completion[1]["content"] == [{"type": "image", "image": BLUE}]
    assert first.media.images == (RED, BLUE)
    assert second.media is None
    # The second turn is asked for with both images, the first with that of the prompt.
    assert [len(request.media.images) for request in engine.asked] == [1, 1, 2]
    assert engine.asked[2].media.key != engine.asked[0].media.key
    # What the tool brought is not trained on.
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
    # The second row alone is what it was beside the first.
    alone = score_tokens(built.model, batch.select([1]), ForwardOptions()).logprobs
    beside = score_tokens(built.model, batch, ForwardOptions()).logprobs[len(flags) :]
    torch.testing.assert_close(alone, beside, atol=2e-5, rtol=0)


def test_a_row_that_ends_at_its_budget_keeps_its_own_images_alone(built):
    """The reply with the image does not fit, so the row ends before it; its neighbour's images are untouched."""
    script = {0: [call("look", place="sea") + "x" * 390, ""], 1: [call("look", place="sea"), "b"]}
    makers, _ = agents(built, {0: [script[0][0]], 1: script[1]}, [look])
    first, second = makers(ask({0: asked(image=RED)}, size=2))
    assert first.finish_reason in ("length", "tool_budget")
    assert first.media is None
    assert second.media.images == (RED, BLUE)


def test_an_image_that_a_tool_has_not_is_told_to_the_model():
    built = vision.build("qwen2_vl")
    makers, _ = agents(built, {0: [call("lose"), "a"]}, [lose])
    (rollout,) = makers(ask({0: asked()}))
    assert "no such file" in rollout.completion[1]["content"]
    assert rollout.media is None
    assert rollout.finish_reason == "eos"


class Gallery:
    """An environment that begins with a picture of its own."""

    def reset(self, image: Any = None, **row: Any) -> Any:
        return [{"type": "text", "text": "beside:"}, {"type": "image", "image": BLUE}]

    def look(self, place: str) -> Image.Image:
        """Show a place.

        Args:
            place: Which one.
        """
        return RED


class Window:
    """An environment that begins with nothing but a picture."""

    def reset(self, **row: Any) -> Any:
        return BLUE


def test_what_an_environment_shows_stands_behind_the_images_of_the_row(built):
    makers, engine = agents(built, {0: [call("look", place="x"), "a"], 1: ["b"]}, environment=Gallery)
    first, second = makers(ask({0: asked(image=RED)}, size=2))
    content = first.prompt.row["prompt"][0]["content"]
    assert [block["type"] for block in content] == ["image", "text", "text", "image"]
    assert first.prompt.media.images == (RED, BLUE)
    assert first.prompt is second.prompt
    assert first.media.images == (RED, BLUE, RED)
    # The tool may answer before the second rollout is asked for.
    assert sorted(len(request.media.images) for request in engine.asked) == [2, 2, 3]
    makers.close()


def test_an_environment_may_begin_with_a_picture_alone():
    makers, _ = agents(vision.build("gemma3"), {0: ["a"]}, environment=Window)
    (rollout,) = makers(ask({0: asked()}))
    assert rollout.prompt.media.images == (BLUE,)
    makers.close()


def test_images_of_rows_survive_selecting_and_joining():
    built = vision.build("idefics3")
    script = {0: [call("look", place="sea"), "a"], 1: ["b"], 2: [call("look", place="hill"), "c"]}
    makers, _ = agents(built, script, [look])
    rollouts = makers(ask({0: asked(image=RED)}, size=3))
    batch = collate(rollouts, [0.0] * 3, mask_truncated=False)
    assert batch.select([1]).row_media is None
    assert batch.select([2, 0]).row_media == (rollouts[2].media, rollouts[0].media)
    again = Batch.concat([batch.select([1]), batch.select([0])])
    assert again.row_media == (None, rollouts[0].media)
    assert Batch.concat([batch.select([1]), batch.select([1])]).row_media is None
