"""Prompts and completions as text that is safe to show: messages, tool calls, images, control characters."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from rich.text import Text

IMAGE_MARKER = "[IMAGE]"

# Beyond this many characters a table cell shows only its beginning and its end.
_MAX_CELL = 2000

# Characters that reorder or hide their neighbours on a terminal (bidirectional controls, zero-width marks).
_INVISIBLE = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF}

PieceKind = Literal["role", "text", "reasoning", "tool"]


def plain_text(value: Any) -> str:
    """A prompt or completion as one text: a string as it is, messages as `ROLE`, newline, content, blank line."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return "".join(text for _, text in _pieces(value))


def cell_text(value: Any) -> Text:
    """A prompt or completion as a styled table cell.

    Roles are upper-case and bold, reasoning is dim italics. Markup is not interpreted, control characters become
    visible symbols, and a text of more than 2000 characters loses its middle, with the number of characters left out.
    """
    pieces = [("text", plain_text(value))] if value is None or isinstance(value, str) else list(_pieces(value))
    styles = {"role": "bold cyan", "reasoning": "dim italic", "tool": "yellow", "text": ""}
    cell = Text(overflow="fold")
    for kind, text in pieces:
        cell.append(_shortened(visible(text)), style=styles[kind])
    return cell


def visible(text: str) -> str:
    """`text` with every control, bidirectional-override and surrogate character made visible; newlines are kept."""
    if text.isascii() and text.isprintable():
        return text
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(_visible_character(character) for character in text)


def images_of(value: Any) -> list[Any]:
    """The image objects (or addresses) inside messages, a list of images, or one image; text holds none."""
    if value is None or isinstance(value, str):
        return [value] if isinstance(value, str) else []
    if not isinstance(value, (list, tuple)):
        return [value]
    found: list[Any] = []
    for item in value:
        if not isinstance(item, Mapping):
            found.extend(images_of(item))
            continue
        content = item.get("content")
        for block in content if isinstance(content, (list, tuple)) else ():
            image = _image_in(block) if _is_image(block) else None
            # A marker is all that a checkpoint keeps of an image.
            if image is not None and not (isinstance(image, str) and image == IMAGE_MARKER):
                found.append(image)
    return found


def without_images(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with a marker in place of every image in its prompt and completion."""
    changed = {key: _marked(record[key]) for key in ("prompt", "completion") if key in record}
    return {**record, **changed}


def _marked(messages: Any) -> Any:
    if not isinstance(messages, (list, tuple)):
        return messages
    return [
        {**message, "content": [_bare(block) for block in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        else message
        for message in messages
    ]


def _bare(block: Any) -> Any:
    return {"type": "image", "image": IMAGE_MARKER} if _is_image(block) else block


def _is_image(block: Any) -> bool:
    return isinstance(block, Mapping) and block.get("type") in ("image", "image_url", "input_image")


def _image_in(block: Mapping[str, Any]) -> Any:
    for key in ("image", "image_url", "url", "path"):
        if block.get(key) is not None:
            inner = block[key]
            return inner.get("url") if isinstance(inner, Mapping) else inner
    return None


def _pieces(messages: Any) -> Iterator[tuple[PieceKind, str]]:
    if isinstance(messages, Mapping):
        messages = [messages]
    for number, message in enumerate(messages):
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
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (list, tuple)):
        return str(content)
    parts = []
    for block in content:
        if _is_image(block):
            parts.append(IMAGE_MARKER)
        elif isinstance(block, Mapping):
            parts.append(str(block["text"]) if block.get("text") is not None else f"[{block.get('type', '?')}]".upper())
        else:
            parts.append(str(block))
    return "\n".join(parts)


def _tool_call(call: Any) -> str:
    if not isinstance(call, Mapping):
        return str(call)
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return f"{function.get('name', '?')}({arguments})"
    if isinstance(arguments, Mapping):
        inside = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    else:
        inside = "" if arguments is None else repr(arguments)
    return f"{function.get('name', '?')}({inside})"


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n" or (code >= 0x20 and character.isprintable()):
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if code in _INVISIBLE or unicodedata.category(character) in ("Cc", "Cs"):
        return f"<{code:04X}>"
    return character


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CELL:
        return text
    half = _MAX_CELL // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
