"""The completions table in wandb and trackio."""

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
) -> list[str]:
    """Log the records as a table named `completions` to each of wandb and trackio that is asked for and has a run.

    Prompts and completions are logged as text, other structured values as text too. With `with_images` a record's
    images go to a column `image`. A tracker that fails is reported as a warning, since a lost table must not end a
    run. Returns the names of the trackers that took the table.
    """
    done = []
    for name, open_run in (("wandb", _has_wandb_run), ("trackio", _has_trackio_run)):
        if name not in report_to and "all" not in report_to:
            continue
        try:
            tracker = importlib.import_module(name)
        except ImportError:
            continue
        if not open_run(tracker):
            continue
        try:
            frame = _frame(records, tracker.Image if with_images else None)
            tracker.log({TABLE_NAME: tracker.Table(dataframe=frame), "train/global_step": step})
            done.append(name)
        except Exception as error:
            logger.warning("the completions table of step %d was not logged to %s: %r", step, name, error)
    return done


def unique_by_prompt(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The first record of each distinct prompt, text and images, in order."""
    first: dict[tuple[str, int], Mapping[str, Any]] = {}
    for record in records:
        first.setdefault((plain_text(record.get("prompt")), _pictured(record)), record)
    return list(first.values())


def _pictured(record: Mapping[str, Any]) -> int:
    """Equal for records with the same images in their prompts."""
    images = [] if isinstance(record.get("prompt"), str) else images_of(record.get("prompt"))
    return hash(tuple((image.size, image.tobytes()) if hasattr(image, "tobytes") else str(image) for image in images))


def record_images(record: Mapping[str, Any]) -> list[Any]:
    """The images of a record: those in its `image` or `images` column, else those inside its messages."""
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
        pictures = [[image_class(image) for image in record_images(record)] for record in records]
        if any(pictures):
            # One picture a cell where that is all there is: both trackers show it larger than a list of one.
            single = all(len(images) <= 1 for images in pictures)
            columns["image"] = [(images[0] if images else None) if single else images for images in pictures]
    return pd.DataFrame(columns)


def _cell(key: str, value: Any) -> Any:
    if key in ("prompt", "completion"):
        return plain_text(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return plain_text(value) if is_image(value) else str(plain_value(value))
