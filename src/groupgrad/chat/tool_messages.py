"""What the model gets to read of what a tool returned."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import sys
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Content = str | list[dict[str, Any]]

_IMAGE_KEYS = ("image", "url", "path", "base64", "image_url")


class NotJson(TypeError):
    """A tool returned what cannot be written as text; the message is for the model."""

    def __init__(self, type_name: str, reason: str):
        super().__init__(f"the tool returned a {type_name}, which cannot be written as JSON")
        self.type_name, self.reason = type_name, reason


@dataclass(slots=True, frozen=True)
class Rendered:
    """A tool's result as a message carries it."""

    content: Content
    images: list[Any] = field(default_factory=list[Any])
    """What the image blocks of `content` show, in their order."""


def render(value: Any, max_chars: int) -> Rendered:
    """A tool's result for the model: a text as it is, anything else as JSON; text beyond `max_chars` is cut.

    A list of content blocks with an image among them stays one; blocks of text alone become one text, since templates
    of text models write nothing for a list. NotJson for what JSON has no form for.
    """
    if is_image(value):
        return Rendered([{"type": "image", "image": value}], [value])
    if _is_blocks(value):
        return _render_blocks(value, max_chars)
    return Rendered(cut(_text(value), max_chars))


def cut(text: str, max_chars: int) -> str:
    """A text of any length as one of at most about `max_chars` characters, with a notice if it was longer."""
    # A lone surrogate, which JSON may spell out, is a character that no tokenizer takes.
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} characters of {len(text)} shown]"


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, the plain text
    try:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value).decode("utf-8")
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(type(value).__name__, f"{type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    """A value that JSON has no form for as one that it has."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        # The order of a set of texts differs from one interpreter to the next.
        return sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, (pathlib.PurePath, uuid.UUID, datetime.timedelta)):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8")
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _is_blocks(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_block(item) for item in value)


def _is_block(item: Any) -> bool:
    """True for a content block. Rows of a table may have a column `type` too, so that alone does not make one."""
    if not isinstance(item, dict):
        return False
    if item.get("type") == "text":
        return set(item) == {"type", "text"} and isinstance(item["text"], str)
    return item.get("type") in ("image", "image_url") and any(key in item for key in _IMAGE_KEYS)


def _render_blocks(blocks: list[dict[str, Any]], max_chars: int) -> Rendered:
    images = [next(block[key] for key in _IMAGE_KEYS if key in block) for block in blocks if block["type"] != "text"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if not images:
        return Rendered(cut("".join(texts), max_chars))
    total, left = sum(map(len, texts)), max_chars
    content: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "text":
            content.append(dict(block))
        elif left >= 0:  # texts behind the cut are left out
            text, left = cut(block["text"][:left], max_chars), left - len(block["text"])
            notice = f"\n[cut: {max_chars} characters of {total} shown]" if left < 0 else ""
            content.append({"type": "text", "text": text + notice})
    return Rendered(content, images)


def is_image(value: Any) -> bool:
    """True for an image of Pillow, which need not be installed."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
