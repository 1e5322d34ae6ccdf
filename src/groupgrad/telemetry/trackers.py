"""Logs completion records as a table to wandb and trackio."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from groupgrad.telemetry.parquet import is_image, plain_value
from groupgrad.telemetry.render import images_of, plain_text

logger = logging.getLogger(__name__)

TABLE_NAME = "completions"


def log_to_trackers(
    records: Sequence[Mapping[str, Any]], *, step: int, report_to: Sequence[str], with_images: bool
) -> None:
    """Logs the records as a table named `completions` to those of wandb and trackio in `report_to` that have a run.

    Prompts, completions and other structured values are logged as text, and with `with_images` the images of a record
    go to a column `image`. A tracker that fails is reported by a warning, since a lost table must not end a run.
    """
    for name, has_run in (("wandb", _has_wandb_run), ("trackio", _has_trackio_run)):
        if name not in report_to and "all" not in report_to:
            continue
        try:
            tracker = importlib.import_module(name)
        except ImportError:
            continue
        if not has_run(tracker):
            continue
        try:
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
    images = [] if isinstance(record.get("prompt"), str) else images_of(record.get("prompt"))
    return hash(tuple((image.size, image.tobytes()) if hasattr(image, "tobytes") else str(image) for image in images))


def record_images(record: Mapping[str, Any]) -> list[Any]:
    """Returns the images of a record's `images` or `image` column, or else of its messages."""
    for key in ("images", "image"):
        if record.get(key) is not None:
            return images_of(record[key])
    return [
        image
        for key in ("prompt", "completion")
        if not isinstance(record.get(key), str)
        for image in images_of(record.get(key))
    ]


def _has_wandb_run(wandb: Any) -> bool:
    return getattr(wandb, "run", None) is not None


def _has_trackio_run(trackio: Any) -> bool:
    context = getattr(trackio, "context_vars", None)
    return context is not None and context.current_run.get() is not None


def _frame(records: Sequence[Mapping[str, Any]], image_class: Any) -> pd.DataFrame:
    keys = dict.fromkeys(key for record in records for key in record if key not in ("image", "images"))
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
    return plain_text(value) if is_image(value) else str(plain_value(value))
