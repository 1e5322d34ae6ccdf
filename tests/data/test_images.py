"""Images of rows and messages: formats, modes, errors, digests."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from groupgrad.data.images import (
    ImageError,
    ImageSource,
    column_images,
    digest,
    image_blocks,
    image_of_block,
    open_image,
    size_of,
)

PLACE = ImageSource("image")


def make_image(size: tuple[int, int] = (4, 2), color: Any = "red") -> Image.Image:
    return Image.new("RGB", size, color)


def file_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(file_bytes(make_image()))
    return tmp_path / "a.png"


def spelled(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {
        "object": make_image(),
        "path": str(path),
        "Path": path,
        "file address": f"file://{path}",
        "bytes": data,
        "dict of bytes": {"bytes": data, "path": None},
        "dict of a path": {"bytes": None, "path": str(path)},
        "dict of both": {"bytes": data, "path": "only a name"},
        "data address": "data:image/png;base64," + base64.b64encode(data).decode(),
        "array": np.array(make_image()),
        "file": io.BytesIO(data),
    }


def test_every_spelling_of_an_image_is_the_same_image(path: Path):
    for name, value in spelled(path).items():
        image = open_image(value, PLACE)
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 2), (255, 0, 0)), name
        assert digest([image]) == digest([make_image()])
    for name, value in spelled(path).items():
        assert size_of(value, PLACE) == (2, 4), name


def test_every_mode_becomes_rgb_and_rgb_in_memory_is_taken_as_it_is():
    for mode in ("L", "RGBA", "P", "1", "CMYK", "LA"):
        assert open_image(make_image(color="white").convert(mode), PLACE).getpixel((0, 0)) == (255, 255, 255), mode
    image = make_image()
    assert open_image(image, PLACE) is image


GREYS = np.array([[0, 255, 256, 0x8000, 0xFFFF]], dtype=np.uint16)


@pytest.mark.parametrize("kind", ["array", "big-endian", "PNG", "TIFF", "PPM"])
def test_16_bit_greys_keep_the_upper_8_bits(kind: str):
    """As for RGB with 16 bits a channel, also where Pillow loads a PNG's greys in 32 bits."""
    value = {"array": GREYS, "big-endian": GREYS.astype(">u2")}.get(kind)
    if value is None:
        image = Image.fromarray(GREYS)
        value = file_bytes(image.convert("I") if kind == "PPM" else image, kind)  # old releases of Pillow need it
    assert size_of(value, PLACE) == (1, 5)
    expected = [[[grey] * 3 for grey in (0, 0, 1, 0x80, 0xFF)]]
    assert np.array(open_image(value, PLACE)).tolist() == expected


def test_a_turned_image_is_put_upright():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert open_image(file_bytes(make_image((4, 2)), "JPEG", exif=exif), PLACE).size == (2, 4)
    image = open_image(file_bytes(Image.fromarray(GREYS), "PNG", exif=exif), PLACE)
    assert np.array(image)[:, 0, 0].tolist() == [0, 0, 1, 0x80, 0xFF]


@pytest.mark.parametrize(("kind", "mode"), [(np.int32, "I"), (np.float32, "F")])
def test_greys_without_a_fixed_range_are_rejected(kind: Any, mode: str):
    array = GREYS.astype(kind)
    message = f"'image' is of Pillow's mode '{mode}', .*; scale them to 0 to 255"
    for value in (array, Image.fromarray(array), file_bytes(Image.fromarray(array), "TIFF")):
        for read in (open_image, size_of):
            with pytest.raises(ImageError, match=message):
                read(value, PLACE)


WHERE = r"an image in 'image'"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no/such.png", rf"{WHERE} cannot be read: FileNotFoundError: .*no/such.png"),
        (b"these are no pixels", rf"{WHERE} cannot be read: UnidentifiedImageError"),
        (b"", rf"{WHERE} cannot be read: UnidentifiedImageError"),
        ("https://example.com/a.png", rf"{WHERE} is the address 'https://example.com/a.png'; nothing is downloaded"),
        ({"bytes": None, "path": None}, rf"{WHERE} cannot be read"),
        ("data:image/png;base64,!!", "a data address that is no base64"),
        (7, rf"{WHERE} cannot be read: AttributeError"),
    ],
)
def test_unreadable_images_are_named(value: Any, message: str):
    with pytest.raises(ImageError, match=message):
        open_image(value, PLACE)
    with pytest.raises(ImageError, match=message):
        size_of(value, PLACE)


def test_a_cut_off_file_is_found_when_it_is_decoded(tmp_path: Path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG", "BMP"):
        data = file_bytes(Image.fromarray(noise), kind)
        data = data[: len(data) // 2]
        assert size_of(data, PLACE) == (64, 64)
        with pytest.raises(ImageError, match=r"image 2 in 'images' cannot be read: OSError"):
            open_image(data, ImageSource("images", 2))
        (tmp_path / "cut").write_bytes(data)
        message = r"'image' \(the file '.*cut'\) cannot be read: OSError"
        with Image.open(tmp_path / "cut") as image, pytest.raises(ImageError, match=message):
            open_image(image, PLACE)  # a lazy one


def test_the_digest_depends_on_every_pixel_and_the_shape():
    other = make_image()
    other.putpixel((3, 1), (255, 0, 1))
    keys = [digest([p]) for p in (make_image(), other, make_image((2, 4)))]
    keys += [digest([make_image(), other]), digest([other, make_image()]), digest([])]
    assert len(set(keys)) == 6


def test_images_wins_over_image():
    assert column_images({"image": 1, "images": [2, 3]}) == ("images", [2, 3])
    assert column_images({"image": 1, "images": []}) == ("image", [1])
    assert column_images({"image": None, "images": None}) == ("", [])
    assert column_images({"images": [None, 2]}) == ("images", [2])
    with pytest.raises(TypeError, match="the column 'images' holds a str; it must be a list"):
        column_images({"images": "a.png"})


def test_image_blocks():
    messages = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image", "image": 5}]},
        {"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "u"}}, {"type": "image", "path": "p"}]},
        {"role": "tool", "content": [{"type": "image", "base64": "QQ=="}]},
    ]
    assert [image_of_block(block) for block in image_blocks(messages)] == [None, 5, "u", "p", "data:image;base64,QQ=="]
