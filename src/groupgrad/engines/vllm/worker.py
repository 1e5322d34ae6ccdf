"""What groupgrad adds to vLLM's workers: they take weights in buckets and say what arrived.

vLLM mixes `WeightReceiver` into its worker class (`--worker-extension-cls`), and `collective_rpc` calls its methods in
every worker. vLLM's own weight transfer (`--weight-transfer-config`) has transports between GPUs only, and nothing in
it says that what arrived is what was sent.
"""

from __future__ import annotations

import logging
import re
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.engines.vllm.weight_group import WeightGroup, describe, digest, open_store, unpack_from
from groupgrad.engines.vllm.wire import TensorSpec, notes_from_lists, read_shared, unpack

EXTENSION = "groupgrad.engines.vllm.worker.WeightReceiver"
"""The value of vLLM's `worker_extension_cls`."""

REFUSED = "vLLM's worker"
"""How the message begins when what arrived is not what was sent."""


OTHER_GROUP = "this worker is in the process group"
"""How the message begins when weights are to come over a group that the worker has left, or never met."""


@dataclass(slots=True)
class _Push:
    """A push under way."""

    notes: list[TensorSpec]
    num_tensors: int = 0
    """Tensors that have come."""
    ties: list[_Tie] = field(default_factory=list)
    checksum: int = 0
    loaded: set[str] = field(default_factory=set)
    """vLLM's names of the parameters that have been written."""
    named: bool = True
    """False if the model does not say what it loads."""


@dataclass(slots=True, frozen=True)
class _Tie:
    """A layer whose weight is another's, as an output head's may be the embedding's."""

    name: str
    """Of the weight."""
    layer: Any
    owner: Any

    def restore(self) -> None:
        """Reloading takes layers one by one and knows of no ties: let the layer have its owner's weight again, and make
        of it what it makes of its weights."""
        self.layer.weight = self.owner.weight
        method: Any = getattr(self.layer, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(self.layer)


def _ties(model: Any) -> list[_Tie]:
    owners: dict[int, Any] = {}
    ties = []
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None:
            continue
        owner = owners.setdefault(id(weight), layer)
        if owner is not layer:
            ties.append(_Tie(f"{name}.weight".replace(".base_layer.", "."), layer, owner))
    return ties


def _known_names(model: Any, tensors: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Tensors by the names that vLLM's model loads.

    transformers 5.19 has dropped a level of CLIP's and SigLIP's names ("vision_model") that vLLM 0.32 still has.
    """
    tower = getattr(model, "vision_tower", None)
    if tower is None or not hasattr(tower, "vision_model"):
        return tensors
    return [
        (re.sub(r"(^|\.)vision_tower\.(?!vision_model\.)", r"\1vision_tower.vision_model.", n), t) for n, t in tensors
    ]


class WeightReceiver:
    """Methods of a vLLM worker. All return plain values, or raise, which fails the call in vLLM's front."""

    def groupgrad_begin(self, notes: list[list[Any]]) -> None:
        """Make ready for the tensors announced. A push that was under way is given up."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "_groupgrad_push", None) is not None:
            self._groupgrad_finish()
        ties = _ties(self._groupgrad_model())
        with self._groupgrad_config():
            initialize_layerwise_reload(self._groupgrad_model())
        self._groupgrad_push: _Push | None = _Push(notes_from_lists(notes), ties=ties)

    def groupgrad_reads(self, name: str) -> bool:
        """True if this worker sees the shared memory of that name."""
        try:
            read_shared(name).close()
        except OSError:
            return False
        return True

    def groupgrad_shared(self, name: str, first: int, count: int) -> None:
        """Load one bucket out of shared memory."""
        self.groupgrad_bucket(read_shared(name), first, count)

    def groupgrad_bucket(self, data: Any, first: int, count: int) -> None:
        """Load one bucket; buckets come in order."""
        push = self._groupgrad_next(first)
        push.checksum = zlib.crc32(data, push.checksum)
        self._groupgrad_load(push, unpack(push.notes[first : first + count], data))

    def groupgrad_device(self) -> dict[str, Any]:
        """Where this worker's weights lie, and what it could receive others by."""
        device: torch.device = self.device  # pyright: ignore[reportAttributeAccessIssue]
        return {"rank": int(self.rank), **describe(device)}  # pyright: ignore[reportAttributeAccessIssue]

    def groupgrad_open(self, port: int, timeout_s: float) -> None:
        """The first worker opens the port at which the group of a trainer and all workers meets; others have nothing
        to do. A group that was there before is left."""
        self.groupgrad_leave()
        if self.rank == 0:  # pyright: ignore[reportAttributeAccessIssue]
            self._groupgrad_store = open_store("0.0.0.0", port, serves=True, timeout_s=timeout_s)

    def groupgrad_join(self, name: str, backend: Any, host: str, port: int, size: int, timeout_s: float) -> None:
        """Meet the trainer and the other workers; `host` is this server's, as the trainer knows it."""
        rank: int = self.rank  # pyright: ignore[reportAttributeAccessIssue]
        store = self._groupgrad_store if rank == 0 else open_store(host, port, serves=False, timeout_s=timeout_s)
        device: torch.device = self.device  # pyright: ignore[reportAttributeAccessIssue]
        where = device if backend == "nccl" else None
        group = WeightGroup(backend, store, rank + 1, size, timeout_s=timeout_s, device=where)
        self._groupgrad_group: tuple[str, WeightGroup] | None = (name, group)

    def groupgrad_received(self, name: str, num_bytes: int, first: int, count: int) -> None:
        """Load one bucket that the trainer sends over the group of that name."""
        known, group = getattr(self, "_groupgrad_group", None) or (None, None)
        if group is None or known != name:
            raise RuntimeError(f"{OTHER_GROUP} {known}, and weights are to come over {name}")
        # What is sent is taken in any case: otherwise the trainer would wait in vain.
        data = group.receive(num_bytes)
        push = self._groupgrad_next(first)
        push.checksum = digest(data, push.checksum)
        self._groupgrad_load(push, unpack_from(push.notes[first : first + count], data))

    def groupgrad_leave(self, name: str | None = None) -> None:
        """Leave the group of that name, if this worker is in it; without a name whichever there is."""
        known, group = getattr(self, "_groupgrad_group", None) or (None, None)
        if name is not None and known != name:
            return
        self._groupgrad_group = self._groupgrad_store = None
        if group is not None:
            group.close()

    def _groupgrad_next(self, first: int) -> _Push:
        """The push under way, whose next tensor is `first`."""
        push = getattr(self, "_groupgrad_push", None)
        if push is None:
            raise RuntimeError("a bucket of weights came before a push was begun")
        if first != push.num_tensors:
            raise RuntimeError(f"a bucket begins with tensor {first}, but {push.num_tensors} is the next")
        return push

    def groupgrad_tensors(self, tensors: list[tuple[str, Any]]) -> None:
        """Load tensors as they are; within one process, where none of them travels."""
        push = getattr(self, "_groupgrad_push", None)
        assert push is not None
        self._groupgrad_load(push, tensors)

    def groupgrad_commit(self, num_tensors: int, checksum: int | None = None) -> None:
        """End the push. RuntimeError, with `REFUSED` in its words, if what came is not `num_tensors` tensors of that
        checksum (None: nothing was sent as bytes), or if a parameter of the model was not among them."""
        push = getattr(self, "_groupgrad_push", None)
        if push is None:
            raise RuntimeError("a push was ended that had not begun")
        model: Any = self._groupgrad_model()
        # Parameters that vLLM makes out of others after loading are not there while layers are being loaded.
        # Where adapters can be added, the layers that take them lie one level deeper than the names that are loaded.
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} if push.named else set()
        names -= {tie.name for tie in push.ties}
        self._groupgrad_finish()
        problem = None
        if push.num_tensors != num_tensors:
            problem = f"{num_tensors} tensors were announced, {push.num_tensors} came"
        elif checksum is not None and push.checksum != checksum:
            problem = f"its bytes have the checksum {push.checksum:08x}, those sent {checksum:08x}"
        elif missing := sorted(names - push.loaded):
            problem = f"nothing was sent for {', '.join(missing[:20])}"
        if problem is not None:
            raise RuntimeError(f"{REFUSED} {self.rank} refuses the push: {problem}")  # pyright: ignore

    def _groupgrad_load(self, push: _Push, tensors: list[tuple[str, Any]]) -> None:
        model: Any = self._groupgrad_model()
        with self._groupgrad_config():
            loaded = model.load_weights(iter(_known_names(model, tensors)))
        push.num_tensors += len(tensors)
        if loaded is None:
            push.named = False
        else:
            push.loaded |= set(loaded)

    def _groupgrad_finish(self) -> None:
        """Let every layer process what it was given: packing for the CPU's kernels, quantization, attention scales."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner: Any = self.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        ties = self._groupgrad_push.ties if self._groupgrad_push is not None else []
        self._groupgrad_push = None
        # vLLM warns of every layer that has nothing to load, such as rotary embeddings; we count for ourselves.
        log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with self._groupgrad_config():
                finalize_layerwise_reload(self._groupgrad_model(), runner.model_config)
        finally:
            log.setLevel(level)
        for tie in ties:
            tie.restore()
        if hasattr(runner, "reset_lora_state"):
            runner.reset_lora_state()

    def _groupgrad_model(self) -> Any:
        return self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]

    def _groupgrad_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)  # pyright: ignore[reportAttributeAccessIssue]
