"""Surrounds `train`, `evaluate` and `predict` with checks, and gives the script its model back behind them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from groupgrad import dist
from groupgrad.data.columns import dataset_digest
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


_WRAPPER = ("_original_forward", "_is_accelerate_prepared")
"""Attributes of a model whose `forward` accelerate has wrapped in mixed precision, or found to need no wrapper."""
_HOOKS = "_require_grads_hooks"
_ENDED = ("training", "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook", _HOOKS)
"""Attributes of modules that each training sets anew: the mode, and what gradient checkpointing needs."""
_ABSENT = object()


class GivenModel:
    """A model as a script gave it.

    Between trainings it has the modes, gradient checkpointing, hooks and `forward` of the script, and its configuration
    is never told to sample without a cache. What a trainer needs is taken off the model when training or evaluation
    ends, and made anew when the next one begins. So another trainer of the same model computes in its own precision.
    """

    def __init__(self, model: nn.Module):
        self._model = unwrap(model)
        self._config = getattr(self._model, "config", None)
        self._use_cache = getattr(self._config, "use_cache", _ABSENT)
        self._given = _take_off(self._model)

    def keep_cache(self) -> None:
        """Gives the configuration its `use_cache` back, which `Trainer` sets, and which a saved model would have."""
        if self._config is not None:
            if self._use_cache is not _ABSENT:
                self._config.use_cache = self._use_cache
            elif "use_cache" in vars(self._config):
                del self._config.use_cache

    @property
    def is_prepared(self) -> bool:
        """True if the model has training's precision now."""
        return "_is_accelerate_prepared" in vars(self._model)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of training or evaluation: the model as the trainer has prepared it."""
        model, before = self._model, {module: _ended(module) for module in self._model.modules()}
        given = _take_off(model) or self._given
        try:
            yield
        finally:
            _take_off(model)
            vars(model).update(given)
            for module, attributes in before.items():
                _put_back(module, attributes)


@contextmanager
def trials_from_present_weights(trainer: Any) -> Iterator[None]:
    """Context of a hyperparameter search, each trial of which starts from the weights that the model has now."""
    model, start = trainer.model, copy.deepcopy(trainer.model.state_dict())

    def restart() -> nn.Module:
        model.load_state_dict(start)
        return model

    trainer.model_init = restart
    try:
        yield
    finally:
        # Some search backends drop the trainer's model after each trial.
        trainer.model_init, trainer.model, trainer.model_wrapped = None, model, model


def _take_off(model: nn.Module) -> dict[str, Any]:
    """Removes accelerate's wrapper of `forward`, and returns the attributes that put it on again."""
    attributes = vars(model)
    wrapper = {name: attributes.pop(name) for name in _WRAPPER if name in attributes}
    original = wrapper.get("_original_forward")
    if original is not None:
        wrapper["forward"] = attributes.pop("forward")
        if getattr(original, "__func__", None) is not type(model).forward:
            model.forward = original  # the script's own
    return wrapper


def _ended(module: nn.Module) -> dict[str, Any]:
    attributes = vars(module)
    return {name: attributes[name] for name in _ENDED if name in attributes}


def _put_back(module: nn.Module, given: dict[str, Any]) -> None:
    attributes = vars(module)
    kept = given.get(_HOOKS, ())
    for hook in attributes.get(_HOOKS, ()):
        if not any(hook is other for other in kept):
            hook.remove()
    for name in _ENDED:
        if name in given:
            attributes[name] = given[name]
        else:
            attributes.pop(name, None)
