"""Finds, opens and identifies the images of data sets and messages. Pillow is imported only when it is used.

An image is a Pillow image, a path, the bytes of an image file, a dict of bytes and path (an undecoded
`datasets.Image`), a `data:` URL or an array of pixels.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("images", "image")
"""Columns of images; the first one with an image is used."""
BLOCK_TYPES = ("image", "image_url", "input_image")
"""Types of content blocks for images."""
BLOCK_KEYS = ("image", "image_url", "bytes", "base64", "url", "path")
"""Keys of a content block that may hold its image."""
_DEEP_FORMATS = ("PNG", "PPM")
"""File formats with at most 16 bits of grey, which Pillow may load in 32 bits."""


class ImageError(ValueError):
    """A missing or unreadable image; the message says which, why, and what to do."""


@dataclass(slots=True, frozen=True)
class ImageSource:
    """The origin of an image, for messages."""

    column: str
    number: int | None = None
    """Index of the image among several of the row."""
    file: str = ""
    """File name, if there is one."""
    root: str = ""
    """Folder that paths are relative to and may not lead out of; empty: any path, from the working directory."""

    def __str__(self) -> str:
        which = "an image" if self.number is None else f"image {self.number}"
        parts = [f"{which} in '{self.column}'"]
        if self.file:
            parts.append(f"(the file {self.file!r})")
        return " ".join(parts)


def is_plain_text(row: Mapping[str, Any]) -> bool:
    """True if the row's prompt is a text, and no column brings an image."""
    return isinstance(row["prompt"], str) and all(row.get(column) is None for column in COLUMNS)


def column_images(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The name of a row's image column and its images, not opened; `images` has precedence over `image`.

    TypeError if `images` is neither a list nor None.
    """
    for column in COLUMNS:
        value = row.get(column)
        if value is None:
            continue
        if column == "images" and not isinstance(value, (list, tuple)):
            raise TypeError(
                f"the column 'images' holds a {type(value).__name__}; it must be a list of images in each row (rename "
                "the column to 'image' if there is one a row)"
            )
        images = [item for item in value if item is not None] if isinstance(value, (list, tuple)) else [value]
        if images:
            return column, images
    return "", []


def image_blocks(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The image blocks of a conversation, in their order."""
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, (list, tuple)) else ():
            if is_image_block(block):
                yield block


def is_image_block(block: Any) -> bool:
    """True for a content block of an image, with or without the image itself."""
    return isinstance(block, Mapping) and block.get("type") in BLOCK_TYPES


def image_of_block(block: Mapping[str, Any]) -> Any:
    """A block's image, not opened; None for a block without one."""
    for key in BLOCK_KEYS:
        value = block.get(key)
        if value is None or (isinstance(value, str) and not value):
            continue
        if key == "base64":
            return f"data:image;base64,{value}"
        return value.get("url") if key == "image_url" and isinstance(value, Mapping) else value
    return None


def open_image(value: Any, source: ImageSource) -> Any:
    """The image loaded into memory, upright, in RGB. ImageError with the source for a missing or unreadable one."""
    from PIL import Image, ImageOps

    image = value if isinstance(value, Image.Image) else _opened(value, source)
    source = replace(source, file=_file_of(value))
    # Pillow loads files lazily, and an image's mode may change when it is loaded.
    _attempt(image.load, source)
    if image is value and image.mode == "RGB" and not image.getexif():
        return image  # not copied: the rows of a group share the object
    is_deep = _is_deep_grey(image, source)
    upright = _attempt(lambda: ImageOps.exif_transpose(image), source)
    if is_deep:
        # Pillow's own conversion clips every value above 255 to white.
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    return _attempt(lambda: upright.convert("RGB"), source)


def size_of(value: Any, source: ImageSource) -> tuple[int, int]:
    """An image's (height, width), read without decoding it.

    ImageError for a missing file, one that is no image, or one whose values have no fixed range.
    """
    from PIL import Image

    with nullcontext(value) if isinstance(value, Image.Image) else _opened(value, source) as image:
        _is_deep_grey(image, replace(source, file=_file_of(value)))
        return image.height, image.width


def digest(images: Sequence[Any]) -> str:
    """Hash of the images' pixels and sizes."""
    content = hashlib.blake2b(digest_size=16)
    for image in images:
        content.update(f"{image.mode} {image.size};".encode())
        content.update(image.tobytes())
    return content.hexdigest()


def _is_deep_grey(image: Any, source: ImageSource) -> bool:
    """True for 16 bits of grey a pixel. ImageError for greys whose white value is undefined."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _DEEP_FORMATS):
        return True
    if image.mode in ("I", "F"):
        raise ImageError(
            f"{source} is of Pillow's mode {image.mode!r}, whose numbers have no set range, so that nobody knows which "
            "is white; scale them to 0 to 255 and store them in 8 bits, as Image.fromarray(array.astype('uint8')) does"
        )
    return False


def _opened(value: Any, source: ImageSource) -> Any:
    """The image with its header read, its pixels perhaps not."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = next((value[key] for key in ("bytes", "path", "url") if value.get(key) is not None), None)
    if isinstance(value, (str, os.PathLike)):
        value = _content_of_address(os.fspath(value), source)
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = io.BytesIO(value)
    if isinstance(value, np.ndarray):
        return _attempt(lambda: Image.fromarray(value), source)
    return _attempt(lambda: Image.open(value), source)


def _file_of(value: Any) -> str:
    """The file name of an image; empty if it has none."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else None
    value = getattr(value, "filename", value)
    is_name = isinstance(value, (str, os.PathLike)) and not str(value).startswith("data:")
    return str(value) if is_name else ""


def _content_of_address(text: str, source: ImageSource) -> bytes | Path:
    """The file of a path, or the bytes of a `data:` URL. ImageError for a web address."""
    if text.startswith(("http://", "https://")):
        raise ImageError(
            f"{source} is the address {text[:100]!r}; nothing is downloaded in training: load the images into the data "
            "set first (dataset.cast_column(..., datasets.Image()) with local files or bytes)"
        )
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ImageError(f"{source} is a data address that is no base64: {error}") from error
    path = Path(text.removeprefix("file://")).expanduser()
    return _below_root(path, source) if source.root else path


def _below_root(path: Path, source: ImageSource) -> Path:
    """The path below the source's root, links followed. ImageError for one that leads out of it."""
    root = Path(source.root).resolve()
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root):
        raise ImageError(
            f"{source} is the path {str(path)!r}, which leads to {str(resolved)!r}, out of image_root={source.root!r}; "
            "move the file there, or set image_root to a folder that has all images"
        )
    return resolved


def _attempt(action: Any, source: ImageSource) -> Any:
    """The result of `action`. ImageError for any exception, since Pillow's decoders raise many kinds."""
    try:
        return action()
    except Exception as error:
        raise ImageError(
            f"{source} cannot be read: {type(error).__name__}: {error}; remove the row or replace the image"
        ) from error
