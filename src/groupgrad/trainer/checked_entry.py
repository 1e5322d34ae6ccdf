"""Checks made when a script calls `train`, `evaluate` or `predict`, before anything is sampled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from groupgrad.models.unwrapping import unwrap
from groupgrad.trainer import component_options, dataset_checks
from groupgrad.trainer.rank_agreement import check_ranks_agree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")

_LOCK = threading.RLock()
_holders: list[tuple[str, str]] = []
"""One entry for each acquisition of the lock: thread name and work."""


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
    given, own = unwrap(trainer.model), unwrap(trainer._policy.model)
    if given is not own:
        raise ValueError(
            f"trainer.model was replaced by another {type(given).__name__} after the trainer was made, and a trainer "
            "samples and trains the one that it was made with; make another GRPOTrainer with the new model"
        )


def follow_options(trainer: Any) -> bool:
    """Returns True if a script or a search has changed options that the trainer's components are to be made by anew.

    ConfigError or ValueError if a change cannot work, or would do nothing.
    """
    config = trainer.args
    if not trainer.changed_options.check(config, has_reference=trainer.reference is not None):
        return False
    plan = component_options.generation_plan(config)
    datasets = trainer.train_dataset, trainer.eval_dataset
    dataset_checks.check_datasets(*datasets, plan, trainer.prompt_maker, trainer.rollout_components, config)
    trainer.changed_options.accept(config)
    return True
