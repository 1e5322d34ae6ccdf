"""Import paths of TRL and of earlier releases: `from groupgrad.trainer.grpo_config import GRPOConfig` works.

Scripts import names from the modules that TRL keeps them in. Such a module is made when it is imported, and has the
names that `groupgrad` exports. A path of an earlier release has what the module has that took its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    """Finds modules that are not there: `names_of` returns how one of a path finds its names, or None for no such path.

    A folder that git has left behind for its caches does not count as a module of a path that has moved.
    """

    def __init__(self, names_of: Callable[[str], Callable[[str], Any] | None]):
        self._names_of = names_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, where = fullname.partition(".")
        return ModuleSpec(fullname, self, is_package=True) if package == _PACKAGE and self._names_of(where) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, "Names that scripts import from here; groupgrad has them elsewhere.")
        module.__getattr__ = self._names_of(spec.name.partition(".")[2])  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A module of other modules' names has nothing to run."""


def _of_trl(where: str) -> Callable[[str], Any] | None:
    """Finds the names of a module of TRL that groupgrad has no module for."""
    room, _, inner = where.partition(".")
    if room == "models":  # which groupgrad has too
        is_there = inner == "utils"
    elif room == "trainer":
        is_there = inner in _OF_TRAINER or inner.rpartition("_")[0] in _TRAINERS
    else:
        is_there = room in _ROOMS

    def named(name: str) -> Any:
        try:
            return find(name, where)
        except AttributeError as error:
            if name.startswith("__") or f"{where}.{name}" in _INNER:
                raise
            # An AttributeError would make `from ... import ...` look for a module of this name, and find one.
            raise ImportError(f"groupgrad has no {name}: import it from trl.{where}") from error

    return named if is_there else None


def _moved(where: str) -> Callable[[str], Any] | None:
    """Finds the names of a module of an earlier release where they are now."""
    for old, new in _MOVED.items():
        if where == old or where.startswith(f"{old}."):
            place = f"{_PACKAGE}.{new}{where[len(old) :]}"
            return lambda name: getattr(import_module(place), name)
    return None


def install() -> None:
    """Adds TRL's paths behind all others, and those of earlier releases before them. May be called repeatedly."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths(_of_trl))
        sys.meta_path.insert(0, _Paths(_moved))
