"""Counts the collectives of a DeepSpeed ZeRO-3 pass, and restores DeepSpeed's state after a failed pass.

DeepSpeed has no way back from a pass that has failed: parameters are in flight, modules count gradients that do not
come, and its record of the order in which modules run ends in the middle. The state that a pass changes is therefore
recorded before the pass. After a failed pass this state is restored and the gathered parameters are freed, so the rest
of the pass begins as the pass did. DeepSpeed stores gradients separately: `zero_grad` drops the sum of a step.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

from groupgrad.integrations.sharding import zero3
from groupgrad.integrations.sharding.pass_collectives import PassCollectives

_COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_base", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_object"),
        *("all_reduce", "all_reduce_coalesced", "inference_all_reduce", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "barrier"),
    }
)
"""Methods of DeepSpeed's communication backend that all ranks call together."""


class Zero3PassCollectives(PassCollectives):
    """The collectives of the passes of the model that `accelerator` has given to DeepSpeed ZeRO-3."""

    def __init__(self, accelerator: Any):
        super().__init__()
        self._accelerator = accelerator
        self._before: _PassState | None = None

    @property
    def _engine(self) -> Any:
        return zero3.engine(self._accelerator)

    def begin_pass(self) -> None:
        """As `PassCollectives.begin_pass`; notes what the pass may change. Not a collective."""
        super().begin_pass()
        _count_in(self)
        self._before = _PassState(self._engine)

    def begin_rest(self) -> None:
        """As `PassCollectives.begin_rest`; takes the failed pass back. Not a collective.

        Waits for gathers that the failed pass has begun, which the other ranks make in theirs.
        """
        assert self._before is not None
        self._before.restore()
        super().begin_rest()

    def drop_gradients(self) -> None:
        """Drops the gradients of the step's passes so far."""
        self._engine.optimizer.zero_grad()


def can_recover() -> bool:
    """True if the installed DeepSpeed is one whose failed passes can be taken back."""
    try:
        from deepspeed.runtime.base_optimizer import ZeROOptimizer  # pyright: ignore[reportMissingImports]
        from deepspeed.runtime.zero.parameter_offload import (  # pyright: ignore[reportMissingImports]
            DeepSpeedZeRoOffload as Offload,
        )
    except ImportError:
        return False
    return hasattr(ZeROOptimizer, "clear_backward_seen_flag") and hasattr(Offload, "get_param_coordinator")


class _PassState:
    """Snapshot of the state that DeepSpeed's engine changes during a pass, taken when this object is made."""

    def __init__(self, engine: Any):
        from deepspeed.runtime.zero.parameter_offload import (  # pyright: ignore[reportMissingImports]
            FWD_MODULE_STACK,
        )

        self._engine, self._stack, self._depth = engine, FWD_MODULE_STACK, len(FWD_MODULE_STACK)
        optimizer = engine.optimizer
        hooks, buckets = getattr(optimizer, "_backward_hook_state", None), getattr(optimizer, "ipg_buckets", {})
        owners = [optimizer, optimizer.parameter_offload.get_param_coordinator(), hooks, *buckets.values()]
        self._attributes = [_Attributes(owner) for owner in owners if owner is not None]
        self._available = {id(p) for p in engine.module.parameters() if not zero3.is_absent(p)}
        # Weights of another module that a forward pass turned out to read are gathered with the module from then on.
        self._foreign = {part: dict(getattr(part, "_external_params", {})) for part in engine.module.modules()}
        self._read_elsewhere = {id(p) for p in engine.module.parameters() if getattr(p, "is_external_param", False)}

    def restore(self) -> None:
        """Restores it, and frees the parameters that have been gathered since."""
        module, in_flight = self._engine.module, self._engine.module.ds_inflight_param_registry
        for handle in {id(handle): handle for handle in in_flight.values()}.values():
            handle.wait()
        in_flight.data.clear()
        for part in module.modules():
            if "applied_pre_backward_ref_cnt" in vars(part):
                part.applied_pre_backward_ref_cnt = 0  # pyright: ignore[reportArgumentType]
            getattr(part, "ds_recompute_parameters", set()).clear()
            if hasattr(part, "_external_params"):
                part._external_params = self._foreign[part]  # pyright: ignore[reportArgumentType]
        parameters: list[Any] = list(module.parameters())
        for parameter in parameters:
            parameter.grad = None
            parameter.ds_active_sub_modules.clear()
            parameter.is_external_param = id(parameter) in self._read_elsewhere
            if parameter.ds_status.name == "INFLIGHT":  # memory ran out before the gather began
                parameter.ds_status = type(parameter.ds_status).NOT_AVAILABLE
        zero3.release(p for p in parameters if id(p) not in self._available)
        del self._stack[self._depth :]
        for attributes in self._attributes:
            attributes.restore()
        self._engine._running_engine_backward = False


class _Attributes:
    """The attributes of an object; of lists, dicts and sets among them the content too, two levels deep."""

    def __init__(self, owner: Any):
        self._owner = owner
        self._content = _content(vars(owner), levels=3) or []

    def restore(self) -> None:
        """Gives the object its attributes back."""
        _restore(vars(self._owner), self._content)


def _content(value: Any, levels: int) -> list[tuple[Any, Any, Any]] | None:
    """(key, item, its content) of a collection's items; None for other values."""
    if not levels or not isinstance(value, (list, deque, dict, set)):
        return None
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, item, _content(item, levels - 1)) for key, item in items]


def _restore(value: Any, content: list[tuple[Any, Any, Any]]) -> None:
    value.clear()
    for key, item, inner in content:
        if inner is not None:
            _restore(item, inner)
        if isinstance(value, dict):
            value[key] = item
        elif isinstance(value, set):
            value.add(item)
        else:
            value.append(item)


class _CountedBackend:
    """DeepSpeed's communication backend, whose collectives are counted.

    A skipped collective gives zeros, or its earlier result if it carries integers, with which ranks compare plans.
    """

    def __init__(self, backend: Any):
        self.backend = backend
        self.collectives: PassCollectives = PassCollectives()
        self.integers: dict[int, list[torch.Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.backend, name)
        return partial(self._run, method) if name in _COLLECTIVES else method

    def _run(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        is_due, place = self.collectives.is_due(), self.collectives.num_made
        tensors = [t for value in (*args, *kwargs.values()) for t in (value if isinstance(value, list) else [value])]
        integers = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_floating_point()]
        if is_due:
            result = method(*args, **kwargs)
            if integers and not kwargs.get("async_op"):
                self.integers[place] = [tensor.clone() for tensor in integers]
            return result
        for tensor, before in zip(integers, self.integers.get(place, ())):
            tensor.copy_(before)
        for output in (kwargs.get("output_tensor"), *(kwargs.get("tensor_list") or ())):
            if output is not None and output.is_floating_point():
                output.zero_()
        return _Finished() if kwargs.get("async_op") else None


class _Finished:
    """The handle of a collective that is left out."""

    def wait(self, *_args: Any, **_kwargs: Any) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def _count_in(collectives: PassCollectives) -> None:
    """Counts the collectives that DeepSpeed makes from now on in `collectives`."""
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]

    if not isinstance(comm.cdb, _CountedBackend):
        comm.cdb = _CountedBackend(comm.cdb)
    comm.cdb.collectives = collectives
    comm.cdb.integers.clear()
