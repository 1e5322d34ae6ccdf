"""Checks made when a script calls `train`, `evaluate` or `predict`, before anything is sampled."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from groupgrad import dist
from groupgrad.config import GRPOConfig
from groupgrad.data.digest import dataset_digest
from groupgrad.models.unwrapping import unwrap
from groupgrad.objectives import PolicyOptions
from groupgrad.trainer import component_options, dataset_checks

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

_LOCK = threading.RLock()
_holders: list[tuple[str, str]] = []
"""One entry for each acquisition of the lock: thread name and work."""

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


@contextmanager
def one_thread(what: str) -> Iterator[None]:
    """Context of work on a model that no other thread of this process may do now; RuntimeError if one does.

    Attention and modules are switched for the whole process while a model samples or trains, so two threads would
    change each other's numbers.
    """
    if not _LOCK.acquire(blocking=False):
        other, doing = _holders[-1] if _holders else ("another thread", "a trainer")
        raise RuntimeError(
            f"{what} was called in {threading.current_thread().name} while {doing} runs in {other}: two threads of a "
            "process would change each other's numbers. Call one after the other, or start a process for each"
        )
    _holders.append((threading.current_thread().name, what))
    try:
        yield
    finally:
        _holders.pop()
        _LOCK.release()


def entry(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Decorates a method of the trainer that a script calls to train or to evaluate."""

    @wraps(method)
    def checked(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with one_thread(f"{method.__name__}()"):
            if self.is_in_train:
                return method(self, *args, **kwargs)
            _check_model(self)
            if follow_options(self):
                self._build_components()
            if method.__name__ == "train":
                check_ranks_agree(self)
            with self._policy.given.in_use():
                try:
                    return method(self, *args, **kwargs)
                finally:
                    if self.checkpointing is not None:
                        self.checkpointing.switch(False)

    return checked


def _check_model(trainer: Any) -> None:
    """ValueError if a script has given the trainer another model, which would be neither sampled nor trained."""
    if trainer.model_init is not None:  # a search makes the model of each trial
        return
    given, trained = unwrap(trainer.model), unwrap(trainer._policy.model)
    if given is not trained:
        raise ValueError(
            f"trainer.model was replaced by another {type(given).__name__} after the trainer was made, and a trainer "
            "samples and trains the one that it was made with; make another GRPOTrainer with the new model"
        )


def follow_options(trainer: Any) -> bool:
    """Returns True if a script or a search has changed options that the trainer's components are to be made by anew.

    ConfigError or ValueError if a change cannot work, or would do nothing.
    """
    config = trainer.args
    # A search makes the model and the optimizer of each trial.
    keeps_optimizer = trainer.optimizer is not None and trainer.model_init is None
    has_reference = trainer.reference is not None
    if not trainer.changed_options.check(config, has_reference=has_reference, keeps_optimizer=keeps_optimizer):
        return False
    plan = component_options.generation_plan(config)
    datasets = trainer.train_dataset, trainer.eval_dataset
    dataset_checks.check_datasets(*datasets, plan, trainer.prompt_maker, trainer.rollout_components, config)
    trainer.changed_options.accept(config)
    return True


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
            sets = dataset_checks.named_datasets(trainer.eval_dataset)
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
