"""Formats prompts and completions as text and as plain values: messages, tool calls, images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rich.text import Text

from groupgrad.data.images import BLOCK_KEYS, image_blocks, image_of_block, is_image_block

IMAGE_MARKER = "[IMAGE]"

# A table cell with more characters than this shows only the start and the end of its text.
_MAX_CELL_CHARS = 2000

# C1 controls and surrogates, and characters that reorder or hide their neighbours (bidirectional, zero-width).
_UNSAFE = (
    *(*range(0x80, 0xA0), *range(0xD800, 0xE000)),
    *(*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF),
)
_VISIBLE_FORMS = {
    **{code: f"<{code:04X}>" for code in _UNSAFE},
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) != "\n"},
    0x7F: "\u2421",
}

PieceKind = Literal["role", "text", "reasoning", "tool"]


def plain_text(value: Any) -> str:
    """Returns a string as it is, and messages as one text: `ROLE`, newline, content, blank line."""
    return "".join(text for _, text in _pieces(value))


def cell_text(value: Any) -> Text:
    """Formats a prompt or completion as a styled table cell.

    Roles are upper-case and bold, reasoning is dim and italic. Markup is not interpreted, control characters become
    visible symbols, and in a text of more than 2000 characters the middle is replaced by its number of characters.
    """
    styles = {"role": "bold cyan", "reasoning": "dim italic", "tool": "yellow", "text": ""}
    cell = Text(overflow="fold")
    for kind, text in _pieces(value):
        cell.append(_shortened(visible(text)), style=styles[kind])
    return cell


def visible(text: str) -> str:
    """Replaces control, bidirectional-override and surrogate characters by visible symbols; newlines are kept."""
    if text.isascii() and text.isprintable():
        return text
    return text.replace("\r\n", "\n").expandtabs(4).translate(_VISIBLE_FORMS)


def duration(seconds: float | None) -> str | None:
    """Formats a time as `0.2 ms`, `12 ms`, `3.4 s`, `5 min` or `2.1 h`, as the page does; None for None."""
    if seconds is None or not math.isfinite(seconds):
        return None
    if 0 < seconds < 5e-5:
        return "<0.1 ms"
    if seconds < 0.9995:
        return f"{_rounded(seconds * 1000, 1 if seconds < 9.95e-3 else 0)} ms"
    if seconds < 120:
        return f"{_rounded(seconds, 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{_rounded(seconds / 3600, 1)} h"


def _rounded(value: float, digits: int) -> str:
    """A number with at most so many digits after the point, without trailing zeros."""
    return f"{round(value, digits):g}"


def images_of(messages: Any) -> list[Any]:
    """Collects the images of messages; a text has none, and markers of images are left out."""
    if isinstance(messages, str):
        return []
    blocks = image_blocks([message for message in messages or () if isinstance(message, Mapping)])
    images = [image_of_block(block) for block in blocks]
    return [image for image in images if image is not None and not (isinstance(image, str) and image == IMAGE_MARKER)]


def plain_value(value: Any) -> Any:
    """Converts to dicts, lists, texts, bytes, numbers, booleans and None only; images become a marker."""
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, str):
        # Half-decoded tokens give lone surrogates, which have no UTF-8 form.
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, Mapping):
        hidden = BLOCK_KEYS if is_image_block(value) else ()
        plain = {str(key): plain_value(item) for key, item in value.items() if key not in hidden}
        return {**plain, "image": IMAGE_MARKER} if hidden else plain
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain_value(item) for item in value), key=repr)
    if hasattr(value, "tolist"):  # arrays, tensors, NumPy scalars
        return value.tolist()
    is_image = all(hasattr(value, name) for name in ("size", "mode", "save"))  # as Pillow's have
    return IMAGE_MARKER if is_image else plain_value(str(value))


def _pieces(value: Any) -> Iterator[tuple[PieceKind, str]]:
    if isinstance(value, str):
        yield "text", value
        return
    for number, message in enumerate([] if value is None else value):
        if not isinstance(message, Mapping):
            yield "text", str(message)
            continue
        yield "role", ("\n\n" if number else "") + str(message.get("role", "?")).upper()
        reasoning = message.get("reasoning_content") or message.get("thinking")
        if reasoning:
            yield "reasoning", "\n" + str(reasoning)
        content = _content(message.get("content"))
        if content:
            yield "text", "\n" + content
        for call in message.get("tool_calls") or ():
            yield "tool", "\n" + _tool_call(call)


def _content(content: Any) -> str:
    if not isinstance(content, (list, tuple)):
        return "" if content is None else str(content)
    return "\n".join(IMAGE_MARKER if is_image_block(block) else _block(block) for block in content)


def _block(block: Any) -> str:
    if not isinstance(block, Mapping):
        return str(block)
    return str(block["text"]) if block.get("text") is not None else f"[{block.get('type', '?')}]".upper()


def _tool_call(call: Any) -> str:
    if not isinstance(call, Mapping):  # a user's function may return any messages
        return str(call)
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"{function.get('name', '?')}({'' if arguments is None else arguments})"


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CELL_CHARS:
        return text
    half = _MAX_CELL_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
