"""The losses: one file for each, whose `METHOD` the file's name stands for as `loss_type`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from groupgrad.objectives.method import Method

LOSSES: Mapping[str, Method] = {
    module.name: import_module(f"{__name__}.{module.name}").METHOD for module in iter_modules(__path__)
}
"""`loss_type` -> its definition."""
