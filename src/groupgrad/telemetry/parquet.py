"""Writes completion records to parquet files."""

from __future__ import annotations

import json
import math
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
    """Writes records to `<folder>/<stem>.parquet`, or `<stem>_2.parquet` and so on if that exists; returns the path.

    One column a key, in the order first seen, with null where a record lacks the key. `number_columns` are float64,
    with null for None and NaN. Other columns keep their structure (messages become lists of structs) if one type fits
    all rows, and are JSON text otherwise. Images become a marker. An existing file is never changed.
    """
    table = to_table(records, number_columns=number_columns)
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / (f"{stem}.parquet" if number == 1 else f"{stem}_{number}.parquet")
        try:
            # Exclusive creation: two processes that share the folder cannot overwrite each other's files.
            with open(path, "xb") as file:
                pq.write_table(table, file)
            return path
        except FileExistsError:
            number += 1
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def to_table(records: Sequence[Mapping[str, Any]], *, number_columns: Sequence[str] = ()) -> pa.Table:
    """Converts records to an arrow table; see `write_records`."""
    keys = dict.fromkeys(str(key) for record in records for key in record)
    columns = {}
    for key in keys:
        values = [plain_value(record.get(key)) for record in records]
        columns[key] = _numbers(values) if key in number_columns else _column(values)
    return pa.table(columns)


def plain_value(value: Any) -> Any:
    """Converts to dicts, lists, texts, bytes, numbers, booleans and None only; images become a marker."""
    if value is None or isinstance(value, (bool, int, float, bytes)):
        return value
    if isinstance(value, str):
        # Half-decoded tokens give lone surrogates, which have no UTF-8 form.
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
    """True for an object with the `size`, `mode` and `save` of a Pillow image."""
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


def _has_empty_struct(type_: pa.DataType) -> bool:
    # `{}` becomes a struct without fields, which parquet cannot store.
    if pa.types.is_struct(type_):
        return type_.num_fields == 0 or any(_has_empty_struct(type_.field(i).type) for i in range(type_.num_fields))
    return pa.types.is_list(type_) and _has_empty_struct(type_.value_type)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=lambda item: item.decode("utf-8", errors="replace"))
