"""Amounts of memory as people write them."""

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
