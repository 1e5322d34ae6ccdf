"""Prompts with and without images, batches of rows behind them, and what a model that sees says of each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from vision import NAMES, Built, build, picture, question

from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.engines.base import Sample
from groupgrad.modeling.vlm import concat_media_tensors
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.types import Media, Prompt, Rollout

__all__ = [
    "ADAPTERS",
    "NAMES",
    "Case",
    "Seen",
    "adapted",
    "joined_media",
    "make_batch",
    "make_hybrid",
    "make_seen",
    "plain_logprobs",
]

ADAPTERS = ("full", "lora_text", "lora_all")
"""All weights; an adapter on the language model's attention; one on every linear layer, of the vision tower too."""

ROWS = ((0, [20, 21, 30, 40, 1]), (1, [22, 23, 24]), (0, [33, 50]), (2, [19, 25, 1]), (2, [44]), (1, [40, 41]), (0, []))
"""(prompt, completion) of rows: groups apart from each other, rows of several, one and no image, an empty one."""


@dataclass(slots=True)
class Case:
    """A prompt, and what the processor itself gives for it."""

    prompt: Prompt
    inputs: dict[str, torch.Tensor]


@dataclass(slots=True)
class Seen:
    """A small model that sees and prompts for it: with two images of several sizes, with none, with one."""

    name: str
    model: Any
    processor: Any
    cases: list[Case]

    @property
    def placeholder(self) -> int:
        """The token id that stands for (a piece of) an image."""
        return int(self.model.config.image_token_id)


def make_seen(name: str) -> Seen:
    """The model of one of `NAMES` in evaluation mode, with its prompts."""
    return with_prompts(name, build(name))


def make_hybrid() -> Seen:
    """Qwen3.5: a layer of linear attention, which carries a state, and one of attention; sees as Qwen3-VL does."""
    built = build("qwen3_vl")
    config, text = built.model.config, built.model.config.text_config.to_dict()
    vision = {**config.vision_config.to_dict(), "model_type": "qwen3_5"}
    for fields in (text, vision):
        fields.pop("model_type")
    linear = {f"linear_{kind}": 8 for kind in ("key_head_dim", "value_head_dim")}
    linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    text |= {**linear, "layer_types": ["linear_attention", "full_attention"]}
    text["rope_parameters"]["partial_rotary_factor"] = 1.0
    ids = {name: getattr(config, name) for name in ("image_token_id", "video_token_id", "vision_start_token_id")}
    torch.manual_seed(0)
    made = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    model = transformers.Qwen3_5ForConditionalGeneration(made)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return with_prompts("qwen3_5", Built(model, built.processor))


def with_prompts(name: str, built: Built) -> Seen:
    """The model in evaluation mode, with its prompts."""
    pictures = [[picture("red", (40, 30)), picture("blue", (20, 50), "green")], [], [picture("green", (32, 20))]]
    texts = ("what is it", "hello", "one?")
    cases = [_case(built, text, images, group) for group, (text, images) in enumerate(zip(texts, pictures))]
    return Seen(name, built.model.eval(), built.processor, cases)


def _case(built: Built, text: str, images: list[Any], group: int) -> Case:
    written = built.processor.apply_chat_template(
        question(text, len(images)), add_generation_prompt=True, tokenize=False
    )
    inputs = dict(built.processor(text=[written], images=[images] if images else None, return_tensors="pt"))
    ids = inputs["input_ids"][0].tolist()
    prompt = Prompt(ids, {"prompt": text}, group)
    if images:
        made = example_prompt(built.processor, images=images, text=text)
        assert made is not None
        assert made.ids == ids
        prompt = Prompt(made.ids, {"prompt": text}, group, made.media)
    return Case(prompt, inputs)


def adapted(model: Any, adapters: str) -> Any:
    """The model under one of `ADAPTERS`, whose weights are drawn at random."""
    if adapters == "full":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = "all-linear" if adapters == "lora_all" else r".*(language_model|text_model)\..*\.(q_proj|v_proj)"
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    return wrapped.eval()


def make_batch(
    seen: Seen, rows: Sequence[tuple[int, list[int]]] = ROWS, samples: Sequence[Sample] | None = None
) -> Batch:
    """Rows behind the prompts as a batch; completions are those of the samples if given."""
    completions = [ids for _, ids in rows] if samples is None else [sample.ids for sample in samples]
    rollouts = [
        Rollout(seen.cases[group].prompt, i, ids, "eos", "", "")
        for i, ((group, _), ids) in enumerate(zip(rows, completions))
    ]
    return collate(rollouts, [0.0] * len(rollouts), mask_truncated=False)


def joined_media(first: Media, gap: int, second: Media) -> Media:
    """All images of a row that has some, then `gap` tokens of text, then a tool's output with others."""
    types = {
        name: torch.cat([value, value.new_zeros(gap), second.token_tensors[name]])
        for name, value in first.token_tensors.items()
    }
    return Media(
        (*first.images, *second.images), concat_media_tensors([first, second]), types, f"{first.key} {second.key}"
    )


def plain_logprobs(model: nn.Module, seen: Seen, rows: Sequence[tuple[int, list[int]]] = ROWS) -> torch.Tensor:
    """(L,) log-probs of the completions, each row from a call of its own with what the processor gave."""
    parts = []
    for group, completion in rows:
        inputs = dict(seen.cases[group].inputs)
        tail = torch.tensor([completion], dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                kind = {"input_ids": tail, "attention_mask": torch.ones_like(tail)}.get(name, torch.zeros_like(tail))
                inputs[name] = torch.cat([inputs[name], kind], dim=1)
        logits = model(**inputs, use_cache=False).logits[0].double()
        logprobs = torch.log_softmax(logits[len(logits) - len(completion) - 1 : -1], dim=-1)
        parts.append(logprobs.gather(-1, tail[0, :, None]).squeeze(-1))
    return torch.cat(parts).float()
