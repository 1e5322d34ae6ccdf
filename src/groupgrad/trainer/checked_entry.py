"""Checks made when a script calls `train`, `evaluate` or `predict`, before anything is sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from groupgrad import dist
from groupgrad.data.digest import dataset_digest
from groupgrad.engines.selection import replaces_generate
from groupgrad.models.liger import configured_kernels
from groupgrad.models.unwrapping import unwrap
from groupgrad.trainer import component_options, dataset_checks

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

_LOCK = threading.RLock()


@contextmanager
def one_thread(what: str) -> Iterator[None]:
    """Context of work on a model that no other thread of this process may do now; RuntimeError if one does.

    Attention and modules are switched for the whole process while a model samples or trains, so two threads would
    change each other's numbers.
    """
    if not _LOCK.acquire(blocking=False):
        raise RuntimeError(
            f"{what} was called in {threading.current_thread().name} while another thread makes or runs a trainer: two "
            "threads of a process would change each other's numbers. Call one after the other, or start a process for "
            "each"
        )
    try:
        yield
    finally:
        _LOCK.release()


def entry(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Decorates a method of the trainer that a script calls to train or to evaluate."""

    @wraps(method)
    def checked(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with one_thread(f"{method.__name__}()"):
            if self.is_in_train:
                return method(self, *args, **kwargs)
            check_model(self)
            if follow_options(self):
                self._build_components()
            if method.__name__ == "train":
                check_ranks_agree(self)
            with self._policy.given.in_use(), configured_kernels(self.args):
                try:
                    return method(self, *args, **kwargs)
                finally:
                    if self.checkpointing is not None:
                        self.checkpointing.switch(False)

    return checked


def check_model(trainer: Any) -> None:
    """ValueError if a script has given the trainer another model, which would be neither sampled nor trained, or the
    model another `generate`, which would not be called."""
    if trainer.model_init is not None:  # a search makes the model of each trial
        return
    given, trained = unwrap(trainer.model), unwrap(trainer._policy.model)
    if given is not trained:
        raise ValueError(
            f"trainer.model was replaced by another {type(given).__name__} after the trainer was made, and a trainer "
            "samples and trains the one that it was made with; make another GRPOTrainer with the new model"
        )
    if trainer.execution.engine_choice.name in ("native", "continuous batching") and replaces_generate(trainer.model):
        raise ValueError(
            f"generate of the {type(given).__name__} was replaced after the trainer was made, which chooses then how "
            "it samples; make it after the replacement"
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
    """Collective. ValueError, on all ranks, if a rank has other data than rank 0.

    Streams are not compared, since their rows are read as training goes on.
    """
    if not dist.is_active():
        return
    with dist.errors_on_all_ranks():
        data = {"train_dataset": trainer.recorder.data_digest()}
        if trainer.args.evaluates:
            sets = dataset_checks.named_datasets(trainer.eval_dataset)
            data |= {name: dataset_digest(dataset) for name, dataset in sets.items()}
    first, *others = dist.all_gather_objects(data)
    for rank, found in enumerate(others, start=1):
        for name in {**first, **found}:
            if first.get(name) != found.get(name):
                sizes = " and ".join(str((each.get(name) or {}).get("rows", "?")) for each in (first, found))
                raise ValueError(
                    f"{name} of ranks 0 and {rank} differ: they have {sizes} rows, in another order or with other "
                    "content. Prompts are dealt to ranks by the number of their row, so give each rank the same rows "
                    "in the same order: shuffle and split with a seed, as in dataset.shuffle(seed=42)"
                )
