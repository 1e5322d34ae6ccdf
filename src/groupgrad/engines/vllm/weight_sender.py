"""Trainer side of groupgrad's backend for vLLM's weight transfer: sends weights in phases and has them verified.

`transfer_engine` makes `WeightSender` the class that vLLM's `WeightTransferTrainerFactory` gives to any trainer. The
colocate engine makes its pushes by `send_in_phases`; those to groupgrad's servers are made by `ServerClient.send`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from groupgrad.engines.vllm.client import ServerClient
from groupgrad.engines.vllm.wire import (
    BUCKET_BYTES,
    TensorSpec,
    bucket_ranges,
    pack,
    shared_file,
    specs_of,
    specs_to_json,
    torch_dtype,
)


class InProcess:
    """vLLM's `VLLMWeightSyncClient` for a `vllm.LLM` in this process."""

    def __init__(self, llm: Any):
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers meet the trainer."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin a push."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the workers take a part of it."""
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End it."""
        self._llm.finish_weight_update(weight_version)


class WeightSender:
    """vLLM's `TrainerWeightTransferEngine`, without its base class.

    `source` is vLLM's `WeightSource`; its names are those of a checkpoint. `client` is a `ServerClient` of a server
    that `groupgrad vllm-serve` started, or any `VLLMWeightSyncClient` of vLLM's whose workers are in this process
    (`by_reference`) or on this machine.
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
        if init_info.is_sender and isinstance(client, ServerClient):
            client.look()
        elif init_info.is_sender:
            with shared_file(b"seen") as name:
                client.init_weight_transfer_engine({} if init_info.by_reference else {"shared": name})
        return cls(client=client, source=source, is_sender=init_info.is_sender, by_reference=init_info.by_reference)

    def send_weights(self, weight_version: str | None = None) -> None:
        """Push all weights, verified, as this version. Collective of the trainer's ranks if the source is.

        None: a new version on a `ServerClient`'s server, elsewhere none is set. ServerRefused, or the worker's error,
        if what arrived is not what was sent or is not all weights; ServerTimeout if an answer does not come in time.
        """
        metadata = [
            (meta.name, torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta"))
            for meta in self.source.metadata()
        ]
        weights = iter(self.source)
        try:
            if self.is_sender:
                with torch.no_grad():
                    self._send(metadata, _in_order(metadata, weights), weight_version)
        finally:
            for _ in weights:  # reading them may be a collective
                pass

    def _send(self, metadata: Any, weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None) -> None:
        if isinstance(self.client, ServerClient):
            index = torch.cuda.current_device() if torch.cuda.is_available() else None
            device = torch.device("cpu" if index is None else f"cuda:{index}")
            self.client.send(metadata, weights, weight_version or uuid.uuid4().hex, device=device)
        else:
            specs = specs_of(metadata)
            send_in_phases(self.client, specs, weights, by_reference=self._by_reference, weight_version=weight_version)

    def shutdown(self) -> None:
        """Leave the server; it keeps its weights."""
        if isinstance(self.client, ServerClient):
            self.client.close()


def send_in_phases(
    client: Any,
    specs: Sequence[TensorSpec],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    by_reference: bool = False,
    weight_version: str | None = None,
) -> None:
    """Make a whole push: start, a bucket for each update, one update that verifies them all, finish.

    Workers read buckets in shared memory, or with `by_reference` the tensors themselves, of which those of another
    dtype than announced are copied. An exception ends the push.
    """
    weights = iter(weights)
    client.start_weight_update()
    try:
        checksum = None
        if by_reference:
            for first, end in bucket_ranges(list(specs), BUCKET_BYTES):
                announced = zip(specs[first:end], islice(weights, end - first), strict=True)
                tensors = [(name, tensor.to(torch_dtype(spec.dtype))) for spec, (name, tensor) in announced]
                client.update_weights({"tensors": tensors})
        else:
            for bucket in pack(list(specs), (tensor for _, tensor in weights)):
                own = specs_to_json(specs[bucket.first : bucket.first + bucket.count])
                with shared_file(bucket.data.numpy().data) as name:
                    client.update_weights({"specs": own, "shared": name})
                checksum = bucket.checksum
        client.update_weights({"checksum": checksum})
        client.finish_weight_update(weight_version)
    except BaseException:
        with suppress(Exception):  # vLLM ends an update that is not finished at an error alone
            client.update_weights({})
        raise


def _in_order(
    metadata: Sequence[tuple[str, torch.Tensor]], weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights; RuntimeError for one under another name than was announced."""
    names = iter([name for name, _ in metadata])
    for name, tensor in weights:
        expected = next(names, "no more weights")
        if name != expected:
            raise RuntimeError(f"the source of weights gave {name}, and its metadata announced {expected}")
        yield name, tensor
