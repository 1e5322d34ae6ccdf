"""Prompts with and without images, batches of their rows, and the log-probs of a VLM for each row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tiny_vlms import HYBRID, NAMES, TinyVLM, build, make_image, question
from torch import nn

from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.engines.base import Sample
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.scoring.vlm import concat_media_tensors
from groupgrad.types import Media, Prompt, Rollout

__all__ = [
    "ADAPTERS",
    "HYBRID",
    "NAMES",
    "Case",
    "VLMSetup",
    "adapted",
    "concat_media",
    "make_batch",
    "make_vlm_setup",
    "plain_logprobs",
]

ADAPTERS = ("full", "lora_text", "lora_all")
"""All weights; LoRA on the text model's attention; LoRA on every linear layer, the vision tower included."""

ROWS = ((0, [20, 21, 30, 40, 1]), (1, [22, 23, 24]), (0, [33, 50]), (2, [19, 25, 1]), (2, [44]), (1, [40, 41]), (0, []))
"""(prompt, completion) of rows: interleaved groups, rows with several, one and no image, an empty completion."""


@dataclass(slots=True)
class Case:
    """A prompt and the processor's own model inputs for it."""

    prompt: Prompt
    inputs: dict[str, torch.Tensor]


@dataclass(slots=True)
class VLMSetup:
    """A small VLM and three prompts: with two images of different sizes, with none, with one."""

    name: str
    model: Any
    processor: Any
    cases: list[Case]

    @property
    def placeholder(self) -> int:
        """Token id of an image's placeholder."""
        return int(self.model.config.image_token_id)


def make_vlm_setup(name: str) -> VLMSetup:
    """The VLM of one of `NAMES` or of `HYBRID` in evaluation mode, with its prompts."""
    return _with_prompts(name, build(name))


def _with_prompts(name: str, built: TinyVLM) -> VLMSetup:
    """The model in evaluation mode, with its prompts."""
    pictures = [
        [make_image("red", (40, 30)), make_image("blue", (20, 50), "green")],
        [],
        [make_image("green", (32, 20))],
    ]
    texts = ("what is it", "hello", "one?")
    cases = [_case(built, text, images, group) for group, (text, images) in enumerate(zip(texts, pictures))]
    return VLMSetup(name, built.model.eval(), built.processor, cases)


def _case(built: TinyVLM, text: str, images: list[Any], group: int) -> Case:
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
    """The model with one of `ADAPTERS`, randomly initialised."""
    if adapters == "full":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = "all-linear" if adapters == "lora_all" else r".*(language_model|text_model)\..*\.(q_proj|v_proj)"
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False))
    return wrapped.eval()


def make_batch(
    vlm: VLMSetup, rows: Sequence[tuple[int, list[int]]] = ROWS, samples: Sequence[Sample] | None = None
) -> Batch:
    """A batch of rows that continue the prompts, with the completions of `samples` if given."""
    completions = [ids for _, ids in rows] if samples is None else [sample.ids for sample in samples]
    rollouts = [
        Rollout(vlm.cases[group].prompt, i, ids, "eos", "", "")
        for i, ((group, _), ids) in enumerate(zip(rows, completions))
    ]
    return collate(rollouts, [0.0] * len(rollouts), mask_truncated=False)


def concat_media(first: Media, gap: int, second: Media) -> Media:
    """The images of a prompt and of a tool reply, with `gap` text tokens between them."""
    types = {
        name: torch.cat([value, value.new_zeros(gap), second.token_tensors[name]])
        for name, value in first.token_tensors.items()
    }
    return Media(
        (*first.images, *second.images), concat_media_tensors([first, second]), types, f"{first.key} {second.key}"
    )


def plain_logprobs(model: nn.Module, vlm: VLMSetup, rows: Sequence[tuple[int, list[int]]] = ROWS) -> torch.Tensor:
    """(L,) log-probs of the completions, one forward pass a row on the processor's own inputs."""
    parts = []
    for group, completion in rows:
        inputs = dict(vlm.cases[group].inputs)
        tail = torch.tensor([completion], dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in inputs:
                kind = {"input_ids": tail, "attention_mask": torch.ones_like(tail)}.get(name, torch.zeros_like(tail))
                inputs[name] = torch.cat([inputs[name], kind], dim=1)
        logits = model(**inputs, use_cache=False).logits[0].double()
        logprobs = torch.log_softmax(logits[len(logits) - len(completion) - 1 : -1], dim=-1)
        parts.append(logprobs.gather(-1, tail[0, :, None]).squeeze(-1))
    return torch.cat(parts).float()
