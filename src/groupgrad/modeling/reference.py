"""The reference model: the policy as it was given, frozen.

Never a fresh load by name: what the user passed in may differ from what its name would load.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from groupgrad.errors import UnavailableError
from groupgrad.modeling.adapters import active_adapters, is_adapted
from groupgrad.modeling.systems.zero3 import ShardSnapshot, is_sharded
from groupgrad.modeling.vlm import is_multimodal

_BASE_STAYS = frozenset({"gaussian", "eva"})
"""Named ways to begin a LoRA adapter that leave the base model's weights as they are; others subtract it from them."""


class Reference:
    """Scores as the policy once did. One of three kinds, by what the policy is:

    - a full model: a frozen copy of it; of one whose parameters are spread over ranks, a copy of each rank's part,
      which takes the place of the policy's while the reference is asked (a collective then, as any pass of it);
    - a fresh adapter: the same weights with the adapter switched off;
    - a trained adapter, one that the reference is to follow, or one that changes the base model when it begins: frozen
      copies of the parameters that train, which take their places while the reference is asked.
    """

    def __init__(self, policy: nn.Module, *, adapter_is_fresh: bool, is_synced: bool):
        self._policy = policy
        self._copy: nn.Module | None = None
        self._kept: dict[str, nn.Parameter] = {}
        self._shards: ShardSnapshot | None = None
        if not is_adapted(policy) and is_sharded(policy):
            self._shards = ShardSnapshot(policy)
        elif not is_adapted(policy):
            self._copy = copy.deepcopy(policy).eval().requires_grad_(False)
        elif is_synced or not adapter_is_fresh or not _can_be_switched_off(policy):
            self._kept = {
                name: nn.Parameter(parameter.detach().clone(), requires_grad=False)
                for name, parameter in policy.named_parameters()
                if parameter.requires_grad
            }

    @property
    def keeps_parameters(self) -> bool:
        """True if it has parameters of its own that take the place of the policy's, by one and one."""
        return bool(self._kept)

    @property
    def module(self) -> nn.Module | None:
        """The frozen copy of a full model, to be placed on devices; None for adapters."""
        return self._copy

    def place(self, module: nn.Module) -> None:
        """Use `module` (the copy, moved or wrapped) from now on."""
        self._copy = module

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module that answers as the reference inside this context; nothing may be trained there."""
        if self._copy is not None:
            yield self._copy
        elif self._shards is not None:
            with self._shards.in_place():
                yield self._policy
        elif self._kept:
            with self._in_place():
                yield self._policy
        else:
            with _trainability_kept(self._policy), self._policy.disable_adapter():  # pyright: ignore[reportCallIssue]
                yield self._policy

    @torch.no_grad()
    def sync(self, policy: nn.Module, mixup: float) -> None:
        """reference <- mixup * policy + (1 - mixup) * reference, parameter by parameter (arXiv:2404.09656).

        For adapters the parameters are those that train.
        """
        own = self._own()
        current = dict(policy.named_parameters()) if self._copy is None else None
        pairs = (
            zip(own.values(), policy.parameters(), strict=True)
            if current is None
            else ((reference, current[name]) for name, reference in own.items())
        )
        for reference, parameter in pairs:
            reference.lerp_(parameter.to(reference), mixup)

    def state_dict(self) -> dict[str, Any]:
        """The reference's own weights, empty if it has none (adapter switched off)."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._own().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s weights."""
        for name, parameter in self._own().items():
            parameter.copy_(state[name])

    def _own(self) -> dict[str, nn.Parameter]:
        return self._kept if self._copy is None else dict(self._copy.named_parameters())

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The kept parameters where the policy's are, each on its device and in its dtype."""
        kept: dict[int, nn.Parameter] = {}
        for name, parameter in self._policy.named_parameters():
            if name in self._kept:
                self._kept[name].data = self._kept[name].data.to(parameter)
                kept[id(parameter)] = self._kept[name]
        # A parameter that several modules share is in the place of each.
        places = [
            (module._parameters, key, parameter)
            for module in self._policy.modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in kept
        ]
        try:
            for parameters, key, parameter in places:
                parameters[key] = kept[id(parameter)]
            yield
        finally:
            for parameters, key, parameter in places:
                parameters[key] = parameter


def check_sharded_policy(policy: nn.Module, reference: Reference | None) -> None:
    """UnavailableError for what does not go with parameters that are spread over ranks."""
    name = f"{type(policy).__name__} under DeepSpeed ZeRO-3"
    if is_multimodal(policy):
        raise UnavailableError(f"{name}: models that take images are not trained so; use ZeRO stage 1 or 2")
    if reference is not None and reference.keeps_parameters:
        raise UnavailableError(
            f"{name}: a reference that is this adapter as it was given cannot be kept; begin with a new adapter, set "
            "beta=0.0, or use ZeRO stage 1 or 2"
        )


def _can_be_switched_off(policy: Any) -> bool:
    """True if the policy without its fresh adapter is the model that was given, now and after training."""
    names = active_adapters(policy)
    for name in names:
        beginning = getattr(policy.peft_config[name], "init_lora_weights", True)
        if isinstance(beginning, str) and beginning.lower() not in _BASE_STAYS:
            return False
    # Biases of the base model train with some adapters, and stay when these are off.
    return all(
        any(part in names for part in name.split("."))
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    )


@contextmanager
def _trainability_kept(policy: Any) -> Iterator[None]:
    """Which parameters train is put back as it was afterwards: switching adapters on and off changes it."""
    trainable = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(trainable[name])
