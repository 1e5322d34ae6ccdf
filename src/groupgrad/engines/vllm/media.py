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


def vllm_prompt(ids: Sequence[int], images: Sequence[Any], engine: Any) -> dict[str, Any]:
    """What vLLM's engine is given for a prompt of these (expanded) ids. ValueError if the ids do not have places for
    these images."""
    if not images:
        return {"prompt_token_ids": list(ids)}
    tokenizer = getattr(getattr(engine, "renderer", None), "tokenizer", None)
    short = folded(ids, len(images), engine.model_config.hf_config, tokenizer)
    return {"prompt_token_ids": short, "multi_modal_data": {"image": list(images)}}


def folded(ids: Sequence[int], num_images: int, config: Any, tokenizer: Any = None) -> list[int]:
    """The ids with one token for each of the images, which come first of all such tokens.

    That token is the placeholder itself, or, for Gemma 3, the token that begins an image, in place of all that its
    processor puts around placeholders (two line breaks on each side, which `tokenizer` may have joined with others).
    Idefics 3 and SmolVLM cut an image into several, with tokens between them; all of it is folded. Where nothing is
    around images a run may hold several of them if it is the only one. ValueError if there are otherwise fewer runs of
    placeholders than images.
    """
    placeholder = _token(config, "image_token_id", "image_token_index")
    if placeholder is None:
        kind = getattr(config, "model_type", type(config).__name__)
        raise ValueError(f"the prompt has {num_images} images, but {kind} names no token for images: vLLM cannot see")
    whole = _without_tiles(list(ids), num_images, placeholder, tokenizer)
    if whole is not None:
        return whole
    begin = _token(config, "boi_token_id", "boi_token_index")
    end = _token(config, "eoi_token_id", "eoi_token_index")
    breaks = {} if begin is None else _line_breaks(tokenizer)
    found: list[int] = []
    rest = list(reversed(ids))
    num_folded = 0
    while rest:
        if rest[-1] != placeholder or num_folded == num_images:
            found.append(rest.pop())
            continue
        while rest and rest[-1] == placeholder:
            rest.pop()
        num_folded += 1
        if begin is not None and found and found[-1] == begin and rest and rest[-1] == end:
            rest.pop()
            found.pop()
            if _take_two(found, breaks, rest):
                _take_two(rest, breaks, None)
            found.append(begin)
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


def _without_tiles(ids: list[int], num_images: int, placeholder: int, tokenizer: Any) -> list[int] | None:
    """One placeholder in place of each image that was cut into tiles; None where no processor does that.

    Each tile begins with a token that ends the last one too; the whole image comes last, after a token of its own.
    """
    edge, whole = (_known(tokenizer, text) for text in ("<fake_token_around_image>", "<global-img>"))
    if edge is None or whole is None:
        return None
    found: list[int] = []
    place = 0
    for _ in range(num_images):
        try:
            start = ids.index(edge, place)
            end = ids.index(edge, ids.index(whole, start))
        except ValueError:
            return None
        found += [*ids[place:start], placeholder]
        place = end + 1
    return found + ids[place:]


def _known(tokenizer: Any, text: str) -> int | None:
    """The token of that text; None if the tokenizer has none."""
    token = None if tokenizer is None else tokenizer.convert_tokens_to_ids(text)
    return None if token == getattr(tokenizer, "unk_token_id", None) else token


def _line_breaks(tokenizer: Any) -> dict[int, int]:
    """Tokens that are line breaks alone, and how many."""
    found = {count: _known(tokenizer, "\n" * count) for count in range(1, 9)}
    return {token: count for count, token in found.items() if token is not None}


def _take_two(tokens: list[int], breaks: dict[int, int], others: list[int] | None) -> bool:
    """Take two line breaks off the last token, if it has them, and so has that of `others`."""
    if not tokens or breaks.get(tokens[-1], 0) < 2:
        return False
    if others is not None and (not others or breaks.get(others[-1], 0) < 2):
        return False
    left = breaks[tokens.pop()] - 2
    tokens.extend(token for token, count in breaks.items() if count == left)
    return True


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
