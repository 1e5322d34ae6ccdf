"""Loading of models, adapters, the reference, and what is known of model families."""

from __future__ import annotations

from typing import Any

from groupgrad import trl_paths


def __getattr__(name: str) -> Any:
    return trl_paths.find(name, "models")
