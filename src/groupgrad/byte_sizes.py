"""Parses and formats amounts of memory such as `4 GB`."""

from __future__ import annotations

import math
import re


def parse_bytes(value: object) -> int | None:
    """Reads an amount of memory such as 4096, '512MiB', '4 GB' or '1.5e9' as bytes; None if it is not one of at least
    a byte."""
    match = re.fullmatch(r"\s*([0-9.eE+]+)\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        return None
    number, prefix, binary = match.groups()
    try:
        size = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    except ValueError:
        return None
    return int(size) if 1 <= size < math.inf else None


def bytes_text(size: float) -> str:
    """An amount of memory with three digits, in the unit that fits: `120 KB`."""
    units = ["B", "KB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.3g} {units[0]}"
