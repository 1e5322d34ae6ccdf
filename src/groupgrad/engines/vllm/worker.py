"""What groupgrad adds to vLLM's workers: they take weights in buckets and say what arrived.

vLLM mixes `WeightReceiver` into its worker class (`--worker-extension-cls`), and `collective_rpc` calls its methods in
every worker. vLLM's own weight transfer (`--weight-transfer-config`) has transports between GPUs only, and nothing in
it says that what arrived is what was sent; a NCCL transport would take its place in `groupgrad_bucket`.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from typing import Any

from groupgrad.engines.vllm.wire import TensorNote, notes_from_lists, read_shared, unpack

EXTENSION = "groupgrad.engines.vllm.worker.WeightReceiver"
"""The value of vLLM's `worker_extension_cls`."""

REFUSED = "vLLM's worker"
"""How the message begins when what arrived is not what was sent."""


@dataclass(slots=True)
class _Push:
    """A push under way."""

    notes: list[TensorNote]
    num_tensors: int = 0
    """Tensors that have come."""
    checksum: int = 0
    loaded: set[str] = field(default_factory=set)
    """vLLM's names of the parameters that have been written."""
    named: bool = True
    """False if the model does not say what it loads."""


class WeightReceiver:
    """Methods of a vLLM worker. All return plain values, or raise, which fails the call in vLLM's front."""

    def groupgrad_begin(self, notes: list[list[Any]]) -> None:
        """Make ready for the tensors announced. A push that was under way is given up."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "_groupgrad_push", None) is not None:
            self._groupgrad_finish()
        with self._groupgrad_config():
            initialize_layerwise_reload(self._groupgrad_model())
        self._groupgrad_push: _Push | None = _Push(notes_from_lists(notes))

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
        push = getattr(self, "_groupgrad_push", None)
        if push is None:
            raise RuntimeError("a bucket of weights came before a push was begun")
        if first != push.num_tensors:
            raise RuntimeError(f"a bucket begins with tensor {first}, but {push.num_tensors} is the next")
        push.checksum = zlib.crc32(data, push.checksum)
        self._groupgrad_load(push, unpack(push.notes[first : first + count], data))

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
            loaded = model.load_weights(iter(tensors))
        push.num_tensors += len(tensors)
        if loaded is None:
            push.named = False
        else:
            push.loaded |= set(loaded)

    def _groupgrad_finish(self) -> None:
        """Let every layer process what it was given: packing for the CPU's kernels, quantization, attention scales."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        runner: Any = self.model_runner  # pyright: ignore[reportAttributeAccessIssue]
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
        if hasattr(runner, "reset_lora_state"):
            runner.reset_lora_state()

    def _groupgrad_model(self) -> Any:
        return self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]

    def _groupgrad_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)  # pyright: ignore[reportAttributeAccessIssue]
