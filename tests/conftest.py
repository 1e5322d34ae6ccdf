"""Gives all tests their shared fixtures, `helpers/base_fixtures.py` and `helpers/real_model.py`."""

from __future__ import annotations

import gc
import os

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
        import real_model
    config.pluginmanager.register(base_fixtures)
    config.pluginmanager.register(real_model)
