"""Trainer side of groupgrad's backend for vLLM's weight transfer: sends weights in phases, which workers verify.

A `WeightSender` makes each push, for groupgrad's trainer (`policy_sender`) and for other trainers. `transfer_engine`
makes it the class that vLLM's `WeightTransferTrainerFactory` gives.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from groupgrad.integrations.sharding.sharding import is_sharded
from groupgrad.integrations.vllm.wire import (
    BUCKET_BYTES,
    TensorSpec,
    bucket_ranges,
    pack,
    shared_file,
    specs_of,
    specs_to_json,
    torch_dtype,
)
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


class InProcess:
    """vLLM's `VLLMWeightSyncClient` for a `vllm.LLM` in this process, which gets weights of this dtype."""

    def __init__(self, llm: Any, dtype: torch.dtype | None = None):
        self._llm, self.dtype = llm, dtype

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Asks the workers to meet the trainer."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begins a push."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Asks the workers to load a part of the push."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the push."""
        self._llm.finish_weight_update(weight_version)


class WeightSender:
    """vLLM's `TrainerWeightTransferEngine`, without its base class.

    `source` is vLLM's `WeightSource`; its names are those of a checkpoint. `client` is a `ServerClient` of a server
    that `groupgrad vllm-serve` started, which has the phases of such a server (`send`), or any `VLLMWeightSyncClient`
    of vLLM's whose workers are in this process (`by_reference`) or on this machine.
    """

    def __init__(self, *, client: Any, source: Any, is_sender: bool = True, by_reference: bool = False):
        self.client, self.source = client, source
        self.is_sender, self._by_reference = is_sender, by_reference

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        """A sender that has met the workers. Called on every rank of the trainer.

        ValueError without a source, ConnectionError or the worker's error if they cannot be reached this way.
        """
        if source is None:
            raise ValueError("groupgrad's backend sends all weights of a model; pass source=ModuleSource(model)")
        if init_info.is_sender and _is_server(client):
            client.look()
        elif init_info.is_sender and init_info.by_reference:
            client.init_weight_transfer_engine({})
        elif init_info.is_sender:
            with shared_file(b"seen") as name:
                client.init_weight_transfer_engine({"shared": name})
        return cls(client=client, source=source, is_sender=init_info.is_sender, by_reference=init_info.by_reference)

    def send_weights(self, weight_version: str | None = None, *, keeps_rows: bool = False) -> None:
        """Pushes all weights, verified, as this version. Collective of the trainer's ranks if the source is.

        None: a new version on a `ServerClient`'s server, elsewhere none is set. With `keeps_rows`, for such a server,
        rows under way go on with these weights; otherwise the push waits for them. ServerRefused, or the worker's
        error, if what arrived is not what was sent or is not all weights; ServerTimeout if an answer does not come in
        time.
        """
        weights = iter(self.source)
        try:
            metadata = self.source.metadata()
            if self.is_sender:
                with torch.no_grad():
                    self._send(metadata, _in_order(metadata, weights), weight_version, keeps_rows)
        finally:
            if getattr(self.source, "is_collective", True):
                for _ in weights:
                    pass

    def _send(
        self, metadata: Sequence[Any], weights: NamedTensors, weight_version: str | None, keeps_rows: bool
    ) -> None:
        shapes = [(meta.name, meta) for meta in metadata]
        if _is_server(self.client):
            device = getattr(self.source, "device", None) or _own_device()
            self.client.send(shapes, weights, weight_version or uuid.uuid4().hex, device=device, keeps_rows=keeps_rows)
        else:
            specs = specs_of(shapes, getattr(self.client, "dtype", None))
            self._send_in_phases(specs, weights, weight_version)

    def _send_in_phases(self, specs: list[TensorSpec], weights: NamedTensors, weight_version: str | None) -> None:
        """Makes a whole push: start, a bucket for each update, one update that verifies them all, finish.

        Workers read buckets in shared memory, or by reference the tensors themselves, of which those of another dtype
        than announced are copied. An exception ends the push.
        """
        self.client.start_weight_update()
        try:
            checksum = None
            if self._by_reference:
                for first, end in bucket_ranges(specs, BUCKET_BYTES):
                    announced = zip(specs[first:end], islice(weights, end - first), strict=True)
                    tensors = [(name, tensor.to(torch_dtype(spec.dtype))) for spec, (name, tensor) in announced]
                    self.client.update_weights({"tensors": tensors})
            else:
                for bucket in pack(specs, (tensor for _, tensor in weights)):
                    own = specs_to_json(specs[bucket.first : bucket.first + bucket.count])
                    with shared_file(bucket.data.numpy().data) as name:
                        self.client.update_weights({"specs": own, "shared": name})
                    checksum = bucket.checksum
            self.client.update_weights({"checksum": checksum})
            self.client.finish_weight_update(weight_version)
        except BaseException:
            with suppress(Exception):  # vLLM ends an update that is not finished at an error alone
                self.client.update_weights({})
            raise

    def shutdown(self) -> None:
        """Leaves the server; it keeps its weights."""
        if _is_server(self.client):
            self.client.close()


def read_along(source: PolicyWeights) -> None:
    """Reads weights that another rank sends, or that cannot be sent. Collective if the policy is sharded."""
    WeightSender(client=None, source=source, is_sender=False).send_weights()


def _own_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _is_server(client: Any) -> bool:
    return hasattr(client, "send")


def _in_order(metadata: Sequence[Any], weights: NamedTensors) -> NamedTensors:
    """The weights; RuntimeError for one under another name than was announced."""
    names = iter([meta.name for meta in metadata])
    for name, tensor in weights:
        expected = next(names, "no more weights")
        if name != expected:
            raise RuntimeError(f"the source of weights gave {name}, and its metadata announced {expected}")
        yield name, tensor
