"""Images as data sets and messages hold them: found, opened, told apart. Pillow is imported where it is needed.

An image may be a Pillow image, a path, bytes of an image file, a dict of bytes and path as `datasets.Image` gives
undecoded, a `data:` address or an array of pixels.
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
"""Columns of a row that hold images; the first that holds any is the one that counts."""
BLOCK_TYPES = ("image", "image_url", "input_image")
"""Types of content blocks that stand for an image."""
BLOCK_KEYS = ("image", "image_url", "bytes", "base64", "url", "path")
"""Where a content block has its image."""
_DEEP_FORMATS = ("PNG", "PPM")
"""Files whose greys have 16 bits at most, and which Pillow may keep in 32."""


class ImageError(ValueError):
    """An image that cannot be had; the message says which, why, and what to do."""


@dataclass(slots=True, frozen=True)
class ImageSource:
    """Where an image comes from, for messages."""

    column: str
    row: int | None = None
    """Number of the row in its data set, if it is known."""
    dataset: str = ""
    number: int | None = None
    """Which of several images of the row, from 0."""
    file: str = ""
    """Its file, if it has one."""

    def __str__(self) -> str:
        which = "an image" if self.number is None else f"image {self.number}"
        parts = [f"{which} in '{self.column}'"]
        if self.row is not None:
            parts.append(f"of row {self.row}")
        if self.dataset:
            parts.append(f"of {self.dataset}")
        if self.file:
            parts.append(f"(the file {self.file!r})")
        return " ".join(parts)


def column_images(row: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The images in a row's columns, as they are, and the column's name; `images` wins over `image`.

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
        found = [item for item in value if item is not None] if isinstance(value, (list, tuple)) else [value]
        if found:
            return column, found
    return "", []


def image_blocks(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The content blocks of a conversation that stand for images, in their order."""
    for message in messages:
        content = message.get("content")
        for block in content if isinstance(content, (list, tuple)) else ():
            if is_image_block(block):
                yield block


def is_image_block(block: Any) -> bool:
    """True for a content block that stands for an image, with or without one of its own."""
    return isinstance(block, Mapping) and block.get("type") in BLOCK_TYPES


def image_of_block(block: Mapping[str, Any]) -> Any:
    """A block's own image, not opened; None if it is only the place of one."""
    for key in BLOCK_KEYS:
        value = block.get(key)
        if value is None or (isinstance(value, str) and not value):
            continue
        if key == "base64":
            return f"data:image;base64,{value}"
        return value.get("url") if key == "image_url" and isinstance(value, Mapping) else value
    return None


def open_image(value: Any, place: ImageSource) -> Any:
    """The image in memory, upright, in RGB. ImageError for one that cannot be had, with its place."""
    from PIL import Image, ImageOps

    image = value if isinstance(value, Image.Image) else _opened(value, place)
    place = replace(place, file=_file_of(value))
    # A picture that is read when it is used is read now; what Pillow says of one may depend on it.
    _attempt(image.load, place)
    if image is value and image.mode == "RGB" and not image.getexif():
        return image  # The same object stays one: rows of a group share it.
    is_deep = _is_deep_grey(image, place)
    upright = _attempt(lambda: ImageOps.exif_transpose(image), place)
    if is_deep:
        # Pillow itself would take every number above 255 for white.
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    return _attempt(lambda: upright.convert("RGB"), place)


def size_of(value: Any, place: ImageSource) -> tuple[int, int]:
    """An image's (height, width), read without decoding it.

    ImageError for one that is missing or no image, or whose numbers have no range.
    """
    from PIL import Image

    with nullcontext(value) if isinstance(value, Image.Image) else _opened(value, place) as image:
        _is_deep_grey(image, replace(place, file=_file_of(value)))
        return image.height, image.width


def digest(images: Sequence[Any]) -> str:
    """The same text for the same pictures (RGB), and for no others."""
    found = hashlib.blake2b(digest_size=16)
    for image in images:
        found.update(f"{image.mode} {image.size};".encode())
        found.update(image.tobytes())
    return found.hexdigest()


def _is_deep_grey(image: Any, place: ImageSource) -> bool:
    """True for 16 bits of grey a pixel. ImageError for greys of which nothing says what is white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _DEEP_FORMATS):
        return True
    if image.mode in ("I", "F"):
        raise ImageError(
            f"{place} is of Pillow's mode {image.mode!r}, whose numbers have no set range, so that nobody knows which "
            "is white; scale them to 0 to 255 and store them in 8 bits, as Image.fromarray(array.astype('uint8')) does"
        )
    return False


def _opened(value: Any, place: ImageSource) -> Any:
    """The image with its size known, its pixels perhaps not read yet."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = _entry(value, place)
    if isinstance(value, (str, os.PathLike)):
        value = _address(os.fspath(value), place)
    if isinstance(value, (bytes, bytearray, memoryview)):
        if not len(value):
            raise ImageError(f"{place} has no bytes at all; remove the row or give the image")
        value = io.BytesIO(value)
    if isinstance(value, np.ndarray):
        return _attempt(lambda: Image.fromarray(value), place)
    if not isinstance(value, (Path, io.BytesIO)) and not hasattr(value, "read"):
        raise ImageError(
            f"{place} is a {type(value).__name__}; give a Pillow image, a path, the bytes of an image file, or a dict "
            "with 'bytes' or 'path'"
        )
    if isinstance(value, Path) and not value.is_file():
        raise ImageError(
            f"{place} is the path {str(value)!r}, but there is no such file (relative paths begin at {os.getcwd()}); "
            "give an existing one"
        )
    return _attempt(lambda: Image.open(value), place)


def _file_of(value: Any) -> str:
    """The name of the file that an image is read from; empty if it has none."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else None
    value = getattr(value, "filename", value)
    is_name = isinstance(value, (str, os.PathLike)) and not str(value).startswith("data:")
    return str(value) if is_name else ""


def _entry(value: Mapping[str, Any], place: ImageSource) -> Any:
    """What a dict as `datasets.Image` gives undecoded holds."""
    found = value.get("bytes")
    if found is None:
        found = value.get("path") or value.get("url")
    if found is None:
        raise ImageError(f"{place} is a dict with {sorted(map(str, value))}, but it has neither 'bytes' nor 'path'")
    return found


def _address(text: str, place: ImageSource) -> bytes | Path:
    """The file that a path names, or the bytes that a data address holds."""
    if text.startswith(("http://", "https://")):
        raise ImageError(
            f"{place} is the address {text[:100]!r}; nothing is downloaded in training: load the images into the data "
            "set first (dataset.cast_column(..., datasets.Image()) with local files or bytes)"
        )
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise ImageError(f"{place} is a data address that is no base64: {error}") from error
    return Path(text.removeprefix("file://")).expanduser()


def _attempt(action: Any, place: ImageSource) -> Any:
    """What `action` gives. Pillow and its decoders raise what they like for a broken file."""
    try:
        return action()
    except Exception as error:
        raise ImageError(
            f"{place} cannot be read: {type(error).__name__}: {error}; remove the row or replace the image"
        ) from error
