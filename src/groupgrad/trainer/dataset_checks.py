"""Checks the data sets of a run before anything is sampled."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn

from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.config import GRPOConfig
from groupgrad.data.columns import is_transformed
from groupgrad.data.images import COLUMNS as IMAGE_COLUMNS
from groupgrad.data.prompts import PromptMaker, check_dataset
from groupgrad.envs.environments import ENV_COLUMN
from groupgrad.objectives import find_method
from groupgrad.rewards.call_inputs import (
    HIDDEN_COLUMNS,
    STANDARD_ARGUMENTS,
    TRAINER_METRIC_PREFIXES,
    TRAINER_METRICS,
)
from groupgrad.rewards.functions import RewardFunction, inspect_function
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.spelling import did_you_mean
from groupgrad.trainer import component_options

logger = logging.getLogger(__name__)

_PROMPT_COLUMNS = ("prompt", *IMAGE_COLUMNS)


def check_datasets(
    train: Any,
    evaluation: Any,
    plan: GenerationPlan,
    prompt_maker: PromptMaker,
    rollout_components: RolloutComponents,
    config: GRPOConfig,
) -> None:
    """Refuses data sets that cannot be used with this configuration, before anything is sampled."""
    check_rows(train, "train_dataset", prompt_maker, rollout_components)
    if isinstance(train, IterableDataset):
        if config.max_steps <= 0:
            raise ValueError(
                f"train_dataset is a stream without a length and max_steps is {config.max_steps}; set max_steps to the "
                "number of optimizer steps to train"
            )
        if config.dynamic_sampling_rounds:
            raise ValueError(
                f"dynamic_sampling_rounds={config.dynamic_sampling_rounds} draws prompts at random, and train_dataset "
                "is a stream, whose rows come in their order; set it to 0, or load the data set without streaming"
            )
        _read_stream_here(config)
    elif len(train) < plan.prompts_per_generation:
        raise ValueError(
            f"train_dataset has {len(train)} rows, but one generation batch takes {plan.prompts_per_generation} "
            f"distinct prompts ({plan.generation_batch_size} completions / num_generations={plan.num_generations}); "
            "add rows, or lower generation_batch_size, per_device_train_batch_size or gradient_accumulation_steps"
        )
    for name, dataset in named_datasets(evaluation).items():
        check_rows(dataset, name, prompt_maker, rollout_components)
        _check_split(dataset, name, config)
    _warn_of_context(prompt_maker.max_context, config)
    if evaluation is not None and config.evaluates and config.metric_for_best_model is not None:
        _check_best_metric(config.metric_for_best_model, evaluation)


def _check_best_metric(wanted: str, evaluation: Any) -> None:
    """ValueError if no set of a dict can have `metric_for_best_model`; a warning of a name that no trainer measures."""
    full = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
    prefixes = [f"eval_{name}_" for name in evaluation] if isinstance(evaluation, Mapping) else ["eval_"]
    names = [full.removeprefix(prefix) for prefix in prefixes if full.startswith(prefix)]
    if not names:
        raise ValueError(
            f"metric_for_best_model={wanted!r} is looked for as {full!r}, but the metrics of a dict of evaluation sets "
            f"begin with {' or '.join(map(repr, prefixes))}; set it to '{prefixes[0]}{full.removeprefix('eval_')}'"
        )
    if not any(name in TRAINER_METRICS or name.startswith(TRAINER_METRIC_PREFIXES) for name in names):
        warnings.warn(
            f"metric_for_best_model={wanted!r} is no metric that the trainer measures"
            f"{did_you_mean(names[0], TRAINER_METRICS, before='; ')}; an evaluation without it counts as not better "
            "than others. Log it in a reward function by log_metric, or set it to 'reward'"
        )


def _warn_of_context(max_context: int | None, config: GRPOConfig) -> None:
    """A warning if no completion can be as long as `max_completion_length`."""
    longest = component_options.longest_completion(config, max_context)
    if longest >= int(config.max_completion_length or 0):
        return
    reason = f"the model has {max_context} positions for prompt and completion together"
    if longest == config.max_new_tokens_resolved:
        reason = f"generation_kwargs has max_new_tokens={longest}"
    divides = find_method(config.loss_type).reduction == "constant"
    divisor = f"; loss_type={config.loss_type!r} divides by {longest}" if divides else ""
    warnings.warn(
        f"max_completion_length={config.max_completion_length} cannot be reached, since {reason}: completions have at "
        f"most {longest} tokens{divisor}"
    )


def _read_stream_here(config: GRPOConfig) -> None:
    """Sets the options of data loading to those by which a stream can be read, with a warning of a change."""
    if config.dataloader_num_workers:
        warnings.warn(
            f"dataloader_num_workers={config.dataloader_num_workers} is not used: train_dataset is a stream, which "
            "every worker would read from its beginning; it is read in the main process (dataloader_num_workers=0)"
        )
        config.dataloader_num_workers = 0
    loading: Any = config.accelerator_config
    loading.dispatch_batches = False


def rows_for_environment(environment_factory: Any, plan: GenerationPlan, config: GRPOConfig) -> Dataset:
    """Rows with an empty prompt, for one environment that brings its own data: a generation batch's worth of them.

    ValueError without an environment, with several of them, and without `max_steps`.
    """
    if environment_factory is None:
        raise ValueError("train_dataset is None; give a data set with a 'prompt' column")
    if isinstance(environment_factory, Mapping):
        raise ValueError(
            f"train_dataset is None and environment_factory names {len(environment_factory)} environments; give a data "
            f"set whose column '{ENV_COLUMN}' chooses one for each row"
        )
    if config.max_steps <= 0:
        raise ValueError(
            f"train_dataset is None, so the run has no length, and max_steps is {config.max_steps}; set max_steps to "
            "the number of optimizer steps to train"
        )
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * plan.prompts_per_generation})


def check_rows(dataset: Any, name: str, prompt_maker: PromptMaker, rollout_components: RolloutComponents) -> None:
    """Refuses a data set whose rows cannot be used; environments and programs may begin without a prompt."""
    if taken := [column for column in column_names(dataset) if column in {*STANDARD_ARGUMENTS} - {*HIDDEN_COLUMNS}]:
        raise ValueError(
            f"{name} has the column {taken[0]!r}, a name under which reward functions get something else from the "
            f"trainer; rename it: dataset.rename_column({taken[0]!r}, '...')"
        )
    check_dataset(
        dataset,
        name,
        prompt_maker,
        may_lack_prompts=rollout_components.makes_prompts,
        renders=rollout_components.renders_prompts,
    )
    rollout_components.check_dataset(dataset, name)


def rows_to_evaluate(trainer: Any, dataset: Any) -> Any:
    """A data set that the trainer's configuration allows to evaluate on, with the columns that it keeps."""
    rollouts = trainer.rollout_components
    dataset = keep_columns(dataset, "eval_dataset", trainer.eval_rewards.functions, rollouts, trainer.args)
    check_rows(dataset, "eval_dataset", trainer.prompt_maker, rollouts)
    _check_split(dataset, "eval_dataset", trainer.args)
    return dataset


def _check_split(dataset: Any, name: str, config: GRPOConfig) -> None:
    """ValueError if an evaluation set lacks the column by which results are split."""
    columns = column_names(dataset)
    if config.eval_by is not None and columns and config.eval_by not in columns:
        raise ValueError(
            f"eval_by={config.eval_by!r} splits evaluations by a column, and {name} has no such column (it has "
            f"{', '.join(columns)}); set eval_by to one of them, or leave it unset"
        )


def check_rewards(
    rewards: RewardRunner,
    eval_rewards: RewardRunner,
    train: Any,
    evaluation: Any,
    rollout_components: RolloutComponents,
) -> None:
    """ValueError if the rewards of training or evaluation cannot read the rows of its data sets."""
    # Rows without prompts are for environments, which begin with a conversation.
    if not isinstance(next(iter(train), {}).get("prompt"), str):
        for model in dict.fromkeys((*rewards.models, *eval_rewards.models)):
            model.check_conversations()
    # Rollout functions and environments may bring further arguments.
    if rollout_components.function is None and rollout_components.environments is None:
        _check_reward_arguments(rewards, {"train_dataset": train})
        _check_reward_arguments(eval_rewards, named_datasets(evaluation))


def _check_reward_arguments(rewards: RewardRunner, datasets: Mapping[str, Any]) -> None:
    """ValueError if a reward function requires an argument that a data set has no column for."""
    for name, dataset in datasets.items():
        columns = column_names(dataset)
        for function, missing in rewards.missing_arguments(columns).items():
            raise ValueError(
                f"the reward function {function!r} requires the argument {missing[0]!r}, and {name} has no such column "
                f"(it has {', '.join(columns)}); add the column, or give the argument a default"
            )


def column_names(dataset: Any) -> list[str]:
    """The columns of a data set or stream; empty for anything else."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return []
    if isinstance(dataset, Dataset) and is_transformed(dataset):  # a user's function makes the columns
        return list(next(iter(dataset), {}))
    return dataset.column_names or list(next(iter(dataset), {}))


def named_datasets(evaluation: Any) -> dict[str, Any]:
    """Evaluation sets by the name that messages use; `evaluation` is one set, a dict of them or None."""
    if evaluation is None:
        return {}
    if isinstance(evaluation, Mapping):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}
    return {"eval_dataset": evaluation}


def keep_columns(dataset: Any, name: str, reward_funcs: Any, rollouts: RolloutComponents, config: GRPOConfig) -> Any:
    """A data set with the columns that the configuration keeps: all of them unless `remove_unused_columns`.

    Otherwise those that prompts are made of, and those that the signature of a reward function or of an environment's
    `reset` names. A warning names what is dropped. `**kwargs` names nothing.
    """
    columns = column_names(dataset) if config.remove_unused_columns else []
    named = {column for function in _functions_of(reward_funcs) for column in function.columns_named(columns)}
    named |= {*_PROMPT_COLUMNS, *rollouts.columns_named, config.eval_by}
    unused = [column for column in columns if column not in named]
    # A user's function may read all columns; a data set without prompts is refused with all of its columns.
    is_left = isinstance(dataset, Dataset) and is_transformed(dataset)
    if not unused or is_left or not ("prompt" in columns or rollouts.environments):
        return dataset
    warnings.warn(
        f"remove_unused_columns=True drops {', '.join(map(repr, unused))} of {name}: no reward function or reset names "
        "them, and **kwargs does not hold them. Name a column in a signature, or set remove_unused_columns=False, to "
        "have it"
    )
    return dataset.remove_columns(unused)


def keep_columns_of_sets(evaluation: Any, reward_funcs: Any, rollouts: RolloutComponents, config: GRPOConfig) -> Any:
    """The same for the evaluation sets: one, a dict of them or None."""
    if isinstance(evaluation, Mapping):
        sets = evaluation.items()
        return {name: keep_columns(dataset, "eval_dataset", reward_funcs, rollouts, config) for name, dataset in sets}
    return keep_columns(evaluation, "eval_dataset", reward_funcs, rollouts, config)


def _functions_of(reward_funcs: Any) -> list[RewardFunction]:
    """The functions among rewards, whose signatures name columns."""
    items = reward_funcs if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    return [inspect_function(item) for item in items if callable(item) and not isinstance(item, (type, nn.Module))]
