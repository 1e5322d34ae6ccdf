"""Checks options that a script changes on `trainer.args` after the trainer was made, as a hyperparameter search does.

Each training and evaluation reads the options again. Options that shaped the trainer or an earlier training cannot take
effect any more; changing one is an error.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from transformers import TrainingArguments

from groupgrad.config import GRPOConfig, option_values
from groupgrad.errors import ConfigError

_OF_CONSTRUCTION = (
    *("model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32"),
    *("stochastic_rounding", "sync_ref_model", "bf16", "fp16", "fsdp", "deepspeed", "context_parallel_size"),
    *("rollout_engine", "engine_kv_memory", "engine_pack_weights", "generation_kwargs", "cache_implementation"),
    *("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_liger_kernel"),
    *("chat_template_kwargs", "image_root", "special_tokens_in_prompts", "special_tokens_in_completions"),
    *("max_tool_calling_iterations", "reuse_environments"),
    *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_sleep_level"),
    *("vllm_structured_outputs_regex", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
    *("vllm_group_port", "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    *("vllm_lora_updates", "reward_timeout_s", "reward_workers", "reward_worker_memory_gb", "reward_retries"),
    *("reward_transient_errors", "on_reward_failure", "reward_model_init_kwargs", "reward_model_device"),
    *("reward_model_batch_tokens", "reward_model_offload", "log_completions_hub_repo", "num_completions_to_print"),
    *("log_unique_prompts", "log_multimodal", "report_to", "remove_unused_columns"),
)
"""Options that are read once, when the trainer is made."""

_OF_OPTIMIZER = (
    *("optim", "optim_args", "optim_target_modules", "learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
"""Options that are read once, when the first training makes the optimizer; later trainings go on with it."""

_READ_DURING_TRAINING = (
    *("save_in_background", "top_entropy_quantile", "sync_ref_model", "ref_model_sync_steps"),
    "ref_model_mixup_alpha",
)
"""Options of groupgrad that a callback may change between steps. Those of transformers are left to its `Trainer`."""


class ChangedOptions:
    """Compares a configuration with what it was when the trainer and its optimizer were made."""

    def __init__(self, config: GRPOConfig):
        self._made = self._seen = _values(config)
        self._optimizer: weakref.ref[Any] | None = None
        self._of_optimizer: dict[str, Any] = {}
        self._makes_optimizer = False
        self._told: set[str] = set()

    def check(self, config: GRPOConfig, *, has_reference: bool) -> bool:
        """Returns True if an option has changed since `accept`. ConfigError if a change cannot work."""
        if _values(config) == self._seen:
            return False
        problems: list[str] = []
        try:
            config.settle()
        except ConfigError as error:
            problems = error.problems
        now = _values(config)
        if now == self._seen and not problems:
            return False
        texts = [
            f"{_change(name, self._made[name], now[name])} after the trainer was made, and a trainer reads it "
            f"only then. Make another one with GRPOConfig({name}=...)"
            for name in _OF_CONSTRUCTION
            if now.get(name) != self._made.get(name)
        ]
        if config.beta != 0 and not has_reference:
            texts.append(
                f"{_change('beta', self._made['beta'], now['beta'])} after the trainer was made, and it has kept no "
                "reference to measure a KL divergence from. Make another trainer with GRPOConfig(beta=...)"
            )
        if texts := [*texts, *problems]:
            raise ConfigError(texts)
        return True

    def accept(self, config: GRPOConfig) -> None:
        """Records `config` as the options in force."""
        self._seen = _values(config)

    def without_effect(self, config: GRPOConfig) -> list[str]:
        """Sentences about options that a callback has changed while it trains, to no effect; each is told once."""
        now = _values(config)
        of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}.difference(_OF_OPTIMIZER)
        changed = [
            name
            for name, value in now.items()
            if value != self._seen[name] and name not in of_transformers | self._told | {*_READ_DURING_TRAINING}
        ]
        self._told |= {*changed}
        return [
            f"{_change(name, self._seen[name], now[name])} during training, which goes on with {self._seen[name]!r}: "
            "training reads this option when it begins. End the run there and resume it with the other value"
            for name in changed
        ]

    def check_optimizer(self, config: GRPOConfig, optimizer: Any, *, is_restored: bool) -> None:
        """ConfigError if the optimizer of an earlier training would go on with other options than `config` has.

        `optimizer` is None where training makes one. An `is_restored` one gets its options from a checkpoint.
        """
        self._makes_optimizer |= optimizer is None
        if optimizer is None or self._optimizer is None or self._optimizer() is not optimizer or is_restored:
            return
        now, then = _values(config), self._of_optimizer
        texts = [
            f"{_change(name, then[name], now[name])} after train(), and the next one goes on with the optimizer of the "
            "first. Set trainer.optimizer = trainer.lr_scheduler = None, so that another one is made"
            for name in _OF_OPTIMIZER
            if now.get(name) != then.get(name)
        ]
        if texts:
            raise ConfigError(texts)

    def optimizer_is_ready(self, config: GRPOConfig, optimizer: Any) -> None:
        """Records the options with which a training made its optimizer; an optimizer that a script made is left out."""
        if self._makes_optimizer:
            self._optimizer, self._of_optimizer = weakref.ref(optimizer), _values(config)


def _values(config: GRPOConfig) -> dict[str, Any]:
    """All options but the folder, which is made a whole path while a run trains."""
    return {name: value for name, value in option_values(config).items() if name != "output_dir"}


def _change(name: str, then: Any, now: Any) -> str:
    return f"trainer.args.{name} was changed from {then!r} to {now!r}"
