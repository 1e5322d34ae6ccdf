"""The reference model: the policy's weights from before training, frozen.

They are copied from the policy in memory, not loaded again: the user may have changed them after loading.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.errors import UnavailableError
from groupgrad.models.adapters import active_adapters, is_adapted, leaves_base_unchanged
from groupgrad.models.shards import is_sharded, shard_values
from groupgrad.models.unwrapping import parameters_replaced
from groupgrad.models.weights import plain_name, weights_digest


class Reference:
    """The frozen policy, kept in one of three forms:

    - for a full model a frozen copy, or for a sharded one a copy of each rank's shards, which replace the policy's
      inside `active` (its passes are collectives then, as the policy's are);
    - for a new adapter nothing: the adapter is disabled inside `active`;
    - for a trained adapter, a synced reference, or an adapter whose initialisation changes the base weights, frozen
      copies of the trained parameters, which replace the policy's inside `active`.
    """

    def __init__(self, policy: nn.Module, *, adapter_is_fresh: bool, is_synced: bool):
        self._policy = policy
        self.module: nn.Module | None = None
        """The frozen copy of a full model, which may be moved or wrapped; None for the other forms."""
        self._parameters: dict[str, nn.Parameter] = {}
        self._shards: Any = None
        """The `ShardSnapshot` of a sharded policy."""
        self._digest: str | None = None
        if not is_adapted(policy) and is_sharded(policy):
            from groupgrad.integrations.sharding.sharding import ShardSnapshot

            self._shards = ShardSnapshot(policy)
        elif not is_adapted(policy):
            self.module = copy.deepcopy(policy).eval().requires_grad_(False)
        elif is_synced or not adapter_is_fresh or not _can_be_disabled(policy):
            self._parameters = {
                name: nn.Parameter(parameter.detach().clone(), requires_grad=False)
                for name, parameter in policy.named_parameters()
                if parameter.requires_grad
            }

    @property
    def keeps_parameters(self) -> bool:
        """True if it has copies of the trained parameters."""
        return bool(self._parameters)

    def digest(self) -> str:
        """The weights that it computes with, as the number of parts that they are in and a digest. Collective.

        Computed once, so the first call has to come before the weights change. LoRA matrices that are multiplied by 0,
        as those of an adapter before training, are left out.
        """
        if self._digest is None:
            is_cut = is_sharded(self._policy)
            digest_of_rank = weights_digest((plain_name(name), weight) for name, weight in self._weights())
            parts = dist.all_gather_objects(digest_of_rank) if is_cut else [digest_of_rank]
            whole = parts[0] if len(parts) == 1 else blake2b(repr(parts).encode(), digest_size=8).hexdigest()
            self._digest = f"{len(parts)}:{whole}"
        return self._digest

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the reference's weights on this rank."""
        if self.module is not None:
            yield from self.module.named_parameters()
            return
        if self._shards is not None:
            yield from self._shards.parts()
            return
        for name, weight in self._policy.named_parameters():
            if not weight.requires_grad:
                yield name, shard_values(weight)
        idle = {name for name, weight in self._parameters.items() if "lora_" in name and not bool(weight.any())}
        for name, weight in self._parameters.items():
            if name.replace("_A.", "_B.") not in idle:
                yield name, weight

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Inside, the yielded module computes as the reference; nothing may be trained."""
        if self.module is not None:
            yield self.module
        elif self._shards is not None:
            with self._shards.in_place():
                yield self._policy
        elif self._parameters:
            with self._parameters_in_place():
                yield self._policy
        else:
            with _requires_grad_restored(self._policy), self._policy.disable_adapter():  # pyright: ignore[reportCallIssue]
                yield self._policy

    @torch.no_grad()
    def sync(self, policy: nn.Module, mixup: float) -> None:
        """reference <- mixup * policy + (1 - mixup) * reference for all parameters (arXiv:2404.09656).

        For adapters these are the trained parameters.
        """
        current = dict(policy.named_parameters())
        if self.module is not None:
            # The copy may be wrapped, which changes names but not their order.
            current = dict(zip(self._kept_parameters(), current.values(), strict=True))
        for name, reference in self._kept_parameters().items():
            reference.lerp_(current[name].to(reference), mixup)

    def state_dict(self) -> dict[str, Any]:
        """The reference's own weights; empty where the adapter is disabled instead."""
        return {name: parameter.detach().cpu().clone() for name, parameter in self._kept_parameters().items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the weights of `state_dict`."""
        for name, parameter in self._kept_parameters().items():
            parameter.copy_(state[name])

    def _kept_parameters(self) -> dict[str, nn.Parameter]:
        return self._parameters if self.module is None else dict(self.module.named_parameters())

    @contextmanager
    def _parameters_in_place(self) -> Iterator[None]:
        """Inside, the policy's modules have the copies, each on the original's device and in its dtype."""
        copies: dict[int, nn.Parameter] = {}
        for name, parameter in self._policy.named_parameters():
            if name in self._parameters:
                copies[id(parameter)] = self._parameters[name]
                copies[id(parameter)].data = self._parameters[name].data.to(parameter)
        with parameters_replaced(self._policy.modules(), copies):
            yield


def check_sharded_policy(policy: nn.Module, reference: Reference | None) -> None:
    """UnavailableError for references that do not work with sharded parameters."""
    name = f"{type(policy).__name__.removeprefix('FSDP')} under DeepSpeed ZeRO-3 or FSDP"
    if reference is not None and reference.keeps_parameters:
        raise UnavailableError(
            f"{name}: a reference that is this adapter as it was given cannot be kept; begin with a new adapter, set "
            "beta=0.0, or use ZeRO stage 1 or 2"
        )


def _can_be_disabled(policy: Any) -> bool:
    """True if the policy without its new adapter is the user's model, now and after training."""
    names = active_adapters(policy)
    if not all(leaves_base_unchanged(policy.peft_config[name]) for name in names):
        return False
    # Some adapters train biases of the base model, which stay active when the adapter is disabled.
    return all(
        any(part in names for part in name.split("."))
        for name, parameter in policy.named_parameters()
        if parameter.requires_grad
    )


@contextmanager
def _requires_grad_restored(policy: Any) -> Iterator[None]:
    """Restores `requires_grad` of all parameters afterwards; disabling and enabling adapters changes it."""
    trainable = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in policy.named_parameters():
            parameter.requires_grad_(trainable[name])
