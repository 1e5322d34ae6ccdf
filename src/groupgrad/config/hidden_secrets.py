"""Removes tokens and passwords from settings before they are stored or shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"
"""The text in the place of a token or password."""

_SECRET = ("token", "secret", "password", "passwd", "api_key", "apikey", "authorization", "credential", "credentials")
"""Names end so if their text is a secret."""

_NO_SECRET = frozenset(f"{kind}_token" for kind in ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video"))


def without_secrets(value: Any, key: str = "") -> Any:
    """Copies a setting, named `key`, with tokens and passwords hidden, also within dicts and JSON texts."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item, key) for item in value]
    name = key.lower().replace("-", "_")
    is_secret = name.endswith(_SECRET) and name not in _NO_SECRET
    if isinstance(value, str) and value and (is_secret or any(f'{word}"' in value.lower() for word in _SECRET)):
        return HIDDEN
    return value
