"""Worker side of groupgrad's backend for vLLM's weight transfer: loads weights and verifies what arrived.

vLLM calls these methods in every worker: `init_transfer_engine` when a trainer comes, `shutdown` when the worker ends,
and for each push `start_weight_update`, `update_weights` once for each bucket and once for the verification, and
`finish_weight_update`. An exception in `update_weights` ends the push. `transfer_plugin` makes this vLLM's class.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.integrations.vllm.weight_transport import RENDEZVOUS_S, Backend, WeightGroup, describe_device, open_store
from groupgrad.integrations.vllm.wire import (
    TensorSpec,
    padded_bytes,
    read_shared,
    running_checksum,
    specs_from_json,
    unpack,
)


@dataclass(slots=True)
class Rendezvous:
    """Says how a push sends its buckets: in shared memory, or over a process group whose ranks meet at a port."""

    shared: str | None = None
    """A file in the trainer's shared memory, which the worker has to be able to read."""
    host: str = ""
    port: int = 0
    """The server's port at which the ranks of the group meet; its first worker opens it."""
    backend: Backend | None = None
    """Backend of the process group of the trainer and all workers; None asks the worker to open the port."""
    size: int = 0
    """Ranks of the group: the trainer and all workers."""
    timeout_s: float = 0.0
    peer: dict[str, Any] = field(default_factory=dict)
    """`describe_device` of the trainer."""


@dataclass(slots=True)
class _Push:
    """State of a push under way."""

    ties: dict[str, tuple[Any, Any]]
    expected: set[str]
    """Checkpoint names of the parameters that have to come, before quantization adds scales of its own."""
    checksum: int = 0
    loaded: set[str] | None = field(default_factory=set)
    """vLLM's names of the parameters that were written; None if the model does not return the names that it loads."""


class WeightReceiver:
    """vLLM's `WeightTransferEngine`, without its base class."""

    init_info_cls, update_info_cls = Rendezvous, dict[str, Any]
    supports_draft_weight_update = False

    # Attributes that the base class sets.
    model: Any
    model_config: Any
    parallel_config: Any
    device: torch.device

    _push: _Push | None = None
    _group: WeightGroup | None = None
    _store: Any = None
    """The store that the first worker opens for the next group."""

    def init_transfer_engine(self, init_info: Rendezvous) -> None:
        """Prepares for buckets over the given transport; does nothing if none is given.

        RuntimeError if the shared memory is another machine's; GroupBroken if no port or no group can be had.
        """
        if init_info.shared is not None:
            try:
                read_shared(init_info.shared).close()
            except OSError as error:
                raise RuntimeError(f"this worker does not see the trainer's shared memory: {error}") from None
        elif init_info.backend is not None:
            self._join(init_info, init_info.backend)
        elif init_info.port:
            self.shutdown()
            if self._rank == 0:
                host, port = init_info.host, init_info.port
                self._store = open_store(host, port, serves=True, timeout_s=init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Begins a push. One that was under way is abandoned."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._push is not None:
            self.finish_weight_update()
        ties = _find_ties(self.model)
        initialize_layerwise_reload(self.model)  # parameters are those of a checkpoint from here on
        expected = {_checkpoint_name(name) for name, _ in self.model.named_parameters()} - ties.keys()
        self._push = _Push(ties, expected)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes a part of the push; vLLM calls nothing else before this returns."""
        self.receive_weights(update_info)
        if self.device.type != "cpu":  # a build of torch for CPUs alone has nothing to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a part of the push, or verifies all of it.

        `update_info` has one of:
        - `tensors` of this process, by name;
        - `specs` of a bucket (`specs_to_json`), and where its bytes are: `shared`, a file in shared memory;
          without it they come over the process group;
        - `checksum`, the `running_checksum` of all buckets, None without any. RuntimeError if the push is not whole;
        - nothing: RuntimeError, which ends the push. vLLM has no other end of an unfinished one.
        """
        push = self._push
        assert push is not None, "vLLM starts a push before it updates weights"
        if "checksum" in update_info:
            self._verify(push, update_info["checksum"])
        elif "tensors" in update_info:
            self.load(update_info["tensors"])
        elif "specs" in update_info:
            specs = specs_from_json(update_info["specs"])
            data = self._receive(specs, update_info)
            push.checksum = running_checksum(data, push.checksum)
            self.load(unpack(specs, data))
        else:
            raise RuntimeError("this push is abandoned")

    def finish_weight_update(self) -> None:
        """Processes the loaded weights of every layer: packing for CPU kernels, quantization, attention scales."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        push, self._push = self._push, None
        # vLLM warns of every layer that has nothing to load, such as rotary embeddings; `_verify` has checked them.
        log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        finally:
            log.setLevel(level)
        # vLLM's reload handles layers one by one: share tied weights again, and process them as after loading.
        for layer, owner in push.ties.values() if push is not None else ():
            layer.weight = owner.weight
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Leaves the process group."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            group.close()

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Loads tensors by their names in a checkpoint."""
        push = self._push
        assert push is not None
        loaded = self.model.load_weights(iter(_rename_vision_tower(self.model, tensors)))
        push.loaded = None if loaded is None or push.loaded is None else push.loaded | set(loaded)

    @property
    def _rank(self) -> int:
        """Index of this worker among all workers of the server, as vLLM's own backends count them."""
        config = self.parallel_config
        return config.data_parallel_index * config.world_size + config.rank

    def _join(self, rendezvous: Rendezvous, backend: Backend) -> None:
        """Joins the trainer and the other workers. RuntimeError if NCCL cannot connect this worker with the trainer."""
        store, self._store = self._store, None  # dropped, and its port closed, if no trainer joins
        is_nccl, here, peer = backend == "nccl", describe_device(self.device), rendezvous.peer
        if is_nccl and (here["device"] in (None, peer["device"]) or here["nccl"] != peer["nccl"]):
            raise RuntimeError(f"NCCL connects different GPUs of one release of it, not {here} and {peer}")
        rank, timeout_s = self._rank, rendezvous.timeout_s
        if rank != 0:
            store = open_store(rendezvous.host, rendezvous.port, serves=False, timeout_s=min(timeout_s, RENDEZVOUS_S))
        device = self.device if is_nccl else None
        self._group = WeightGroup(backend, store, rank + 1, rendezvous.size, timeout_s=timeout_s, device=device)

    def _receive(self, specs: list[TensorSpec], update_info: dict[str, Any]) -> torch.Tensor:
        """(bytes,) uint8 of a bucket."""
        if "shared" in update_info:
            return torch.frombuffer(read_shared(update_info["shared"]), dtype=torch.uint8)
        assert self._group is not None, "a bucket comes over a group that this worker has joined"
        return self._group.receive(padded_bytes(specs))

    def _verify(self, push: _Push, checksum: int | None) -> None:
        """RuntimeError unless the bytes have this checksum and every parameter of the model was among them."""
        problem = None
        if checksum is not None and push.checksum != checksum:
            problem = f"its bytes have the checksum {push.checksum:08x}, those sent {checksum:08x}"
        elif missing := sorted(push.expected - push.loaded if push.loaded is not None else ()):
            problem = f"nothing was sent for {', '.join(missing[:20])}"
        if problem is not None:
            raise RuntimeError(f"vLLM's worker {self._rank} refuses the push: {problem}")


def _find_ties(model: Any) -> dict[str, tuple[Any, Any]]:
    """Layers that share their weight with an earlier one, as an output head may with the embedding.

    By the weight's checkpoint name: the layer, and the one that owns the weight.
    """
    owners: dict[int, Any] = {}
    ties = {}
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is not None and owners.setdefault(id(weight), layer) is not layer:
            ties[_checkpoint_name(f"{name}.weight")] = layer, owners[id(weight)]
    return ties


def _checkpoint_name(name: str) -> str:
    """A parameter's name without the level that vLLM adds to layers which take adapters."""
    return name.replace(".base_layer.", ".")


def _rename_vision_tower(model: Any, tensors: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Tensors by the names that vLLM's model loads.

    transformers 5.19 dropped a level ("vision_model") from the names of CLIP and SigLIP that vLLM 0.32 still has.
    """
    if not hasattr(getattr(model, "vision_tower", None), "vision_model"):
        return tensors
    level = re.compile(r"(^|\.)vision_tower\.(?!vision_model\.)")
    return [(level.sub(r"\1vision_tower.vision_model.", name), tensor) for name, tensor in tensors]
