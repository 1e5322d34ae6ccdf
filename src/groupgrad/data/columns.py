"""Reads rows and columns of a data set without decoding images, and computes a digest of its rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset, Image, IterableDataset

from groupgrad.data.images import COLUMNS, ImageError

_BROKEN = (OSError, SyntaxError, ValueError)
"""Errors that Pillow raises for a broken file."""


def first_row(dataset: Dataset | IterableDataset) -> dict[str, Any] | None:
    """The first row, images undecoded unless a user's transform makes them; None for an empty data set."""
    if isinstance(dataset, IterableDataset):
        undecoded = dataset.decode(False) if dataset.features and hasattr(dataset, "decode") else dataset
        return next(iter(undecoded), None)
    if not len(dataset):
        return None
    if is_transformed(dataset):
        return dataset[0]
    table: Any = dataset.with_format("arrow")[0:1]
    return {name: table.column(name)[0].as_py() for name in table.column_names}


def prompt_rows(dataset: Dataset | IterableDataset) -> Iterator[dict[str, Any]]:
    """Yields `prompt` and image columns of every row, images undecoded.

    A stream yields its first row alone, and so does a data set whose prompts a user's transform makes. Other rows made
    by a transform have images in the first row alone.
    """
    first = first_row(dataset)
    if first is None:
        return
    columns = [name for name in COLUMNS if name in first]
    if isinstance(dataset, IterableDataset):
        yield {name: first[name] for name in ("prompt", *columns) if name in first}
        return
    raw = _decodes(dataset.features.get("prompt")) and not is_transformed(dataset)
    if is_transformed(dataset) and "prompt" not in dataset.column_names:
        prompts = iter([first["prompt"]])
    else:
        prompts = _raw_column(dataset, "prompt") if raw else iter(dataset["prompt"])
    if is_transformed(dataset):
        images: Iterator[dict[str, Any]] = iter([{name: first[name] for name in columns}])
    else:
        images = (dict(zip(columns, values)) for values in zip(*(_raw_column(dataset, name) for name in columns)))
    for prompt in prompts:
        yield {"prompt": prompt, **next(images, {})}


def read_row(dataset: Dataset, index: int) -> dict[str, Any]:
    """One row of the data set. ImageError with its number if it cannot be read, as with an image that is broken."""
    try:
        return dataset[index]
    except _BROKEN as error:
        raise ImageError(
            f"row {index} of the data set cannot be read ({type(error).__name__}: {error}); if an image is broken, "
            "remove the row or replace the image"
        ) from error


def is_transformed(dataset: Dataset) -> bool:
    """True if a user's function makes the rows when they are read."""
    return dataset.format["type"] == "custom"


def _decodes(feature: Any) -> bool:
    """True if reading the feature decodes images."""
    if isinstance(feature, Image):
        return feature.decode
    if isinstance(feature, Mapping):
        return any(_decodes(inner) for inner in feature.values())
    if isinstance(feature, (list, tuple)):
        return any(_decodes(inner) for inner in feature)
    inner = getattr(feature, "feature", None)
    return inner is not None and _decodes(inner)


def _raw_column(dataset: Dataset, name: str) -> Iterator[Any]:
    tables: Any = dataset.select_columns(name).with_format("arrow")
    for table in tables.iter(batch_size=256):
        for value in table.column(name):
            yield value.as_py()


DIGEST_ROWS = 20_000
"""Rows that are read; of a longer data set as many at even distances, which takes about a second."""


def dataset_digest(dataset: Any) -> dict[str, Any] | None:
    """The number of rows and a digest of their content, of a `datasets.Dataset`; None for streams and other objects."""
    if not isinstance(dataset, Dataset):
        return None
    total = len(dataset)
    stride = max(1, -(-total // DIGEST_ROWS))
    rows = dataset if stride == 1 else dataset.select(range(0, total, stride))
    sha1 = hashlib.sha1(",".join(dataset.column_names).encode())
    for table in rows.with_format("arrow").iter(batch_size=1000):
        # Arrow's own bytes depend on how rows came to lie in memory, which a cache changes.
        sha1.update(repr(table.to_pydict()).encode("utf-8", errors="replace"))  # pyright: ignore[reportAttributeAccessIssue]
    return {"rows": total, "digest": sha1.hexdigest()[:16]}
