"""Import paths of TRL: `from groupgrad.trainer.grpo_config import GRPOConfig` works.

Scripts import names from the modules that TRL keeps them in. Such a module is made when it is imported, and has the
names that `groupgrad` exports, or `groupgrad.rewards`.
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
_OF_TRAINER = ("base_trainer", "callbacks", "grpo_config", "grpo_trainer", "judges", "model_config", "utils")
_TRAINERS = (
    *("bco", "cpo", "distillation", "dpo", "gkd", "kto", "nash_md", "online_dpo", "orpo", "ppo", "prm", "reward"),
    *("rloo", "sft", "xpo"),
)
"""Words before `_trainer` and `_config` in the names of its other modules."""
_INSTEAD = {"generate_rollout_completions": "a rollout_func calls trainer.sample_completions(prompts) (docs/agents.md)"}
"""Names that newer releases of TRL have dropped too -> what takes their place here."""
_OF_REWARDS = ("accuracy_rewards", "format_rewards", "other_rewards")


def find(name: str, where: str) -> Any:
    """Returns groupgrad's export of a name that a script imports from `trl.<where>`; AttributeError if it has none."""
    package = import_module(_PACKAGE)
    if name in package._MODULES:
        return getattr(package, name)
    if where.startswith("rewards."):
        return getattr(import_module(f"{_PACKAGE}.rewards"), name)
    raise AttributeError(f"module '{_PACKAGE}.{where}' has no attribute {name!r}")


class _Paths(MetaPathFinder, Loader):
    """Finds the modules of TRL that groupgrad has no module for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, where = fullname.partition(".")
        return ModuleSpec(fullname, self, is_package=True) if package == _PACKAGE and _is_of_trl(where) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        where = spec.name.partition(".")[2]

        def named(name: str) -> Any:
            try:
                return find(name, where)
            except AttributeError as error:
                if name.startswith("_") or f"{where}.{name}" in _INNER:
                    raise
                # An AttributeError would make `from ... import ...` look for a module of this name, and find one.
                instead = _INSTEAD.get(name, f"import it from trl.{where}")
                raise ImportError(f"groupgrad has no {name}: {instead}") from error

        module = ModuleType(spec.name, "Names that scripts import from here; groupgrad has them elsewhere.")
        module.__getattr__ = named  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """A module of other modules' names has nothing to run."""


def _is_of_trl(where: str) -> bool:
    room, _, inner = where.partition(".")
    if room == "trainer":
        return inner in _OF_TRAINER or inner.rpartition("_")[0] in _TRAINERS
    others = {"models": ("utils",), "rewards": _OF_REWARDS}  # rooms of groupgrad too
    return inner in others[room] if room in others else room in _ROOMS


def install() -> None:
    """Adds TRL's paths behind all others. May be called repeatedly."""
    if not any(isinstance(finder, _Paths) for finder in sys.meta_path):
        sys.meta_path.append(_Paths())
