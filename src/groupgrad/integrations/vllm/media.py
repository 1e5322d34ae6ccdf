"""Prepares images for vLLM: PNG encoding for requests, and prompts in the form that vLLM expands itself.

A prompt here has as many placeholder tokens for an image as the model has features of it. vLLM takes one placeholder
and inserts the rest by its own processor; it would expand each token of the long form again. So runs of placeholders
are folded, and the ids that vLLM then reports are compared with those that the policy is trained on.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from groupgrad.models.families import IMAGE_TILE_TOKENS, IMAGE_TOKEN_FIELDS

_PNG_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA"})


def encode(image: Any) -> str:
    """A PIL image as PNG in base64, without loss; modes that PNG lacks become RGB."""
    body = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(body, format="PNG", compress_level=1)
    return base64.b64encode(body.getvalue()).decode("ascii")


def decode(text: str) -> Any:
    """Inverse of `encode`. ValueError if the text is no image."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
        image.load()
    except (ValueError, UnidentifiedImageError, OSError) as error:
        raise ValueError(f"an image of {len(text)} characters cannot be read: {error}") from None
    return image


def vllm_prompt(ids: Sequence[int], images: Sequence[Any], engine: Any) -> dict[str, Any]:
    """vLLM's input for a prompt of these (expanded) ids. ValueError if the ids have no places for these images."""
    if not images:
        return {"prompt_token_ids": list(ids)}
    tokenizer = getattr(getattr(engine, "renderer", None), "tokenizer", None)
    short = folded(ids, len(images), engine.model_config.hf_config, tokenizer)
    return {"prompt_token_ids": short, "multi_modal_data": {"image": list(images)}}


def check_prompt(ids: Sequence[int], vllm_ids: Sequence[int] | None) -> None:
    """ValueError if the ids that vLLM reports are not those of the prompt."""
    if vllm_ids is None or list(vllm_ids) == list(ids):
        return
    shorter = min(len(ids), len(vllm_ids))
    place = next((i for i in range(shorter) if ids[i] != vllm_ids[i]), shorter)
    raise ValueError(
        f"vLLM made another prompt of the images than the policy is trained on: {len(vllm_ids)} tokens instead of "
        f"{len(ids)}, different from token {place} on; it must have the same processor settings (image sizes), and "
        "know this kind of model: save the processor beside the model that is served, or set use_vllm=False"
    )


def folded(ids: Sequence[int], num_images: int, config: Any, tokenizer: Any = None) -> list[int]:
    """The ids with one token for each image; images come before any placeholder that the policy has sampled.

    That token is the placeholder, or for Gemma 3 the token that begins an image; what its processor adds around it (two
    line breaks on each side, which `tokenizer` may have merged with others) is removed too. The tiles of Idefics 3 and
    SmolVLM, with the tokens between them, are folded into one token. Where nothing surrounds images, a single run of
    placeholders may hold several of them. Otherwise ValueError if there are fewer runs than images.
    """
    placeholder = _token(config, *IMAGE_TOKEN_FIELDS)
    if placeholder is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"the prompt has {num_images} images, but {kind} names no token for images: vLLM cannot see")
    untiled = _fold_tiles(list(ids), num_images, placeholder, tokenizer)
    if untiled is not None:
        return untiled
    begin = _token(config, "boi_token_id", "boi_token_index")
    end = _token(config, "eoi_token_id", "eoi_token_index")
    breaks = {} if begin is None else _line_breaks(tokenizer)
    short: list[int] = []
    rest = list(reversed(ids))
    num_folded = 0
    while rest:
        if rest[-1] != placeholder or num_folded == num_images:
            short.append(rest.pop())
            continue
        while rest and rest[-1] == placeholder:
            rest.pop()
        num_folded += 1
        if begin is not None and short and short[-1] == begin and rest and rest[-1] == end:
            rest.pop()
            short.pop()
            _remove_breaks(short, rest, breaks)
            short.append(begin)
        else:
            short.append(placeholder)
    if num_folded == 1 and begin is None:
        # Images side by side: vLLM expands each of these tokens for its own image.
        place = short.index(placeholder)
        short[place:place] = [placeholder] * (num_images - 1)
    elif num_folded < num_images:
        raise ValueError(
            f"the prompt has {num_images} images, but only {num_folded} runs of their placeholder (token "
            f"{placeholder}) among its {len(ids)} tokens; two images need a token between them"
        )
    return short


def _fold_tiles(ids: list[int], num_images: int, placeholder: int, tokenizer: Any) -> list[int] | None:
    """One placeholder for each image that was cut into tiles; None for processors that do not cut images.

    A tile begins with an edge token, which also ends the last one; the whole image comes last, after a token of its
    own.
    """
    edge, whole = (_token_of(tokenizer, text) for text in IMAGE_TILE_TOKENS)
    if edge is None or whole is None:
        return None
    short: list[int] = []
    place = 0
    for _ in range(num_images):
        try:
            start = ids.index(edge, place)
            end = ids.index(edge, ids.index(whole, start))
        except ValueError:
            return None
        short += [*ids[place:start], placeholder]
        place = end + 1
    return short + ids[place:]


def _token_of(tokenizer: Any, text: str) -> int | None:
    """Id of the token with this text; None if the tokenizer has none."""
    token = None if tokenizer is None else tokenizer.convert_tokens_to_ids(text)
    return None if token == getattr(tokenizer, "unk_token_id", None) else token


def _line_breaks(tokenizer: Any) -> dict[int, int]:
    """Tokens that consist of line breaks, with the number of breaks."""
    tokens = {count: _token_of(tokenizer, "\n" * count) for count in range(1, 9)}
    return {token: count for count, token in tokens.items() if token is not None}


def _remove_breaks(before: list[int], reversed_after: list[int], breaks: dict[int, int]) -> None:
    """Removes two line breaks on each side of an image; nothing unless both sides have them."""
    sides = before, reversed_after
    if not all(side and breaks.get(side[-1], 0) >= 2 for side in sides):
        return
    for side in sides:
        num_left = breaks[side.pop()] - 2
        side.extend(token for token, count in breaks.items() if count == num_left)


def _token(config: Any, *names: str) -> int | None:
    """The first of these ids that the config has."""
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)
