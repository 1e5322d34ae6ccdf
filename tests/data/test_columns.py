"""Rows and columns of a data set, read without decoding images."""

from __future__ import annotations

import io
from typing import Any

import pytest
import tiny_vlms
from datasets import Dataset, Image, List

from groupgrad.data.columns import first_row, prompt_rows, read_row
from groupgrad.data.images import ImageError
from groupgrad.data.prompts import check_dataset
from groupgrad.multimodal.vlm_prompts import VisionPromptMaker

RED = tiny_vlms.make_image("red")


@pytest.fixture(scope="module")
def maker() -> VisionPromptMaker:
    processor = tiny_vlms.build("qwen2_vl").processor
    return VisionPromptMaker(processor, processor.tokenizer)


def asked(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "hi"}], **columns}


def png() -> bytes:
    buffer = io.BytesIO()
    RED.save(buffer, "PNG")
    return buffer.getvalue()


def broken(column: str) -> Dataset:
    values: list[Any] = [{"bytes": png(), "path": None}, {"bytes": b"broken", "path": None}]
    feature: Any = Image()
    if column == "images":
        values, feature = [[value] for value in values], List(Image())
    return Dataset.from_list([asked(**{column: value}) for value in values]).cast_column(column, feature)


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_broken_image_is_named_with_its_row(column: str, maker):
    dataset = broken(column)
    assert first_row(dataset) is not None
    assert len(list(prompt_rows(dataset))) == 2
    with pytest.raises(ImageError, match=f"row 1 of train_dataset: .*in '{column}' cannot be read"):
        check_dataset(dataset, "train_dataset", maker)
    assert read_row(dataset, 0)["prompt"] == asked()["prompt"]
    with pytest.raises(ImageError, match="row 1 of the data set cannot be read"):
        read_row(dataset, 1)


def test_rows_that_a_transform_makes(maker):
    """Only their first row is checked, since making rows may be costly."""
    dataset = Dataset.from_list([asked()] * 2)

    def draw(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "image": [RED] * len(rows["prompt"])}

    shown = dataset.with_transform(draw)
    assert [sorted(row) for row in prompt_rows(shown)] == [["image", "prompt"], ["prompt"]]
    check_dataset(shown, "train_dataset", maker)
