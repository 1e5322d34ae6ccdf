"""Rollouts with hand-written completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from groupgrad.types import Prompt, Rollout


def build_rollouts(completions: list[Any], rows: list[dict[str, Any]] | None = None, **fields: Any) -> list[Rollout]:
    """Builds one rollout a completion, with one token id per character of its text."""
    rollouts = []
    for index, completion in enumerate(completions):
        row = (rows or [{"prompt": f"p{i}"} for i in range(len(completions))])[index]
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        extra = {name: values[index] for name, values in fields.items() if values[index] is not ...}
        rollouts.append(
            Rollout(
                prompt=Prompt(ids=[1], row=row, group=index),
                index=index,
                completion_ids=list(range(len(text or ""))),
                finish_reason="eos",
                completion=completion,
                text=text or "",
                extra=extra,
            )
        )
    return rollouts


@pytest.fixture
def make_rollouts() -> Callable[..., list[Rollout]]:
    return build_rollouts
