"""groupgrad: group relative policy optimization (GRPO) for language models.

`from groupgrad import GRPOTrainer, GRPOConfig` imports the trainer; `groupgrad.rewards` has built-in reward functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.apps.sweep.script import Sweep
    from groupgrad.config import GRPOConfig
    from groupgrad.trainer import GRPOTrainer

from groupgrad import trl_paths
from groupgrad._version import __version__
from groupgrad.imports import quick_imports

__all__ = ["GRPOConfig", "GRPOTrainer", "Sweep", "__version__"]

_MODULES = {
    "GRPOConfig": "groupgrad.config",
    "GRPOTrainer": "groupgrad.trainer",
    "Sweep": "groupgrad.apps.sweep.script",
    # Helpers of scripts for TRL.
    "DatasetMixtureConfig": "groupgrad.apps.cli.scripts",
    "ModelConfig": "groupgrad.apps.cli.scripts",
    "RewardFunc": "groupgrad.trainer.trl_names",
    "RolloutFunc": "groupgrad.trainer.trl_names",
    "ScriptArguments": "groupgrad.apps.cli.scripts",
    "TrlParser": "groupgrad.apps.cli.scripts",
    "get_dataset": "groupgrad.apps.cli.scripts",
    "get_kbit_device_map": "groupgrad.apps.cli.scripts",
    "get_peft_config": "groupgrad.apps.cli.scripts",
    "get_quantization_config": "groupgrad.apps.cli.scripts",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with quick_imports():
            module = import_module(_MODULES[name])
        return getattr(module, name)
    if name[0].isupper():  # a class of TRL's; an AttributeError's message would not reach `from groupgrad import ...`
        raise ImportError(f"groupgrad has no {name}: import it from trl")
    raise AttributeError(f"module 'groupgrad' has no attribute {name!r}")


trl_paths.install()
