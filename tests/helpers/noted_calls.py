"""Functions that go on as they were while a test looks at their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def note_calls(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = lambda *_, **__: None
) -> list[Any]:
    """A list that gets `note` of the arguments at each later call of a function."""
    plain, noted = getattr(owner, name), []

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        noted.append(note(*args, **options))
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return noted


def note_results(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any] = lambda result, *_, **__: result
) -> list[Any]:
    """A list that gets `note` of result and arguments at each later call that ends well."""
    plain, noted = getattr(owner, name), []

    @functools.wraps(plain)
    def call(*args: Any, **options: Any) -> Any:
        result = plain(*args, **options)
        noted.append(note(result, *args, **options))
        return result

    monkeypatch.setattr(owner, name, call)
    return noted
