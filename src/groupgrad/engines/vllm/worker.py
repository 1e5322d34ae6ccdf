"""Extension of vLLM's workers that loads weights in buckets and verifies what arrived.

vLLM mixes `WeightReceiver` into its worker class (`--worker-extension-cls`), and `collective_rpc` calls its methods in
every worker. vLLM's own weight transfer (`--weight-transfer-config`) only has transports between GPUs, and does not
verify what arrived.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.engines.vllm.weight_group import Backend, WeightGroup, describe_device, open_store
from groupgrad.engines.vllm.wire import TensorSpec, read_shared, running_checksum, specs_from_json, unpack

EXTENSION = "groupgrad.engines.vllm.worker.WeightReceiver"
"""Value of vLLM's `worker_extension_cls`."""

REFUSED = "vLLM's worker"
"""Start of the error message when the weights that arrived are not those that were sent."""

OTHER_GROUP = "this worker is in the process group"
"""Start of the error message when weights are to come over a group that the worker has left, or never joined."""


@dataclass(slots=True)
class _Push:
    """State of a push under way."""

    specs: list[TensorSpec]
    ties: dict[str, tuple[Any, Any]]
    num_tensors: int = 0
    """Tensors that have arrived."""
    checksum: int = 0
    loaded: set[str] | None = field(default_factory=set)
    """vLLM's names of the parameters that were written; None if the model does not return the names that it loads."""


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


class WeightReceiver:
    """Methods of a vLLM worker. They return plain values; an exception fails the call in vLLM's front end."""

    # Attributes of vLLM's worker.
    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    _groupgrad_push: _Push | None = None
    _groupgrad_group: tuple[str, WeightGroup] | None = None
    """Name and connection of the process group that this worker is in."""
    _groupgrad_store: Any = None
    """The store that the first worker opens for the next group."""

    def groupgrad_begin(self, specs: list[list[Any]]) -> None:
        """Begin a push of these tensors. A push that was under way is abandoned."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._groupgrad_push is not None:
            self._groupgrad_finish()
        ties = _find_ties(self._groupgrad_model())
        with self._groupgrad_config():
            initialize_layerwise_reload(self._groupgrad_model())
        self._groupgrad_push = _Push(specs_from_json(specs), ties)

    def groupgrad_bucket(self, body: bytes, query: dict[str, str]) -> None:
        """Load the tensors `first` to `first + count` of the push; buckets come in order.

        Their bytes come over the process group `group` (`num_bytes` of them), are in the shared-memory file `shared`,
        or are the body. RuntimeError, starting with `OTHER_GROUP`, if this worker is not in that group.
        """
        if "group" in query:
            # Receive before any check of the push: else the trainer would wait for the transfer until its deadline.
            data = self._groupgrad_receive(query["group"], int(query["num_bytes"]))
        else:
            source = read_shared(query["shared"]) if "shared" in query else bytearray(body)
            data = torch.frombuffer(source, dtype=torch.uint8)
        push, first = self._groupgrad_push, int(query["first"])
        if push is None:
            raise RuntimeError("a bucket of weights came before a push was begun")
        if first != push.num_tensors:
            raise RuntimeError(f"a bucket begins with tensor {first}, but {push.num_tensors} is the next")
        push.checksum = running_checksum(data, push.checksum)
        self.groupgrad_tensors(unpack(push.specs[first : first + int(query["count"])], data))

    def groupgrad_reads(self, name: str) -> bool:
        """True if this worker can read the shared memory of that name."""
        try:
            read_shared(name).close()
        except OSError:
            return False
        return True

    def groupgrad_devices(self) -> dict[str, Any]:
        """This worker's rank, GPU and NCCL release."""
        return {"rank": int(self.rank), **describe_device(self.device)}

    def groupgrad_open(self, host: str, port: int, timeout_s: float) -> None:
        """Leave any group; the first worker opens the port where the trainer and all workers meet."""
        self.groupgrad_leave()
        if self.rank == 0:
            self._groupgrad_store = open_store(host, port, serves=True, timeout_s=timeout_s)

    def groupgrad_join(self, name: str, backend: Backend, host: str, port: int, size: int, timeout_s: float) -> None:
        """Join the trainer and the other workers at the address that the server itself has."""
        store = self._groupgrad_store if self.rank == 0 else open_store(host, port, serves=False, timeout_s=timeout_s)
        device = self.device if backend == "nccl" else None
        group = WeightGroup(backend, store, self.rank + 1, size, timeout_s=timeout_s, device=device)
        self._groupgrad_group = name, group

    def _groupgrad_receive(self, name: str, num_bytes: int) -> torch.Tensor:
        own_name, group = self._groupgrad_group or (None, None)
        if group is None or own_name != name:
            raise RuntimeError(f"{OTHER_GROUP} {own_name}, and weights are to come over {name}")
        return group.receive(num_bytes)

    def groupgrad_leave(self, name: str | None = None) -> None:
        """Leave the group of that name, if this worker is in it; without a name, any group."""
        own_name, group = self._groupgrad_group or (None, None)
        if name is not None and own_name != name:
            return
        self._groupgrad_group = self._groupgrad_store = None
        if group is not None:
            group.close()

    def groupgrad_tensors(self, tensors: list[tuple[str, Any]]) -> None:
        """Load tensors by reference, within one process."""
        model: Any = self._groupgrad_model()
        push = self._groupgrad_push
        assert push is not None
        with self._groupgrad_config():
            loaded = model.load_weights(iter(_rename_vision_tower(model, tensors)))
        push.num_tensors += len(tensors)
        push.loaded = None if loaded is None or push.loaded is None else push.loaded | set(loaded)

    def groupgrad_commit(self, checksum: int | None = None) -> None:
        """End the push. RuntimeError, starting with `REFUSED`, if it is not complete.

        It is complete with all announced tensors, of this checksum (None: nothing was sent as bytes), if every
        parameter of the model is among them.
        """
        push = self._groupgrad_push
        if push is None:
            raise RuntimeError("a push was ended that had not begun")
        # Collected before finishing, which adds parameters that vLLM derives from others.
        names = {_checkpoint_name(name) for name, _ in self._groupgrad_model().named_parameters()} - push.ties.keys()
        self._groupgrad_finish()
        problem = None
        if push.num_tensors != len(push.specs):
            problem = f"{len(push.specs)} tensors were announced, {push.num_tensors} came"
        elif checksum is not None and push.checksum != checksum:
            problem = f"its bytes have the checksum {push.checksum:08x}, those sent {checksum:08x}"
        elif missing := sorted(names - push.loaded if push.loaded is not None else ()):
            problem = f"nothing was sent for {', '.join(missing[:20])}"
        if problem is not None:
            raise RuntimeError(f"{REFUSED} {self.rank} refuses the push: {problem}")

    def _groupgrad_finish(self) -> None:
        """Process the loaded weights of every layer: packing for CPU kernels, quantization, attention scales."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        push, self._groupgrad_push = self._groupgrad_push, None
        # vLLM warns of every layer that has nothing to load, such as rotary embeddings; `groupgrad_commit` checks.
        log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with self._groupgrad_config():
                finalize_layerwise_reload(self._groupgrad_model(), self.model_runner.model_config)
        finally:
            log.setLevel(level)
        # vLLM's reload handles layers one by one: share tied weights again, and process them as after loading.
        for layer, owner in push.ties.values() if push is not None else ():
            layer.weight = owner.weight
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(layer)
        self.model_runner.reset_lora_state()

    def _groupgrad_model(self) -> Any:
        return self.model_runner.get_model()

    def _groupgrad_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)
