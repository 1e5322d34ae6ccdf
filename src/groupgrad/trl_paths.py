"""Import paths of TRL and of earlier releases: `from groupgrad.trainer.grpo_config import GRPOConfig` works.

Scripts import names from the modules that TRL keeps them in. Such a module is made when it is imported; it has the
names that `groupgrad` exports, and says of any other one where it is. A path of an earlier release has what the module
has that took its place.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]

OF_TRL = frozenset(
    {
        *("DPOConfig", "DPOTrainer", "DistillationConfig", "DistillationTrainer", "KTOConfig", "KTOTrainer"),
        *("RLOOConfig", "RLOOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer"),
        *("BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WeaveCallback"),
        *("add_fused_lm_head", "disable_dropout_in_model", "ensure_master_addr_port"),
        *("add_response_schema", "apply_chat_template", "clone_chat_template", "create_reference_model"),
        *("extract_prompt", "get_training_chat_template", "init_zero_verbose", "is_conversational"),
        *("is_conversational_from_value", "maybe_apply_chat_template", "maybe_convert_to_chatml"),
        *("maybe_extract_prompt", "maybe_unpair_preference_dataset", "pack_dataset"),
        *("prepare_multimodal_messages", "supports_tool_calling", "unpair_preference_dataset"),
    }
)
"""Names that scripts import from TRL and that are not here."""

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
    "rewards.accuracy_rewards": "rewards.accuracy",
    **{f"rewards.{name}_rewards": "rewards.shaping" for name in ("format", "other")},
}
"""Modules of earlier releases and of TRL: where their names are now."""


def find(name: str, where: str) -> Any:
    """What `groupgrad` exports under a name that a script imports from `trl.<where>`, a module that groupgrad has too.

    ImportError for a name that TRL alone has, AttributeError for any other one.
    """
    package = import_module(_PACKAGE)
    if name in package._MODULES:
        return getattr(package, name)
    refuse(name, where)
    raise AttributeError(f"module '{_PACKAGE}.{where}' has no attribute {name!r}")


def refuse(name: str, where: str = "", names: Collection[str] = OF_TRL) -> None:
    """ImportError for one of the `names` that TRL has in `trl.<where>`."""
    if name in names:  # an AttributeError would lose its words in `from ... import ...`
        raise ImportError(
            f"groupgrad has no {name}: it trains by GRPO, and TRL's other trainers, callbacks and helpers work beside "
            f"it. Import it from {f'trl.{where}' if where else 'trl'}"
        )


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
            except AttributeError:
                is_module = f"{where}.{name}" in _INNER
                refuse(name, where, () if is_module or name.startswith("__") else (name,))
                raise

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
