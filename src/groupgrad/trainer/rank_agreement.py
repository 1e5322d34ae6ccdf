"""Checks that all ranks have the same data and options, from which each one computes its rows and steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.data.digest import dataset_digest
from groupgrad.objectives import PolicyOptions
from groupgrad.trainer.dataset_checks import named_datasets

_OF_ALL_RANKS = {
    *(field.name for field in dataclasses.fields(PolicyOptions) if field.name in GRPOConfig.__dataclass_fields__),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("generation_batch_size", "steps_per_generation", "num_generations", "num_generations_eval", "num_iterations"),
    *("max_steps", "num_train_epochs", "max_completion_length", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "generation_kwargs", "chat_template_kwargs", "shuffle_dataset", "shuffle_rows", "seed"),
    *("data_seed", "dataloader_drop_last", "reward_weights", "scale_rewards", "multi_objective_aggregation"),
    *("mask_truncated_completions", "dynamic_sampling_rounds", "learning_rate", "weight_decay", "lr_scheduler_type"),
    *("warmup_steps", "max_grad_norm", "optim", "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"),
    *("entropy_coef", "use_adaptive_entropy", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
    *("logging_strategy", "logging_steps"),
}
"""Options of the objective, of sampling, and of when something is done."""


def check_ranks_agree(trainer: Any) -> None:
    """Collective. ValueError, on all ranks, if a rank has other data or options than rank 0.

    Streams are not compared, since their rows are read as training goes on.
    """
    if not dist.is_active():
        return
    config = trainer.args
    with dist.errors_on_all_ranks():
        data = {"train_dataset": trainer.recorder.data_digest()}
        if config.evaluates:
            sets = named_datasets(trainer.eval_dataset)
            data |= {name: dataset_digest(dataset) for name, dataset in sets.items()}
        options = {name: repr(getattr(config, name, None)) for name in sorted(_OF_ALL_RANKS)}
    (first_data, first_options), *others = dist.all_gather_objects((data, options))
    for rank, (its_data, its_options) in enumerate(others, start=1):
        for name in {**first_data, **its_data}:
            if first_data.get(name) != its_data.get(name):
                raise ValueError(_data_differ(name, rank, first_data.get(name), its_data.get(name)))
        differing = [name for name, value in first_options.items() if value != its_options[name]]
        if differing:
            found = ", ".join(f"{name}={first_options[name]} and {its_options[name]}" for name in differing)
            raise ValueError(
                f"ranks 0 and {rank} have different options: {found}; all ranks train the same steps, so give each "
                "the same configuration"
            )


def _data_differ(name: str, rank: int, first: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str:
    sizes = [None if found is None else found["rows"] for found in (first, other)]
    how = "the same number of rows, but others, or in another order"
    if sizes[0] != sizes[1]:
        how = " and ".join("no rows that can be counted" if size is None else f"{size} rows" for size in sizes)
    return (
        f"{name} of ranks 0 and {rank} differ: they have {how}. Prompts are dealt to ranks by the number of their row, "
        "so give each rank the same rows in the same order: shuffle and split with a seed, as in "
        "dataset.shuffle(seed=42), and load the same files"
    )
