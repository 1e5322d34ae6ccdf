"""Writes completion records to parquet files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from groupgrad.run_folder.render import plain_value


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
    to_json = functools.partial(json.dumps, ensure_ascii=False, default=lambda item: item.decode(errors="replace"))
    return pa.array([None if value is None else to_json(value) for value in values], type=pa.string())


def _has_empty_struct(type_: pa.DataType) -> bool:
    # `{}` becomes a struct without fields, which parquet cannot store.
    if pa.types.is_struct(type_):
        return type_.num_fields == 0 or any(_has_empty_struct(type_.field(i).type) for i in range(type_.num_fields))
    return pa.types.is_list(type_) and _has_empty_struct(type_.value_type)
