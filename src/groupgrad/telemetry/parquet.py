"""Completion records as a parquet file that pandas, datasets and query engines read back."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from groupgrad.telemetry.render import IMAGE_MARKER


def write_records(
    records: Sequence[Mapping[str, Any]], folder: Path, stem: str, *, number_columns: Sequence[str] = ()
) -> Path:
    """Write the records as `<folder>/<stem>.parquet`, or `<stem>_2.parquet` and so on where that exists.

    One column a key, in the order first seen; a record without a key holds null there. `number_columns` are float64
    with null for None and NaN. Other columns keep their structure (messages become lists of structs) where one type
    fits all rows, and are JSON text otherwise. Images become a marker. A file that exists is never touched.
    """
    table = to_table(records, number_columns=number_columns)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1_000_000):
        path = folder / (f"{stem}.parquet" if number == 1 else f"{stem}_{number}.parquet")
        try:
            # Exclusive creation: of two processes that share the folder, neither can overwrite the other's file.
            with open(path, "xb") as file:
                pq.write_table(table, file)
            return path
        except FileExistsError:
            continue
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    raise ValueError(
        f"{os.fspath(folder)} holds a million files named {stem}_*.parquet; clean it or use another folder"
    )


def to_table(records: Sequence[Mapping[str, Any]], *, number_columns: Sequence[str] = ()) -> pa.Table:
    """The records as an arrow table; see `write_records`."""
    keys = dict.fromkeys(str(key) for record in records for key in record)
    columns = {}
    for key in keys:
        values = [plain_value(record.get(key)) for record in records]
        columns[key] = _numbers(values) if key in number_columns else _column(values)
    return pa.table(columns)


def plain_value(value: Any) -> Any:
    """`value` built of nothing but dicts, lists, texts, bytes, numbers, booleans and None; images become a marker."""
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, str):
        # A lone surrogate, as half-decoded tokens give, has no UTF-8 form.
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, Mapping):
        return _plain_block(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain_value(item) for item in value), key=repr)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return IMAGE_MARKER if is_image(value) else plain_value(str(value))


def is_image(value: Any) -> bool:
    """True for an image object (anything with a `size`, a `mode` and a `save`, as Pillow's have)."""
    return all(hasattr(value, name) for name in ("size", "mode", "save"))


def _plain_block(block: Mapping[Any, Any]) -> dict[str, Any]:
    plain = {str(key): plain_value(value) for key, value in block.items()}
    if plain.get("type") == "image":
        plain["image"] = IMAGE_MARKER
    elif plain.get("type") in ("image_url", "input_image") and "image_url" in plain:
        plain["image_url"] = IMAGE_MARKER
    return plain


def _numbers(values: list[Any]) -> pa.Array:
    numbers = [None if value is None or math.isnan(float(value)) else float(value) for value in values]
    return pa.array(numbers, type=pa.float64())


def _column(values: list[Any]) -> pa.Array:
    try:
        column = pa.array(values)
        if not _has_empty_struct(column.type):
            return column
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    return pa.array([None if value is None else _json(value) for value in values], type=pa.string())


def _has_empty_struct(kind: pa.DataType) -> bool:
    # Parquet has no form for a struct without fields, which is what `{}` becomes.
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_empty_struct(kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_list(kind) and _has_empty_struct(kind.value_type)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda item: item.decode("utf-8", errors="replace"))
