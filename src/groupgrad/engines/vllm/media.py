"""Images on their way to vLLM: as PNG in a request, and the form of a prompt that vLLM itself expands.

A prompt here has as many placeholder tokens for an image as the model has features of it. vLLM wants one, and puts the
others in by its own processor; given the long form it would expand each of them again. So runs of placeholders are
folded, and the ids that vLLM then says it has used must be those that the policy is trained on.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

_PNG_MODES = frozenset({"1", "L", "LA", "RGB", "RGBA"})


def encode(image: Any) -> str:
    """A PIL image as PNG in base64, without loss; modes that PNG lacks become RGB."""
    body = io.BytesIO()
    (image if image.mode in _PNG_MODES else image.convert("RGB")).save(body, format="PNG", compress_level=1)
    return base64.b64encode(body.getvalue()).decode("ascii")


def decode(text: str) -> Any:
    """The PIL image again. ValueError if it is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)))
        image.load()
    except (ValueError, UnidentifiedImageError, OSError) as error:
        raise ValueError(f"an image of {len(text)} characters cannot be read: {error}") from None
    return image


def vllm_prompt(ids: Sequence[int], images: Sequence[Any], config: Any) -> dict[str, Any]:
    """What vLLM is given for a prompt of these (expanded) ids; `config` is the model's own. ValueError if the ids do
    not have places for these images."""
    if not images:
        return {"prompt_token_ids": list(ids)}
    return {"prompt_token_ids": folded(ids, len(images), config), "multi_modal_data": {"image": list(images)}}


def folded(ids: Sequence[int], num_images: int, config: Any) -> list[int]:
    """The ids with one token for each of the images, which come first of all such tokens.

    That token is the placeholder itself, or, for Gemma 3, the token that begins an image, in place of all that its
    processor puts around placeholders. A run may hold several images if it is the only one. ValueError if there are
    otherwise fewer runs of placeholders than images.
    """
    placeholder = _token(config, "image_token_id", "image_token_index")
    if placeholder is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"the prompt has {num_images} images, but {kind} names no token for images: vLLM cannot see")
    begin = _token(config, "boi_token_id", "boi_token_index")
    end = _token(config, "eoi_token_id", "eoi_token_index")
    found: list[int] = []
    place = num_folded = 0
    while place < len(ids):
        if ids[place] != placeholder or num_folded == num_images:
            found.append(ids[place])
            place += 1
            continue
        while place < len(ids) and ids[place] == placeholder:
            place += 1
        num_folded += 1
        if begin is not None and found and found[-1] == begin and place < len(ids) and ids[place] == end:
            place += 1
            if len(found) > 1 and place < len(ids) and found[-2] == ids[place]:
                # The processor puts the same line break before and behind.
                del found[-2]
                place += 1
        else:
            found.append(placeholder)
    if num_folded == 1 and begin is None:
        # Images side by side: each of the tokens is expanded for its own image.
        place = found.index(placeholder)
        found[place:place] = [placeholder] * (num_images - 1)
    elif num_folded < num_images:
        raise ValueError(
            f"the prompt has {num_images} images, but only {num_folded} runs of their placeholder (token "
            f"{placeholder}) among its {len(ids)} tokens; two images need a token between them"
        )
    return found


def check_prompt(ids: Sequence[int], told: Sequence[int] | None) -> None:
    """ValueError if the ids that vLLM says it has used are not those of the prompt."""
    if told is None or list(told) == list(ids):
        return
    place = next((i for i, (ours, theirs) in enumerate(zip(ids, told)) if ours != theirs), min(len(ids), len(told)))
    raise ValueError(
        f"vLLM made another prompt of the images than the policy is trained on: {len(told)} tokens instead of "
        f"{len(ids)}, different from token {place} on; it must have the same processor settings (image sizes), and "
        "know this kind of model: save the processor beside the model that is served, or set use_vllm=False"
    )


def _token(config: Any, *names: str) -> int | None:
    """The first of these that the config names."""
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)
