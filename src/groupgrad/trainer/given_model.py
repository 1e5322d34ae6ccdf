"""Puts back what training changes on a script's model beside its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from groupgrad.models.unwrapping import unwrap

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
