"""groupgrad: group relative policy optimization (GRPO) for language models.

`from groupgrad import GRPOTrainer, GRPOConfig` imports the trainer; `groupgrad.rewards` has built-in reward functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupgrad.config import GRPOConfig
    from groupgrad.sweep.script import Sweep
    from groupgrad.trainer import GRPOTrainer

from groupgrad._version import __version__
from groupgrad.imports import quick_imports

__all__ = ["GRPOConfig", "GRPOTrainer", "Sweep", "__version__"]

_MODULES = {
    "GRPOConfig": "groupgrad.config",
    "GRPOTrainer": "groupgrad.trainer",
    "Sweep": "groupgrad.sweep.script",
    # Helpers of scripts for TRL.
    "DatasetMixtureConfig": "groupgrad.cli.scripts",
    "ModelConfig": "groupgrad.cli.scripts",
    "ScriptArguments": "groupgrad.cli.scripts",
    "TrlParser": "groupgrad.cli.scripts",
    "get_dataset": "groupgrad.cli.scripts",
    "get_kbit_device_map": "groupgrad.cli.scripts",
    "get_peft_config": "groupgrad.cli.scripts",
    "get_quantization_config": "groupgrad.cli.scripts",
}

_OF_TRL = frozenset(
    {
        *("DPOConfig", "DPOTrainer", "DistillationConfig", "DistillationTrainer", "KTOConfig", "KTOTrainer"),
        *("RLOOConfig", "RLOOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer"),
        *("BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback", "WeaveCallback"),
        *("add_response_schema", "apply_chat_template", "clone_chat_template", "create_reference_model"),
        *("extract_prompt", "get_training_chat_template", "init_zero_verbose", "is_conversational"),
        *("is_conversational_from_value", "maybe_apply_chat_template", "maybe_convert_to_chatml"),
        *("maybe_extract_prompt", "maybe_unpair_preference_dataset", "pack_dataset"),
        *("prepare_multimodal_messages", "supports_tool_calling", "unpair_preference_dataset"),
    }
)
"""Names that scripts import from TRL and that are not here."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with quick_imports():
            module = import_module(_MODULES[name])
        return getattr(module, name)
    if name in _OF_TRL:  # an AttributeError would lose its words in `from groupgrad import ...`
        raise ImportError(
            f"groupgrad has no {name}: it trains by GRPO, and TRL's other trainers, callbacks and helpers work beside "
            "it. Import it from trl"
        )
    raise AttributeError(f"module 'groupgrad' has no attribute {name!r}")
