"""Gives all tests their shared fixtures, `helpers/base_fixtures.py` and `helpers/real_model.py`."""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Any

import pytest

from groupgrad.imports import quick_imports

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config: pytest.Config) -> None:
    """The process that deals tests out to workers runs none, and does without the seconds of these imports."""
    if config.getoption("numprocesses", None):
        return
    gc.disable()  # until all tests are collected
    with quick_imports():
        import base_fixtures
        import peft  # noqa: F401  # with bitsandbytes, which would import torch's compiler otherwise
        import real_model
    config.pluginmanager.register(base_fixtures)
    config.pluginmanager.register(real_model)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Marks the cases as slow that `quick` leaves out: it has beginnings of their ids, or how many come first."""
    seen: Counter[str] = Counter()
    for item in items:
        for marker in item.iter_markers("quick"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            seen[test] += 1
            chosen = marker.args[0]
            if isinstance(chosen, int):
                is_quick = seen[test] <= chosen
            else:
                is_quick = f"{case}-".startswith(tuple(f"{name}-" for name in marker.args))
            if not is_quick:
                item.add_marker(pytest.mark.slow)
