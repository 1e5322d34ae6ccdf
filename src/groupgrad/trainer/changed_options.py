"""Options that have changed: since the checkpoint that a run resumes from, and since the trainer was made.

A resumed run names in one table each option that differs from its checkpoint's, and which value is in force
(`differences`). A script may also change `trainer.args`, as a hyperparameter search does (`ChangedOptions`): each
training and evaluation reads the options again, and those that can no longer take effect are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from groupgrad import compat, dist
from groupgrad.config import GRPOConfig, option_values
from groupgrad.errors import ConfigError

logger = logging.getLogger(__name__)

_PREFIXES = (
    *("dataloader_", "eval_", "hub_", "log_", "logging_", "push_to_hub", "record_", "report_", "save_", "skip_"),
    "trackio_",
)
_WITHOUT_INFLUENCE = {
    *("allow_partial_resume", "auto_find_batch_size", "ddp_timeout", "debug", "disable_tqdm", "do_eval"),
    *("do_predict", "do_train", "enable_jit_checkpoint", "greater_is_better"),
    *("include_for_metrics", "include_num_input_tokens_seen", "load_best_model_at_end", "local_rank"),
    *("metric_for_best_model", "num_completions_to_print", "num_generations_eval", "output_dir"),
    "per_device_eval_batch_size",
    *("prediction_loss_only", "project", "ray_scope", "restore_callback_states_from_checkpoint", "rollouts_keep"),
    *("resume_from_checkpoint", "resume_learning_rate", "run_name", "tool_threads", "vllm_group_port"),
    *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout"),
}
_IN_THE_OPTIMIZER = ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_PACKAGES = ("groupgrad", "torch", "transformers", "accelerate", "datasets", "numpy", "peft", "deepspeed", "vllm")


@dataclass(slots=True, frozen=True)
class Difference:
    """An option whose value differs from the checkpoint's."""

    name: str
    then: Any
    now: Any
    winner: str = "now"
    """`now` or `then`, perhaps with a remark."""


def deciding_options(config: GRPOConfig) -> dict[str, Any]:
    """The options that decide a run's results, as JSON values."""
    options = {**deciding(config.to_dict()), "world_size": config.world_size}
    return json.loads(json.dumps(options, default=str))


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the configuration fields that influence a run's results."""
    return {
        name: value
        for name, value in settings.items()
        if name not in _WITHOUT_INFLUENCE and not name.startswith(_PREFIXES) and not name.endswith("_token")
    }


def installed_versions() -> dict[str, str]:
    """Releases of the libraries that decide results, by name."""
    found = {name: compat.installed_version(name) for name in _PACKAGES}
    return {name: version for name, version in found.items() if version is not None}


def differences(
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    keeps_optimizer: bool,
    new_learning_rate: bool,
    reference: str | None = None,
) -> list[Difference]:
    """The options that differ, and which value is in force.

    `keeps_optimizer`: the optimizer goes on with its state. `reference` is the name of the reference model, perhaps
    empty; a checkpoint of a run without a KL term knows of none.
    """
    winners: dict[str, str] = {}
    if keeps_optimizer:
        winners = dict.fromkeys(_IN_THE_OPTIMIZER, "then, the optimizer's state has it")
        if not new_learning_rate:
            winners["learning_rate"] = "then; resume_learning_rate=True applies the new one"
    if not then.get("beta"):
        winners["beta"] = f"now, the KL is measured from {reference or 'the model'!r} as it was loaded"
    return [
        Difference(name, then[name], value, winners.get(name, "now"))
        for name, value in now.items()
        if name in then and then[name] != value
    ]


def changed_intervals(state: TrainerState, config: GRPOConfig) -> list[Difference]:
    """The intervals of a checkpoint's `state` that the configuration changes, in steps, as far as they are in use."""
    new = copy.copy(state)
    new.compute_steps(config, state.max_steps)
    in_use = {
        "save_steps": config.save_strategy == SaveStrategy.STEPS,
        "eval_steps": config.eval_strategy == IntervalStrategy.STEPS,
        "logging_steps": config.logging_strategy == IntervalStrategy.STEPS,
    }
    pairs = {name: (getattr(state, name), getattr(new, name)) for name, is_used in in_use.items() if is_used}
    return [Difference(name, then, now) for name, (then, now) in pairs.items() if then != now]


def table(rows: list[Difference]) -> str:
    """The differences as lines of text."""
    cells = [("option", "then", "now", "in force")]
    cells += [(row.name, _short(row.then), _short(row.now), row.winner) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths)) + f"  {line[3]}" for line in cells
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def report(rows: list[Difference], folder: Any) -> None:
    """Logs the differences once over all ranks."""
    if rows and dist.is_main():
        logger.warning("options differ from those of %s:\n%s", folder, table(rows))


_OF_CONSTRUCTION = (
    *("model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout", "cast_lm_head_to_fp32"),
    *("stochastic_rounding", "sync_ref_model", "bf16", "fp16", "fsdp", "deepspeed", "context_parallel_size"),
    *("rollout_engine", "engine_kv_memory", "generation_kwargs", "cache_implementation"),
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

_READ_DURING_TRAINING = (*("top_entropy_quantile", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),)
"""Options of groupgrad that a callback may change between steps. Those of transformers are left to its `Trainer`."""


class ChangedOptions:
    """Compares a configuration with what it was when the trainer was made and when it last trained."""

    def __init__(self, config: GRPOConfig):
        self._made = self._seen = _values(config)
        self._told: set[str] = set()

    def check(self, config: GRPOConfig, *, has_reference: bool, keeps_optimizer: bool) -> bool:
        """Returns True if an option has changed since `accept`. ConfigError if a change cannot work.

        `keeps_optimizer`: the next training goes on with the optimizer that the trainer has.
        """
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
        texts += [
            f"{_change(name, self._seen[name], now[name])}, and the trainer goes on with the optimizer that it has. "
            "Set trainer.optimizer = trainer.lr_scheduler = None, so that another one is made"
            for name in _OF_OPTIMIZER
            if keeps_optimizer and now.get(name) != self._seen.get(name)
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


def _values(config: GRPOConfig) -> dict[str, Any]:
    """All options but the folder, which is made a whole path while a run trains."""
    return {name: value for name, value in option_values(config).items() if name != "output_dir"}


def _change(name: str, then: Any, now: Any) -> str:
    return f"trainer.args.{name} was changed from {then!r} to {now!r}"
