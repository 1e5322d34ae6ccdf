"""A small model that sees and that a real vLLM can run, rows with images for it, and its own log-probs of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import vision
from real_vllm import OPTIONS

from groupgrad.engines.base import Request
from groupgrad.types import Media

# vLLM's kernels for CPUs want heads of 32 numbers or more.
_WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def build_seeing() -> Any:
    """A LLaVA-NeXT of a hundred thousand parameters and its processor."""
    built = vision.build("llava_next", **_WIDE)
    built.model.eval()
    return built


def seeing_requests(built: Any) -> list[tuple[Request, Any]]:
    """Rows with one image, with two, and with none, and what the processor made of each."""
    red, green = vision.picture("red", (32, 32), "blue"), vision.picture("green", (16, 32))
    rows = []
    for number, images in enumerate(([red], [red, green], [green], [])):
        text = built.processor.apply_chat_template(
            vision.question("what is it", len(images)), tokenize=False, add_generation_prompt=True
        )
        made = built.processor(text=text, images=images or None, return_tensors="pt")
        media = Media(tuple(images), {}, {}, str(number)) if images else None
        request = Request(made["input_ids"][0].tolist(), seed=number, max_new_tokens=10, media=media)
        rows += [(replace(request, seed=10 * number + i), made) for i in range(2)]
    return rows


def change_sight(model: Any, seed: int) -> Any:
    """The model with another vision tower."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision_tower" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=stream))
    return model


@torch.no_grad()
def difference(built: Any, rows: list[tuple[Request, Any]], engine: Any) -> float:
    """The largest between log-probs that came with samples and the model's own, in nats."""
    samples = engine.sample([request for request, _ in rows], OPTIONS)
    found, num_compared = 0.0, 0
    for (request, made), sample in zip(rows, samples):
        if built.model.config.image_token_id in sample.ids:
            continue  # the plain model takes what was sampled for a place of an image
        ids = torch.tensor([request.prompt_ids + sample.ids])
        images = {name: value for name, value in made.items() if name in ("pixel_values", "image_sizes")}
        logits = built.model(input_ids=ids, **images).logits[0, len(request.prompt_ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(sample.ids)[:, None]).squeeze(-1)
        found = max(found, float((own - torch.tensor(sample.logprobs)).abs().max()))
        num_compared += 1
    assert num_compared >= len(rows) // 2
    return found
