"""Client engine: samples from a vLLM server that `groupgrad vllm-serve` started, and pushes weights to it."""

from __future__ import annotations

import logging
import time
import uuid
import zlib
from contextlib import closing
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad._version import __version__
from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.vllm.http import (
    GIVEN_UP,
    POLL_S,
    Address,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    call,
    wait_until_up,
)
from groupgrad.engines.vllm.lora import adapter_bytes
from groupgrad.engines.vllm.server_session import ServerSession
from groupgrad.engines.vllm.vllm_engine import Push, VLLMEngine
from groupgrad.engines.vllm.vllm_params import PROCESSED, refusal, sampling_fields
from groupgrad.engines.vllm.weight_group import GroupBroken
from groupgrad.engines.vllm.weight_transport import GROUP_PORT, GroupTransport, HttpTransport, choose_transport
from groupgrad.engines.vllm.wire import BUCKET_BYTES, PROTOCOL, model_sizes, pack, specs_of, specs_to_json, torch_dtype
from groupgrad.errors import WeightsLost
from groupgrad.modeling.adapters import base_model
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.modeling.weights import adapter_files, checkpoint_weights, drained_checkpoint_weights, is_sharded

logger = logging.getLogger(__name__)

PUSH_ATTEMPTS = 3
"""Attempts at a push during which the server goes away."""

GRACE_S = 30.0
"""Longest that a rank waits for another rank to begin a push to a restarted server."""


class VLLMServerEngine(VLLMEngine):
    """Samples from a vLLM server; `vllm_params` says of which distribution its log-probs are.

    Call `connect` first, and `push` or `push_adapter` whenever the policy has changed. With several ranks each has an
    engine; only the one with `pushes=True` sends weights, the others learn their version by `expect`.

    `timeout_s` bounds every wait: for the server to come up, for a push, for a token. If the server is restarted during
    sampling, the engine reconnects, pushes the weights again and requests the missing rows. So the policy must not
    change during sampling unless `is_frozen` is set.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 240.0,
        regex: str | None = None,
        pushes: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        transport: HttpTransport | None = None,
        group_port: int = GROUP_PORT,
        attempts: int = PUSH_ATTEMPTS,
    ):
        super().__init__(regex)
        self.address, self.timeout_s = address, timeout_s
        self.pushes, self._bucket_bytes = pushes, bucket_bytes
        self._transport, self._group_port, self._attempts = transport, group_port, attempts
        self._chosen: tuple[str, HttpTransport] | None = None
        """The transport of the last push, and the server's start id that it was chosen for."""
        self._served: tuple[nn.Module, int] | None = None
        """The policy, and its longest prompt and completion together (0: unknown), which the server has to fit."""
        self.info: dict[str, Any] = {}
        """The server's last answer about itself: model, `vocab_size`, `dtype`, `max_model_len`, ..."""
        self.base_version = f"base-{uuid.uuid4().hex[:8]}"
        """Weight version of the weights below an adapter, which do not change in training."""
        self._checked: list[dict[str, Any]] = []

    def connect(self, model: nn.Module, *, num_tokens: int = 0, options: SamplingOptions | None = None) -> None:
        """Wait for the server, and check that it serves this model, contexts of `num_tokens` and these options.

        TimeoutError if it does not come up in time; ValueError, with both sides' values, if it does not fit.
        """
        self._served = model, num_tokens
        self._reconnect()
        if options is not None:
            self.check(options)

    def check(self, options: SamplingOptions) -> None:
        """ValueError if the server refuses the sampling options."""
        fields = sampling_fields(options, regex=self.regex)
        if fields in self._checked:
            return
        try:
            call(self.address, "check", {"sampling": fields}, timeout_s=self.timeout_s)
        except ServerRefused as refused:
            raise refusal(refused, fields, self.regex) from None
        self._checked.append(fields)

    def _push(self, push: Push) -> str:
        """Send the weights or the adapter; the server does not sample until everything has arrived and was verified.

        The weights below an adapter are sent once to each start of the server. ValueError for an adapter on a sharded
        model.
        """
        if push.kind == "adapter" and is_sharded(push.model):
            raise ValueError("an adapter on a sharded model (ZeRO-3, FSDP) cannot be sent alone; merge it instead")
        if self._served is None:
            self.connect(push.model)
        if not self.pushes:
            with drained_checkpoint_weights(push.model):  # gathering sharded parameters takes all ranks
                return self._weight_version or ""
        self.expect(push.weight_version)
        self._last_push = push
        self._send(push)
        return push.weight_version

    def share_weight_version(self) -> None:
        """Collective. All ranks expect the weight version that rank 0 has pushed."""
        self.expect(dist.all_gather_objects(self._weight_version or "")[0])

    def session(self, options: SamplingOptions) -> closing[ServerSession]:
        """A session over the server; requests that have not ended when it is closed are aborted."""
        fields = sampling_fields(options, regex=self.regex)
        pushed = self.pushed
        self.check(options)
        return closing(ServerSession(self.address, pushed, fields, self.recover, self.timeout_s))

    def close(self) -> None:
        """Leave the server; it keeps its weights, and another trainer may push to it."""
        for transport in (self._transport, self._chosen[1] if self._chosen else None):
            if transport is not None:
                transport.close()
        self._chosen = None

    def recover(self, reason: str) -> None:
        """Return once the server has the current weights; `reason` is why that is in doubt.

        RuntimeError if another trainer has pushed to it; TimeoutError if it does not come back in time; WeightsLost if
        it was restarted and this rank cannot push: while `is_frozen`, alone on a sharded model, or where another rank
        pushes and does not notice, having nothing to sample.
        """
        known_start = self.info.get("start_id")
        logger.warning("vLLM server %s: %s; looking for it", self.address, reason)
        reconnected: float | None = None
        while True:
            self._reconnect(reason)
            reconnected = reconnected or time.monotonic()
            info = self.info
            if info["complete"] and info["weight_version"] == self._weight_version:
                return
            is_unfinished = not info["complete"] and info["pending_version"] == self._weight_version
            if info["start_id"] == known_start and not is_unfinished:
                other = info["weight_version"] if info["complete"] else info["pending_version"]
                raise another_trainer(self.address, other, self._weight_version)
            if self.is_frozen:
                raise self._lost(", which the policy has left behind")
            if self.pushes and self._last_push is not None:
                if is_sharded(self._last_push.model):
                    raise self._lost(
                        ", and a model that is spread over ranks can only be sent between generation batches"
                    )
                story = "vLLM server %s has no weights of this training; pushing %s"
                logger.warning(story, self.address, self._weight_version)
                self._send(self._last_push)
                return
            patience_s = self.timeout_s if is_unfinished else min(self.timeout_s, GRACE_S)
            if time.monotonic() - reconnected > patience_s:
                raise self._lost(f", and the rank that pushes has not given it them within {patience_s:g} s")
            if self.is_stopped:
                raise RuntimeError(GIVEN_UP)
            time.sleep(POLL_S)

    def _lost(self, why: str) -> WeightsLost:
        return WeightsLost(
            f"the vLLM server {self.address} was started again and has lost the weights {self._weight_version!r}{why}"
        )

    def _reconnect(self, reason: str | None = None) -> None:
        """Wait for the server, refresh `info`, and check that it fits."""
        try:
            info = wait_until_up(self.address, timeout_s=self.timeout_s, is_given_up=lambda: self.is_stopped)
        except TimeoutError as error:
            raise TimeoutError(f"{error}" + (f"; it is looked for because {reason}" if reason else "")) from None
        self._check_fit(info)
        self.info = info
        self.max_model_len = int(info["max_model_len"])
        self.logprobs_mode = str(info.get("logprobs_mode", PROCESSED))

    def look(self, timeout_s: float) -> dict[str, Any]:
        """What the server says of itself now, if it fits and its workers answer; errors as those of `connect`."""
        info = call(self.address, "info", timeout_s=timeout_s)
        self._check_fit(info)
        call(self.address, "init", {}, timeout_s=timeout_s)
        return info

    def _check_fit(self, info: dict[str, Any]) -> None:
        """ValueError if a server with this `info` does not fit."""
        if info.get("protocol") != PROTOCOL:
            raise ValueError(
                f"the vLLM server {self.address} speaks protocol {info.get('protocol', 'none')} (groupgrad "
                f"{info.get('release', 'of an older release')}), and this trainer speaks protocol {PROTOCOL} "
                f"(groupgrad {__version__}); start the server with the trainer's release"
            )
        problems = incompatibilities(*self._served, info) if self._served is not None else []
        if problems:
            raise ValueError(f"the vLLM server {self.address} does not fit this training: " + "; ".join(problems))

    def _send(self, push: Push) -> None:
        """Push, again if the server goes away meanwhile and comes back."""
        started = time.monotonic()
        for attempt in range(1, self._attempts + 1):
            try:
                if push.kind == "weights":
                    self._push_weights(push.model, push.weight_version, merge=True, keeps_rows=push.keeps_rows)
                else:
                    self._push_adapter(push)
                break
            except (ServerUnreachable, ServerTimeout, ServerRefused, GroupBroken) as error:
                story = f"pushing version {push.policy_step} to {self.address} failed: {error}{_remedy(error)}"
                went_away = isinstance(error, (ServerUnreachable, GroupBroken)) or self._is_restarted()
                if not went_away or attempt == self._attempts or is_sharded(push.model):
                    error.args = (f"{story} (attempt {attempt} of {self._attempts})",)
                    raise
                logger.warning("%s; trying again", story)
                self._reconnect(f"it went away in the middle of a push ({error})")
        logger.debug("pushed %s in %.2f s", push.weight_version, time.monotonic() - started)

    def _is_restarted(self) -> bool:
        """True if the server is another start of it than the last known, or does not answer."""
        try:
            return call(self.address, "info", timeout_s=5.0)["start_id"] != self.info.get("start_id")
        except (ConnectionError, ServerRefused):
            return True

    def _push_weights(self, model: nn.Module, weight_version: str, *, merge: bool, keeps_rows: bool = False) -> None:
        with drained_checkpoint_weights(model, merge=merge) as weights:
            self._reconnect()  # the server may have been restarted, in another dtype
            shapes = checkpoint_weights(model, merge=merge, shapes_only=True)
            specs = specs_of(shapes, torch_dtype(self.info["dtype"]))
            body = {"weight_version": weight_version, "tensors": specs_to_json(specs), "timeout_s": self.timeout_s}
            body |= {"push": self.info["next_push"], "keeps_rows": keeps_rows}
            transport = self._current_transport(model)
            transport.connect(self.address, self.info["num_workers"], timeout_s=self.timeout_s)
            # The server waits that long for rows to end; its answer takes a moment more.
            call(self.address, "start", body, timeout_s=self.timeout_s + 5.0)
            checksum = 0
            tensors = (tensor for _, tensor in weights)
            for bucket in pack(specs, tensors, device=transport.device, bucket_bytes=self._bucket_bytes):
                transport.send(self.address, weight_version, bucket, timeout_s=self.timeout_s)
                checksum = bucket.checksum
        body = {"weight_version": weight_version, "checksum": checksum}
        call(self.address, "finish", body, timeout_s=self.timeout_s)

    def _current_transport(self, model: nn.Module) -> HttpTransport:
        """The transport for this push.

        A process group is attempted once for each start of the server, and kept as long as that lives. Other transports
        are chosen for each push: the server may have been restarted on another machine.
        """
        if self._transport is not None:
            return self._transport
        start_id, device = self.info["start_id"], next(model.parameters()).device
        if self._chosen is not None and self._chosen[0] == start_id:
            if isinstance(self._chosen[1], GroupTransport):
                return self._chosen[1]
            device = None
        elif self._chosen is not None:
            self._chosen[1].close()
        num_workers = self.info["num_workers"]
        transport = choose_transport(
            self.address, num_workers, timeout_s=self.timeout_s, device=device, group_port=self._group_port
        )
        self._chosen = start_id, transport
        return transport

    def _push_adapter(self, push: Push) -> None:
        self._reconnect()  # the server may have been restarted, in another dtype
        files = adapter_files(push.model)
        rank, max_rank = int(files.config["r"]), int(self.info["max_lora_rank"])
        if rank > max_rank:
            has = f"takes adapters up to rank {max_rank}" if max_rank else "was started without --enable-lora"
            raise ValueError(
                f"the adapter has rank {rank}, but the vLLM server {self.address} {has}; start it with --enable-lora "
                f"--max-lora-rank {rank} (or the next that vLLM knows), or merge the adapter into the weights"
            )
        if self.info["base_version"] != self.base_version:
            self._push_weights(push.model, self.base_version, merge=False)
            self._reconnect()
        config, tensors = adapter_bytes(files, torch_dtype(self.info["dtype"]))
        query = {
            "weight_version": push.weight_version,
            "base_version": self.base_version,
            "checksum": zlib.crc32(tensors, zlib.crc32(config)),
            "config_bytes": len(config),
            "push": self.info["next_push"],
            "timeout_s": self.timeout_s,
        }
        call(self.address, "adapter", config + tensors, query=query, timeout_s=self.timeout_s + 5.0)


def another_trainer(address: Address, theirs: str | None, ours: str | None) -> RuntimeError:
    """The error for a server that has weights which this trainer has not pushed."""
    return RuntimeError(
        f"the vLLM server {address} has the weights {theirs!r}, but this trainer pushed {ours!r}: another trainer uses "
        "the same server; give each a server of its own"
    )


def incompatibilities(policy: nn.Module, num_tokens: int, info: dict[str, Any]) -> list[str]:
    """Reasons why a server with this `info` cannot serve contexts of `num_tokens` of the policy; empty if it can."""
    base = base_model(unwrap(policy))
    sizes = {**model_sizes(base.config), "architecture": type(base).__name__}
    vocab_size = base.config.get_text_config().vocab_size
    problems = []
    wrong = [
        f"{name} {value!r} (the policy has {sizes[name]!r})"
        for name, value in info["sizes"].items()
        if value is not None and sizes.get(name) not in (None, value)
    ]
    if wrong:
        problems.append(
            f"it serves {info['model']}, another model: {', '.join(wrong)}; start it with the policy's model"
        )
    if info["vocab_size"] != vocab_size:
        problems.append(
            f"its vocabulary has {info['vocab_size']} tokens, the policy's {vocab_size}; save the policy with "
            "its resized embeddings and serve that"
        )
    if num_tokens > info["max_model_len"]:
        problems.append(
            f"its context holds {info['max_model_len']} tokens, but prompt and completion may have "
            f"{num_tokens}; start it with --max-model-len {num_tokens} or more, or lower "
            "max_completion_length"
        )
    return problems


def _remedy(error: Exception) -> str:
    """The settings to change if the server reports that it ran out of memory."""
    if "out of memory" not in str(error).lower():
        return ""
    return (
        "; the server ran out of memory: start it with a lower --gpu-memory-utilization or --max-model-len, or a "
        "higher --tensor-parallel-size"
    )
