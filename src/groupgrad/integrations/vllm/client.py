"""Client of one vLLM server that `groupgrad vllm-serve` started: looks at it and pushes weights to it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from groupgrad._version import __version__
from groupgrad.integrations.vllm.http import (
    LOOK_TIMEOUT_S,
    Address,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    call,
    wait_until_up,
)
from groupgrad.integrations.vllm.vllm_params import adapter_bytes, refusal
from groupgrad.integrations.vllm.vllm_policy import Push
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, whole_pass
from groupgrad.integrations.vllm.weight_transport import (
    GROUP_PORT,
    GroupBroken,
    SharedMemoryTransport,
    choose_transport,
)
from groupgrad.integrations.vllm.wire import (
    BACKEND,
    BUCKET_BYTES,
    PROTOCOL,
    TRANSFER_CONFIG,
    model_sizes,
    pack,
    specs_of,
    specs_to_json,
    torch_dtype,
)
from groupgrad.models.shards import unsharded_class
from groupgrad.models.unwrapping import base_model, unwrap
from groupgrad.models.weights import adapter_files


class ServerClient:
    """Looks at one vLLM server, checks that it fits, and pushes weights to it. `timeout_s` bounds every wait."""

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 240.0,
        group_port: int = GROUP_PORT,
    ):
        self.address, self.timeout_s, self.bucket_bytes = address, timeout_s, BUCKET_BYTES
        self._group_port = group_port
        self._chosen: tuple[str, SharedMemoryTransport] | None = None
        """The transport of the last push, and the server's start id that it was chosen for."""
        self._served: tuple[nn.Module, int] | None = None
        """The policy, and its longest prompt and completion together (0: unknown), which the server has to fit."""
        self.info: dict[str, Any] = {}
        """The server's answer to the last request for its `info`: `vocab_size`, `dtype`, ..."""
        # What a pool of servers knows of this one:
        self.cause: Exception | str | None = None
        """Why it is lost, so that nothing is sampled there; None while it serves."""
        self.failures = 0
        """Losses since the last push or since a row of it ended."""
        self.looking: Future[dict[str, Any]] | None = None
        """A look, in a thread, whether a lost server is back; its result is the server's `info`."""

    def connect(self, model: nn.Module, num_tokens: int, is_given_up: Callable[[], bool]) -> None:
        """Waits for the server, and checks that it serves this model and contexts of `num_tokens`.

        TimeoutError if it does not come up in time; ValueError, with both sides' values, if it does not fit.
        """
        self._served = model, num_tokens
        info = wait_until_up(self.address, timeout_s=self.timeout_s, is_given_up=is_given_up)
        self._check_fit(info)
        self.info = info

    def check(self, fields: dict[str, Any], regex: str | None) -> None:
        """ValueError if the server refuses these sampling options."""
        try:
            call(self.address, "check", {"sampling": fields}, timeout_s=self.timeout_s)
        except ServerRefused as refused:
            raise refusal(refused, fields, regex) from None

    def push(self, push: Push, base_version: str) -> None:
        """Sends the weights or the adapter; the server does not sample until everything has arrived and was verified.

        The weights below an adapter, of version `base_version`, are sent once to each start of the server.
        """
        try:
            if push.kind == "weights":
                self.push_weights(PolicyWeights(push.model), push.weight_version, keeps_rows=push.keeps_rows)
            else:
                self._push_adapter(push, base_version)
        except (ServerUnreachable, ServerTimeout, ServerRefused, GroupBroken) as error:
            error.args = (f"pushing version {push.policy_step} to {self.address} failed: {error}",)
            raise

    def push_weights(self, source: Any, weight_version: str, *, keeps_rows: bool = False) -> None:
        """Makes a whole push of a `WeightSource`, in the phases of vLLM's weight transfer.

        With `keeps_rows` rows under way go on with these weights; otherwise the push waits for them. ServerRefused if
        what arrived is not what was sent, or is not all weights.
        """
        with whole_pass(source) as weights:
            # Look: the server may have been started again, in another dtype or on another machine.
            self.info = self.look()
            specs = specs_of(source.metadata(), torch_dtype(self.info["dtype"]))
            # Meet the workers, where they and this process can exchange buckets.
            transport = self._current_transport(getattr(source, "device", None) or _default_device())
            transport.connect(self.address, self.info["num_workers"], timeout_s=self.timeout_s)
            # Start: from here on the server samples nothing, until a push has been verified.
            body = {"weight_version": weight_version, "tensors": specs_to_json(specs), "timeout_s": self.timeout_s}
            body["keeps_rows"] = keeps_rows
            # The server waits that long for rows to end; its answer takes a moment more.
            call(self.address, "start", body, timeout_s=self.timeout_s + 5.0)
            # Update, once for each bucket. A tensor is gathered, merged and cast when its bucket is filled.
            checksum = 0
            for bucket in pack(specs, weights, device=transport.device, bucket_bytes=self.bucket_bytes):
                transport.send(self.address, weight_version, bucket, timeout_s=self.timeout_s)
                checksum = bucket.checksum
            # Finish: the workers compare the checksum and the names; only then is this the version of samples.
            body = {"weight_version": weight_version, "checksum": checksum}
            call(self.address, "finish", body, timeout_s=self.timeout_s)

    def _current_transport(self, device: torch.device) -> SharedMemoryTransport:
        """The transport for this push, chosen once for each start of the server, which may be on another machine."""
        start_id = self.info["start_id"]
        if self._chosen is None or self._chosen[0] != start_id:
            self.close()
            num_workers, options = self.info["num_workers"], {"device": device, "group_port": self._group_port}
            self._chosen = start_id, choose_transport(self.address, num_workers, timeout_s=self.timeout_s, **options)
        return self._chosen[1]

    def _push_adapter(self, push: Push, base_version: str) -> None:
        self.info = self.look()  # the server may have been restarted, in another dtype
        if self.info["base_version"] != base_version:
            self.push_weights(PolicyWeights(push.model, merge=False), base_version)
        config, tensors = adapter_bytes(adapter_files(push.model), torch_dtype(self.info["dtype"]))
        query = {
            "weight_version": push.weight_version,
            "base_version": base_version,
            "checksum": zlib.crc32(tensors, zlib.crc32(config)),
            "config_bytes": len(config),
            "timeout_s": self.timeout_s,
        }
        call(self.address, "adapter", config + tensors, query=query, timeout_s=self.timeout_s + 5.0)

    def close(self) -> None:
        """Leaves the server; it keeps its weights, and another trainer may push to it."""
        if self._chosen is not None:
            self._chosen[1].close()
        self._chosen = None

    def look(self) -> dict[str, Any]:
        """Asks the server for its `info`. ConnectionError if it does not answer, ValueError if it does not fit."""
        info = call(self.address, "info", timeout_s=LOOK_TIMEOUT_S)
        self._check_fit(info)
        return info

    def look_at_workers(self) -> None:
        """ConnectionError or ServerRefused if the server's workers do not answer."""
        call(self.address, "init", {}, timeout_s=LOOK_TIMEOUT_S)

    @property
    def is_back(self) -> bool:
        """True for a lost server that answers again."""
        return self.looking is not None and self.looking.done() and self.looking.exception() is None

    def is_restarted(self) -> bool:
        """True if the server has been restarted since `info` was read, or does not answer."""
        try:
            return self.look()["start_id"] != self.info.get("start_id")
        except (ConnectionError, ServerRefused):
            return True

    def _check_fit(self, info: dict[str, Any]) -> None:
        """ValueError if a server with this `info` does not fit."""
        if info.get("protocol") != PROTOCOL:
            raise ValueError(
                f"the vLLM server {self.address} speaks protocol {info.get('protocol', 'none')} (groupgrad "
                f"{info.get('release', 'of an older release')}), and this trainer speaks protocol {PROTOCOL} "
                f"(groupgrad {__version__}); start the server with the trainer's release"
            )
        if (backend := info.get("backend", BACKEND)) != BACKEND:
            raise ValueError(
                f"the vLLM server {self.address} takes weights by the backend {backend!r}, which does not compare them "
                f"with what was sent; start it by `groupgrad vllm-serve` (--weight-transfer-config {TRANSFER_CONFIG!r})"
            )
        if (count := info.get("num_processes", 1)) != 1:
            raise ValueError(
                f"the vLLM server {self.address} answers from {count} processes, and each would know of its own pushes "
                "alone; start it with --api-server-count 1"
            )
        problems = incompatibilities(*self._served, info) if self._served is not None else []
        if problems:
            raise ValueError(f"the vLLM server {self.address} does not fit this training: " + "; ".join(problems))


def _default_device() -> torch.device:
    """The device of weights whose source does not name one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def incompatibilities(policy: nn.Module, num_tokens: int, info: dict[str, Any]) -> list[str]:
    """Reasons why a server with this `info` cannot serve contexts of `num_tokens` of the policy; empty if it can."""
    base = base_model(unwrap(policy))
    sizes = {**model_sizes(base.config), "architecture": unsharded_class(base).__name__}
    vocab_size = base.config.get_text_config().vocab_size
    problems = []
    wrong = [
        f"{name} {value!r} (the policy has {sizes[name]!r})"
        for name, value in info["sizes"].items()
        if value is not None and sizes[name] != value
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
