"""Logs completion records as a table to wandb and trackio."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from groupgrad.data.images import COLUMNS as IMAGE_COLUMNS
from groupgrad.data.images import column_images
from groupgrad.run_folder.render import images_of, plain_text, plain_value

logger = logging.getLogger(__name__)

TABLE_NAME = "completions"
_CURRENT_RUN: dict[str, Callable[[Any], Any]] = {
    "wandb": lambda wandb: wandb.run,
    "trackio": lambda trackio: trackio.context_vars.current_run.get(),
}


def log_to_trackers(
    records: Sequence[Mapping[str, Any]], *, step: int, report_to: Sequence[str], with_images: bool
) -> None:
    """Logs the records as a table `completions` to wandb and trackio, if they are in `report_to` and have a run.

    Prompts, completions and other structured values are logged as text, and with `with_images` the images of a record
    go to a column `image`. A tracker that fails is reported by a warning, since a lost table must not end a run.
    """
    for name, current_run in _CURRENT_RUN.items():
        if name not in report_to and "all" not in report_to:
            continue
        try:
            tracker = importlib.import_module(name)
        except ImportError:
            continue
        try:
            if current_run(tracker) is None:
                continue
            frame = _frame(records, tracker.Image if with_images else None)
            tracker.log({TABLE_NAME: tracker.Table(dataframe=frame), "train/global_step": step})
        except Exception as error:
            logger.warning("the completions table of step %d was not logged to %s: %r", step, name, error)


def unique_by_prompt(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keeps the first record of each distinct prompt; prompts with other images are distinct."""
    first: dict[tuple[str, int], Mapping[str, Any]] = {}
    for record in records:
        first.setdefault((plain_text(record.get("prompt")), _prompt_images_hash(record)), record)
    return list(first.values())


def _prompt_images_hash(record: Mapping[str, Any]) -> int:
    images = images_of(record.get("prompt"))
    return hash(tuple((image.size, image.tobytes()) if hasattr(image, "tobytes") else str(image) for image in images))


def record_images(record: Mapping[str, Any]) -> list[Any]:
    """Returns the images of a record's `images` or `image` column, or else of its messages."""
    return column_images(record)[1] or [*images_of(record.get("prompt")), *images_of(record.get("completion"))]


def _frame(records: Sequence[Mapping[str, Any]], image_class: Any) -> pd.DataFrame:
    keys = dict.fromkeys(key for record in records for key in record if key not in IMAGE_COLUMNS)
    columns: dict[str, list[Any]] = {key: [_cell(key, record.get(key)) for record in records] for key in keys}
    if image_class is not None:
        cells = [[image_class(image) for image in record_images(record)] for record in records]
        if any(cells):
            # Both trackers display a single image larger than a list of one image.
            if all(len(images) <= 1 for images in cells):
                cells = [images[0] if images else None for images in cells]
            columns["image"] = cells
    return pd.DataFrame(columns)


def _cell(key: str, value: Any) -> Any:
    if key in ("prompt", "completion"):
        return plain_text(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(plain_value(value))
