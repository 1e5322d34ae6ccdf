"""Import paths of TRL and of earlier releases: `from groupgrad.trainer.grpo_config import GRPOConfig` works.

Scripts import names from the modules that TRL keeps them in. Such a module is made when it is imported, and has the
names that `groupgrad` exports. A path of an earlier release has what the module has that took its place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

_ROOMS = (
    *("chat_template_utils", "core", "data_utils", "environment", "experimental", "extras", "generation"),
    *("import_utils", "models", "scripts"),
)
_INNER = ("scripts.utils",)
"""Modules in rooms, which `from groupgrad.scripts import utils` imports."""
_OF_TRAINER = ("base_trainer", "grpo_config", "grpo_trainer", "judges", "model_config", "utils")
_TRAINERS = (
    *("bco", "cpo", "distillation", "dpo", "gkd", "kto", "nash_md", "online_dpo", "orpo", "ppo", "prm", "reward"),
    *("rloo", "sft", "xpo"),
)
"""Words before `_trainer` and `_config` in the names of its other modules."""
_MOVED = {
    **{name: f"apps.{name}" for name in ("cli", "demo", "replay", "sweep")},
    "engines.vllm": "integrations.vllm",
    "run_folder.run_folder": "apps.runs.run_folder",
    "run_folder.selection": "apps.runs.selection",
    "rewards.accuracy_rewards": "rewards.accuracy",
    **{f"rewards.{name}_rewards": "rewards.shaping" for name in ("format", "other")},
}
"""Modules of earlier releases and of TRL: where their names are now."""


def find(name: str, where: str) -> Any:
    """Returns groupgrad's export of a name that a script imports from `trl.<where>`; AttributeError if it has none."""
    package = import_module(_PACKAGE)
    if name in package._MODULES:
        return getattr(package, name)
    raise AttributeError(f"module '{_PACKAGE}.{where}' has no attribute {name!r}")


class _Paths(MetaPathFinder, Loader):
    """Finds TRL's modules that groupgrad has no module for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, where = fullname.partition(".")
        if package != _PACKAGE or not _is_of_trl(where):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        where = spec.name.partition(".")[2]
        module = ModuleType(spec.name, f"Names that scripts import from trl.{where}.")

        def named(name: str) -> Any:
            try:
                return find(name, where)
            except AttributeError as error:
                if name.startswith("__") or f"{where}.{name}" in _INNER:
                    raise
                # An AttributeError would make `from ... import ...` look for a module of this name, and find one.
                raise ImportError(f"groupgrad has no {name}: import it from trl.{where}") from error

        module.__getattr__ = named  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A module of other modules' names has nothing to run."""


class _MovedPaths(MetaPathFinder, Loader):
    """Finds modules of earlier releases; a folder that git has left behind for its caches does not count."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, where = fullname.partition(".")
        return ModuleSpec(fullname, self, is_package=True) if package == _PACKAGE and _moved(where) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        place = f"{_PACKAGE}.{_moved(spec.name.partition('.')[2])}"
        module = ModuleType(spec.name, f"Names of {place}, where this module is now.")
        module.__getattr__ = lambda name: getattr(import_module(place), name)  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A module of other modules' names has nothing to run."""


def _is_of_trl(where: str) -> bool:
    room, _, inner = where.partition(".")
    if room == "models":  # which groupgrad has too
        return inner == "utils"
    if room != "trainer":
        return room in _ROOMS
    return inner in _OF_TRAINER or inner.rpartition("_")[0] in _TRAINERS


def _moved(where: str) -> str | None:
    """The place of a module of an earlier release."""
    for old, new in _MOVED.items():
        if where == old or where.startswith(f"{old}."):
            return new + where[len(old) :]
    return None


def install() -> None:
    """Adds TRL's paths behind all others, and those of earlier releases before them. May be called repeatedly."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths())
        sys.meta_path.insert(0, _MovedPaths())
