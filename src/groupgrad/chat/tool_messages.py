"""Message content from tool results: text, JSON, and blocks with images."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import pathlib
import sys
import uuid
from typing import Any

import numpy as np
import torch

from groupgrad.data.values import copy_containers

Content = str | list[dict[str, Any]]

_IMAGE_KEYS = ("image", "url", "path", "base64", "image_url")


class NotJson(TypeError):
    """A tool's result has no form in JSON; the message is worded for the model."""


def render(value: Any, max_chars: int) -> Content:
    """Converts a tool's result to message content: a text as it is, else JSON; text is truncated to `max_chars`.

    A list of content blocks stays a list if it has images. Blocks of text alone are joined, since templates of text
    models render nothing for a list. NotJson for values that JSON has no form for.
    """
    if is_image(value):
        return [{"type": "image", "image": value}]
    if isinstance(value, list) and value and all(map(_is_block, value)):
        return _render_blocks(value, max_chars)
    return cut(_text(value), max_chars)


def returned(value: Any, content: Content, max_chars: int) -> Any:
    """A tool's result as reward functions get it: a list as it is, else a text, by `str` as in TRL.

    `content` is what the model gets of it, which is kept where it has images.
    """
    if isinstance(content, list):
        return content
    if isinstance(value, list):
        return copy_containers(value)  # later calls may change it
    return content if isinstance(value, str) else cut(str(value), max_chars)


def cut(text: str, max_chars: int) -> str:
    """Truncates a text to `max_chars` characters and appends a notice if it was longer."""
    # JSON may spell out lone surrogates, which no tokenizer accepts.
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: {max_chars} characters of {len(text)} shown]"


def _text(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, str):
        return str.__str__(value)  # the plain text of a subclass
    try:
        if isinstance(value, (bytes, bytearray)):
            return bytes(value).decode("utf-8")
        return json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise NotJson(f"the tool returned a {type(value).__name__}, which cannot be written as JSON") from error


def _plain(value: Any) -> Any:
    """Converts a value of a common type without a form in JSON to one that has it."""
    if isinstance(value, (np.generic, np.ndarray, torch.Tensor)):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        # The iteration order of a set of texts differs between processes.
        return sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (pathlib.PurePath, uuid.UUID, datetime.timedelta)):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8")
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


def _is_block(item: Any) -> bool:
    """True for a content block. Rows of a table may have a column `type` too, so other keys are checked as well."""
    if not isinstance(item, dict):
        return False
    if item.get("type") == "text":
        return set(item) == {"type", "text"} and isinstance(item["text"], str)
    return item.get("type") in ("image", "image_url") and any(key in item for key in _IMAGE_KEYS)


def _render_blocks(blocks: list[dict[str, Any]], max_chars: int) -> Content:
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if len(texts) == len(blocks):
        return cut("".join(texts), max_chars)
    total, left = sum(map(len, texts)), max_chars
    content: list[dict[str, Any]] = []
    for block in blocks:
        if block["type"] != "text":
            content.append(dict(block))
        elif left >= 0:  # texts behind the truncated one are left out
            text, left = cut(block["text"][:left], max_chars), left - len(block["text"])
            notice = f"\n[cut: {max_chars} characters of {total} shown]" if left < 0 else ""
            content.append({"type": "text", "text": text + notice})
    return content


def is_image(value: Any) -> bool:
    """True for a Pillow image. Pillow need not be installed."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
