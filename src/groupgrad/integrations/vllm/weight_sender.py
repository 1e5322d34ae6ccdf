"""Weights on their way to vLLM: a pass over the policy's, and a push within the process.

`ServerClient.push_weights` is a push to a server. Both pushes have the phases of vLLM's weight transfer: start, an
update for each bucket, one update that verifies them all, finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from groupgrad.integrations.vllm.wire import BUCKET_BYTES, as_announced, bucket_ranges, specs_of, torch_dtype
from groupgrad.models.shards import is_sharded
from groupgrad.models.weights import checkpoint_weights

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(slots=True, frozen=True)
class PolicyWeights:
    """vLLM's `WeightSource` over the policy that trains; adapters are merged into copies, or without `merge` left out.

    Iterating is a collective if the policy is sharded.
    """

    model: nn.Module
    merge: bool = True

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def is_collective(self) -> bool:
        """True if all ranks have to read the weights to the end, also when one fails."""
        return is_sharded(self.model)

    def metadata(self) -> list[Any]:
        """`name`, `dtype` and `shape` of each tensor, in order; nothing is gathered."""
        shapes = checkpoint_weights(self.model, merge=self.merge, shapes_only=True)
        return [SimpleNamespace(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in shapes]

    def __iter__(self) -> NamedTensors:
        return checkpoint_weights(self.model, merge=self.merge)


@contextmanager
def whole_pass(source: Any) -> Iterator[NamedTensors]:
    """A pass over a `WeightSource`, which is read to the end even if its user reads a part, or none, or fails.

    Each tensor of a sharded model is gathered by all ranks, so a rank that stopped would leave the others waiting.
    Sources of vLLM's count as sharded.
    """
    weights = iter(source)
    with torch.no_grad():
        try:
            yield weights
        finally:
            if getattr(source, "is_collective", True):
                for _ in weights:
                    pass


def push_in_process(
    llm: Any, source: Any, weight_version: str | None = None, *, dtype: torch.dtype | None = None
) -> None:
    """Makes a whole push of a `WeightSource` to a `vllm.LLM` in this process, which names this version in its samples.

    Tensors go by reference, and those of another dtype than `dtype` (None: their present one) as copies of one bucket
    at a time. The worker's error if a parameter did not come. An exception ends the push.
    """

    def update(update_info: dict[str, Any]) -> None:
        """Calls `WeightReceiver.receive_weights` in the workers."""
        llm.update_weights({"update_info": update_info})

    with whole_pass(source) as weights:
        specs = specs_of(source.metadata(), dtype)
        tensors = as_announced(specs, weights)
        llm.start_weight_update()
        try:
            for first, end in bucket_ranges(specs, BUCKET_BYTES):
                bucket = zip(specs[first:end], tensors)
                update({"tensors": [(spec.name, tensor.to(torch_dtype(spec.dtype))) for spec, tensor in bucket]})
            for _ in tensors:  # none is left
                pass
            update({"checksum": None})
            llm.finish_weight_update(weight_version)
        except BaseException:
            with suppress(Exception):  # vLLM ends an update that is not finished at an error alone
                update({})
            raise
