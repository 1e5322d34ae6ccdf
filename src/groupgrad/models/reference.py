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

from groupgrad.models.adapters import is_adapted

REFERENCE_ADAPTER = "groupgrad_reference"


class Reference:
    """Scores as the policy once did. One of three kinds, by what the policy is:

    - a full model: a frozen copy of it;
    - a fresh adapter: the same weights with the adapter switched off;
    - a trained adapter, or one that the reference is to follow: a frozen copy of the adapter beside it.
    """

    def __init__(self, policy: nn.Module, *, adapter_is_fresh: bool, follows: bool):
        self._policy = policy
        self._copy: nn.Module | None = None
        self._adapter: str | None = None
        if not is_adapted(policy):
            self._copy = copy.deepcopy(policy).eval().requires_grad_(False)
        elif not adapter_is_fresh or follows:
            self._adapter = _add_frozen_adapter(policy)

    @property
    def module(self) -> nn.Module | None:
        """The frozen copy of a full model, to be placed on devices; None for adapters."""
        return self._copy

    def place(self, module: nn.Module) -> None:
        """Use `module` (the copy, moved or wrapped) from now on."""
        self._copy = module

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module that answers as the reference inside this context."""
        if self._copy is not None:
            yield self._copy
        elif self._adapter is None:
            with _trainability_kept(self._policy), self._policy.disable_adapter():  # pyright: ignore[reportCallIssue]
                yield self._policy
        else:
            with _adapter_active(self._policy, self._adapter):
                yield self._policy

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The policy without the reference's adapter inside this context, so that it can be saved alone.

        Of a checkpoint with a second adapter some releases of transformers (up to 5.22) load no other one on resume.
        """
        adapters: Any = {} if self._adapter is None else self._policy.peft_config
        kept = adapters.pop(self._adapter, None)
        try:
            yield
        finally:
            if kept is not None:
                adapters[self._adapter] = kept

    @torch.no_grad()
    def follow(self, policy: nn.Module, mixup: float) -> None:
        """reference <- mixup * policy + (1 - mixup) * reference, parameter by parameter (arXiv:2404.09656).

        For adapters the parameters are the adapter's own.
        """
        for reference, current in self._pairs(policy):
            reference.lerp_(current.to(reference.dtype), mixup)

    def state_dict(self) -> dict[str, Any]:
        """The reference's own weights, empty if it has none (adapter switched off)."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._own().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s weights."""
        for name, parameter in self._own().items():
            parameter.copy_(state[name])

    def _own(self) -> dict[str, nn.Parameter]:
        if self._copy is not None:
            return dict(self._copy.named_parameters())
        if self._adapter is None:
            return {}
        return {n: p for n, p in self._policy.named_parameters() if f".{self._adapter}." in n}

    def _pairs(self, policy: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        if self._copy is not None:
            yield from zip(self._copy.parameters(), policy.parameters(), strict=True)
            return
        active = _active_adapter(policy)
        parameters = dict(policy.named_parameters())
        for name, reference in self._own().items():
            yield reference, parameters[name.replace(f".{self._adapter}.", f".{active}.")]


def _active_adapter(model: Any) -> str:
    active = model.active_adapter
    return active if isinstance(active, str) else active[0]


def _add_frozen_adapter(policy: Any) -> str:
    """Copy the active adapter under the reference's name, frozen."""
    active = _active_adapter(policy)
    policy.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(policy.peft_config[active]))
    parameters = dict(policy.named_parameters())
    for name, parameter in parameters.items():
        if f".{REFERENCE_ADAPTER}." in name:
            parameter.data.copy_(parameters[name.replace(f".{REFERENCE_ADAPTER}.", f".{active}.")].data)
            parameter.requires_grad_(False)
    return REFERENCE_ADAPTER


@contextmanager
def _adapter_active(policy: Any, name: str) -> Iterator[None]:
    """Another adapter inside."""
    active = _active_adapter(policy)
    with _trainability_kept(policy):
        policy.set_adapter(name)
        try:
            yield
        finally:
            policy.set_adapter(active)


@contextmanager
def _trainability_kept(policy: Any) -> Iterator[None]:
    """Which parameters train is put back as it was afterwards: switching adapters, on and off too, changes it."""
    trainable = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(trainable[name])
