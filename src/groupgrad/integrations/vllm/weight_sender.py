"""Weights on their way to vLLM: a pass over the policy's, a push within the process, and vLLM's class for trainers.

`ServerClient.push_weights` is a push to a server. Both pushes have the phases of vLLM's weight transfer: start, an
update for each bucket, one update that verifies them all, finish.
"""

from __future__ import annotations

import uuid
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


class InProcess:
    """A `vllm.LLM` in this process, which gets weights of this dtype (None: their present one)."""

    def __init__(self, llm: Any, dtype: torch.dtype | None = None):
        self._llm, self._dtype = llm, dtype

    def push_weights(self, source: Any, weight_version: str | None = None) -> None:
        """Makes a whole push of a `WeightSource`; vLLM names this version in its samples, if one is given.

        Tensors go by reference, and those of another dtype than vLLM's as copies of one bucket at a time. The worker's
        error if a parameter did not come. An exception ends the push.
        """
        with whole_pass(source) as weights:
            specs = specs_of(source.metadata(), self._dtype)
            tensors = as_announced(specs, weights)
            self._llm.start_weight_update()
            try:
                for first, end in bucket_ranges(specs, BUCKET_BYTES):
                    bucket = [(spec.name, next(tensors).to(torch_dtype(spec.dtype))) for spec in specs[first:end]]
                    self._update({"tensors": bucket})
                for _ in tensors:  # none is left
                    pass
                self._update({"checksum": None})
                self._llm.finish_weight_update(weight_version)
            except BaseException:
                with suppress(Exception):  # vLLM ends an update that is not finished at an error alone
                    self._update({})
                raise

    def _update(self, update_info: dict[str, Any]) -> None:
        """Calls `WeightReceiver.receive_weights` in the workers."""
        self._llm.update_weights({"update_info": update_info})


class WeightSender:
    """vLLM's `TrainerWeightTransferEngine` for other trainers, without its base class (`transfer_engine` adds it).

    `source` is vLLM's `WeightSource`; its names are those of a checkpoint. `client` is a `ServerClient` or `InProcess`.
    groupgrad's trainer calls the client itself: it needs no vLLM beside it to push to a server.
    """

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True):
        self.client, self.source, self.is_sender = client, source, is_sender

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        """A sender. Called on every rank of the trainer. ValueError without a source, and for another client."""
        if source is None:
            raise ValueError("groupgrad's backend sends all weights of a model; pass source=ModuleSource(model)")
        if not hasattr(client, "push_weights"):
            raise ValueError(
                f"groupgrad's backend verifies each push, which {type(client).__name__} does not; pass "
                "client=ServerClient(address), or client=InProcess(llm) for a vllm.LLM of this process"
            )
        return cls(client=client, source=source, is_sender=init_info.is_sender)

    def send_weights(self, weight_version: str | None = None) -> None:
        """Pushes all weights, verified, as this version (None: a new one). Collective of the trainer's ranks.

        ServerRefused, or the worker's error, if what arrived is not what was sent or is not all weights; ServerTimeout
        if an answer does not come in time.
        """
        if self.is_sender:
            self.client.push_weights(self.source, weight_version or uuid.uuid4().hex)
        else:
            with whole_pass(self.source):
                pass

    def shutdown(self) -> None:
        """Leaves the server; it keeps its weights."""
        if hasattr(self.client, "close"):
            self.client.close()
