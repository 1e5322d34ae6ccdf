"""TRL's names on the trainer: attributes that scripts and callbacks read, and methods that subclasses override.

The names and meanings are those of `GRPOTrainer` in trl 1.16. A setting that is assigned is that of `trainer.args`;
other attributes can only be read. A method that this trainer never calls is refused instead of being ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from groupgrad.metrics import average
from groupgrad.run_folder.metric_store import MetricStore

RewardFunc = str | PreTrainedModel | Callable[..., list[float | None]]
"""TRL's name for the type of one of `reward_funcs`."""
RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""TRL's name for the type of `rollout_func`, which is called with prompts and the trainer."""

NEVER_CALLED = {
    "_compute_loss": "define batch_loss(model, batch), which returns the loss of a batch and its metrics",
    "_get_per_token_logps_and_entropies": "define batch_loss(model, batch), which scores the tokens of a batch",
    "get_high_entropy_mask": "set top_entropy_quantile, or define batch_loss(model, batch)",
    "get_off_policy_mask": "set off_policy_mask_threshold, or define batch_loss(model, batch)",
    "get_gamma_weights": "set the vespo_... fields, or define batch_loss(model, batch)",
    "_compute_advantages": "define compute_advantages(rewards, num_generations), which returns Advantages",
    "_get_per_token_logps": "define batch_loss(model, batch), which scores the tokens of a batch",
    "_calculate_rewards": "define score_rollouts(rollouts, trainer_state, step), which returns a RewardTable",
    "_generate_and_score_completions": "pass rollout_func, or define score_rollouts and compute_advantages",
    "_generate": "pass rollout_func, which makes whole rollouts",
    "_generate_single_turn": "pass rollout_func, which makes whole rollouts",
    "_tool_call_loop": "pass tools or environment_factory, or rollout_func for a loop of your own",
    "_get_tool_suffix_ids": "pass response_parser, or change the tokenizer's chat template",
    "_tokenize_prompts": "write the prompts into the data set as you want them, or set chat_template_kwargs",
    "_prepare_inputs": "define batch_loss(model, batch), or pass rollout_func",
    "_get_train_sampler": (
        "order the data set's rows and set shuffle_dataset=False; for an order that follows rewards, let an "
        "IterableDataset read what a callback has learned"
    ),
    "_get_eval_sampler": "order the rows of eval_dataset; evaluation reads each row once, in that order",
    "_set_signature_columns_if_needed": "set remove_unused_columns",
    "_remove_unused_columns": "set remove_unused_columns",
    "_get_collator_with_removed_columns": "set remove_unused_columns",
    "_prepare_input": "define batch_loss(model, batch), which gets the batch on the device",
    "_get_dataloader": "define get_train_dataloader or get_eval_dataloader, around what super() returns",
    "_get_num_items_in_batch": "the denominators are those of the whole step; define batch_loss(model, batch)",
    "prediction_step": "define evaluation_loop, or log metrics with log_metric in a reward function",
    "_log_completion_extra": "call log_extra, which every reward function gets",
    "_log_metric": "call log_metric, which every reward function gets",
}
"""Methods of TRL's trainer, and of `transformers.Trainer`, that no step or evaluation calls: what to do instead."""

REPLACED = {
    "_step": "trainer.state.global_step counts optimizer steps",
    "_logs": "the run folder's completions/ holds every completion that was logged (log_completions=True)",
    "_textual_logs": "the run folder's completions/ holds every completion that was logged (log_completions=True)",
    "_total_train_tokens": "trainer.state.num_input_tokens_seen counts tokens",
    "_buffered_inputs": "trainer.buffer holds the generation batches that are trained on",
    "_pending_metrics": "call log_metric, which every reward function gets",
    "_pending_extra_logs": "call log_extra, which every reward function gets",
    "_tokenizer": "trainer.processing_class is the tokenizer or processor",
    "_is_vlm": "groupgrad.models.unwrapping.is_multimodal(trainer.model) says so",
    "vllm_generation": "trainer.vllm_policy is the policy as vLLM serves it",
    "llm": "trainer.vllm_policy.engine is vLLM in this process",
    "generation_config": "trainer.components.sampling holds the sampling options",
    "async_loop": "async functions run on a loop that the trainer owns; pass async reward_funcs or tools",
    "async_loop_thread": "async functions run on a loop that the trainer owns; pass async reward_funcs or tools",
    "async_loop_ready_event": "async functions run on a loop that the trainer owns; pass async reward_funcs or tools",
    "chat_template": "trainer.processing_class.chat_template is the template that prompts are rendered with",
    "commit_scheduler": "trainer.completion_log.upload sends what was logged to log_completions_hub_repo",
    "continuous_batching_config": "trainer.args.transformers_continuous_batching_config holds its options",
    "environments": "trainer.rollout_components.environments holds the environments",
    "environment_factories": "trainer.rollout_components.environments holds the environments",
}
"""Attributes of TRL's trainer without a counterpart: what there is instead."""

PAGE = "docs/from-trl.md"
"""The page that lists these names."""


def check_overrides(trainer: Any) -> None:
    """TypeError that lists the methods that a script gave the trainer, its class or a subclass, and nothing calls."""
    classes = type(trainer).__mro__
    owners = (trainer, *classes[: classes.index(TRLNames)])
    found = dict.fromkeys(name for owner in owners for name in NEVER_CALLED if name in vars(owner))
    if found:
        instead = "".join(f"\n  {name}: {NEVER_CALLED[name]}" for name in found)
        raise TypeError(
            f"{type(trainer).__name__} has methods that groupgrad never calls, so they would change nothing. Instead of"
            f"{instead}\n{PAGE} describes what a subclass may define"
        )


def setting(field: str, resolved: str | None = None) -> property:
    """A field of `trainer.args`, which is read as the value `resolved` of it, if there is one."""
    return property(
        lambda trainer: getattr(trainer.args, resolved or field),
        lambda trainer, value: setattr(trainer.args, field, value),
    )


def _refuse_reading(*_: object) -> Any:
    raise AttributeError("metrics can be appended to, not read; trainer.state.log_history has the logs")


class MetricList:
    """TRL's list of one metric's values; appended values are averaged over the log window and over ranks."""

    def __init__(self, store: MetricStore, name: str):
        self._store, self._name = store, name

    def append(self, value: Any) -> None:
        """Adds a number. Every rank that appends to a name counts."""
        self._store.add({self._name: average(float(value))})

    def extend(self, values: Any) -> None:
        """Adds numbers."""
        for value in values:
            self.append(value)

    __getattr__ = __iter__ = __len__ = __getitem__ = _refuse_reading


class MetricLists:
    """The metrics of a mode by name."""

    def __init__(self, store: MetricStore):
        self._store = store

    def __getitem__(self, name: str) -> MetricList:
        return MetricList(self._store, name)

    __getattr__ = __iter__ = __contains__ = __len__ = _refuse_reading


SETTINGS = (
    *("beta", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs", "max_completion_length"),
    *("num_generations", "num_iterations", "loss_type", "importance_sampling_level", "scale_rewards"),
    *("multi_objective_aggregation", "mask_truncated_completions", "top_entropy_quantile"),
    *("off_policy_mask_threshold", "use_adaptive_entropy", "router_aux_loss_coef", "shuffle_dataset"),
    *("pad_to_multiple_of", "use_transformers_continuous_batching", "use_vllm", "vllm_mode"),
    *("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_importance_sampling_correction"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    *("log_completions", "log_multimodal", "log_unique_prompts", "num_completions_to_print"),
    "max_tool_calling_iterations",
)
"""Attributes with the name and the value of a setting."""


class TRLNames:
    """Attributes of TRL's trainer with TRL's meaning, in addition to those in `SETTINGS`."""

    temperature = setting("temperature", "temperature_resolved")
    chat_template_kwargs = property(lambda trainer: dict(trainer.args.chat_template_kwargs or {}))
    num_generations_eval = setting("num_generations_eval", "num_generations_eval_resolved")
    epsilon_low = setting("epsilon")
    epsilon_high = setting("epsilon_high", "epsilon_high_resolved")
    entropy_coef = property(lambda trainer: trainer.entropy_controller.coef)
    aux_loss_enabled = property(lambda trainer: trainer.components.forward_options.aux_loss)
    rollout_func = property(lambda trainer: trainer.rollout_components.function)
    tools = property(lambda trainer: [tool.function for tool in trainer.rollout_components.tools])
    reward_funcs = property(
        lambda trainer: [*trainer.rewards.functions, *trainer.rollout_components.reward_functions],
        doc="The rewards of environments come last, as functions of `environments`.",
    )
    reward_func_names = property(lambda trainer: list(trainer.rewards.names))
    reward_processing_classes = property(
        lambda trainer: [*trainer.rewards.processing_classes, *(None for _ in trainer.rollout_components.reward_names)]
    )
    reward_weights = property(
        lambda trainer: torch.tensor(trainer.components.scoring_options.reward_weights),
        doc="(R,) float32, environments' rewards last.",
    )
    ref_model = property(
        lambda trainer: None if trainer.reference is None else trainer.reference.module,
        doc="The frozen copy of the policy; None without a KL term, and for adapters, which are switched off instead.",
    )
    pad_token_id = property(lambda trainer: int(trainer._policy.tokenizer.pad_token_id))
    eos_token_id = property(lambda trainer: trainer._policy.tokenizer.eos_token_id)
    eos_token_ids = property(lambda trainer: list(trainer._policy.eos_ids), doc="All tokens that end a completion.")
    vllm_client = property(
        lambda trainer: None if trainer.vllm_policy is None else trainer.vllm_policy.engine,
        doc="The engine that speaks with vLLM; None without vLLM.",
    )

    metric_store: MetricStore
    eval_metric_store: MetricStore

    @property
    def _metrics(self) -> dict[str, MetricLists]:
        return {"train": MetricLists(self.metric_store), "eval": MetricLists(self.eval_metric_store)}

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to a training metric; the log shows the mean over the log window and over ranks."""
        self.metric_store.add({name: average(float(value))})

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = vars(TRLNames).get(name)
        if isinstance(attribute, property) and attribute.fset is None:
            raise AttributeError(
                f"{name} can be read, not assigned: the constructor and trainer.args decide it ({PAGE})"
            )
        if name == "generation_config":  # scripts assign it for its effect, the other names for uses of their own
            raise AttributeError(
                "generation_config has no effect here: set temperature, top_p, max_completion_length or "
                f"generation_kwargs on trainer.args ({PAGE})"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if instead := REPLACED.get(name) or NEVER_CALLED.get(name):
            raise AttributeError(f"groupgrad's trainer has no {name}; instead: {instead} ({PAGE})")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


for _name in SETTINGS:
    setattr(TRLNames, _name, setting(_name))
