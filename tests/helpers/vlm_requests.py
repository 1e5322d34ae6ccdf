"""A small VLM that a real vLLM can run, requests with images for it, and its own log-probs of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tiny_vlms
import torch
from real_vllm import OPTIONS

from groupgrad.engines.base import Request
from groupgrad.types import Media

# vLLM's CPU kernels need a head dimension of at least 32.
_WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


def build_vlm() -> Any:
    """A LLaVA-NeXT of a hundred thousand parameters and its processor."""
    built = tiny_vlms.build("llava_next", **_WIDE)
    built.model.eval()
    return built


def vlm_requests(built: Any) -> list[tuple[Request, Any]]:
    """Requests with one image, with two, and with none, and the processor's inputs for each."""
    red, green = tiny_vlms.make_image("red", (32, 32), "blue"), tiny_vlms.make_image("green", (16, 32))
    rows = []
    for number, images in enumerate(([red], [red, green], [green], [])):
        text = built.processor.apply_chat_template(
            tiny_vlms.question("what is it", len(images)), tokenize=False, add_generation_prompt=True
        )
        made = built.processor(text=text, images=images or None, return_tensors="pt")
        media = Media(tuple(images), {}, {}, str(number)) if images else None
        request = Request(made["input_ids"][0].tolist(), seed=number, max_new_tokens=10, media=media)
        rows += [(replace(request, seed=10 * number + i), made) for i in range(2)]
    return rows


def perturb_vision_tower(model: Any, seed: int) -> Any:
    """The model with noise added to its vision tower."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vision_tower" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=stream))
    return model


@torch.no_grad()
def difference(built: Any, rows: list[tuple[Request, Any]], engine: Any) -> float:
    """Largest difference between the log-probs of samples and the model's own, in nats."""
    samples = engine.sample([request for request, _ in rows], OPTIONS)
    found, num_compared = 0.0, 0
    for (request, made), sample in zip(rows, samples):
        if built.model.config.image_token_id in sample.ids:
            continue  # the plain model takes a sampled placeholder for an image
        ids = torch.tensor([request.prompt_ids + sample.ids])
        images = {name: value for name, value in made.items() if name in ("pixel_values", "image_sizes")}
        logits = built.model(input_ids=ids, **images).logits[0, len(request.prompt_ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(sample.ids)[:, None]).squeeze(-1)
        found = max(found, float((own - torch.tensor(sample.logprobs)).abs().max()))
        num_compared += 1
    assert num_compared >= len(rows) // 2
    return found
