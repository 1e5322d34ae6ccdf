"""Sampling from a vLLM server that `groupgrad vllm-serve` started, and pushing weights to it."""

from __future__ import annotations

import io
import json
import logging
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
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
from groupgrad.engines.vllm.server_session import ServerSession
from groupgrad.engines.vllm.vllm_params import PROCESSED, is_plain, refusal, sampling_fields
from groupgrad.engines.vllm.weight_group import GroupBroken
from groupgrad.engines.vllm.weight_transport import GROUP_PORT, GlooTransport, Transport, choose_transport
from groupgrad.engines.vllm.wire import BUCKET_BYTES, TensorSpec, dtype_name, model_sizes, notes_as_lists, torch_dtype
from groupgrad.errors import WeightsLost
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.modeling.weights import adapter_files, is_sharded, served_weights, weights_to_the_end

logger = logging.getLogger(__name__)

PUSH_ATTEMPTS = 3
"""Times that a push is tried when the server goes away in the middle of it."""

GRACE_S = 30.0
"""Longest that a rank waits for another one to begin a push to a server that was started again."""


@dataclass(slots=True, frozen=True)
class Expected:
    """What the trainer needs of a server."""

    vocab_size: int
    num_tokens: int
    """Longest prompt and completion together; 0 if no length is known."""
    sizes: dict[str, Any]
    """Of `wire.model_sizes`."""

    @classmethod
    def of(cls, model: nn.Module, num_tokens: int) -> Expected:
        """Of the policy."""
        inner: Any = unwrap(model)
        base = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        config = base.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(int(text.vocab_size), num_tokens, {**model_sizes(config), "architecture": type(base).__name__})


@dataclass(slots=True)
class _Pushed:
    """What was pushed last, so that a server that was started again can be given it."""

    model: nn.Module
    kind: Literal["weights", "adapter"]
    weight_version: str
    policy_step: int


class VLLMServerEngine:
    """Samples from a vLLM server; `sampling.py` says of which distribution its log-probs are.

    Call `connect` before anything else, and `push` or `push_adapter` whenever the policy has changed. With several
    ranks each has an engine; those with `pushes=False` are told by `expect` which weights the server has.

    `timeout_s` bounds every wait: for the server to come up, for a push, for a token. A server that was started again
    while rows were sampled is found, given the weights, and asked for the rows that are missing. The policy must not
    change while rows are sampled, since it is what is pushed then.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float = 240.0,
        regex: str | None = None,
        pushes: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        transport: Transport | None = None,
        group_port: int = GROUP_PORT,
    ):
        self.address, self.timeout_s = address, timeout_s
        self._regex, self._pushes, self._bucket_bytes = regex, pushes, bucket_bytes
        self._transport, self._group_port = transport, group_port
        self._kept: tuple[str, Transport] | None = None
        """The transport of the last push, and which start of the server it was chosen for."""
        self._expected: Expected | None = None
        self._info: dict[str, Any] = {}
        self._pushed: _Pushed | None = None
        self._weight_version: str | None = None
        self._base = f"base-{uuid.uuid4().hex[:8]}"
        """Stamp of the weights below an adapter, which do not change in training."""
        self._checked: list[dict[str, Any]] = []
        self.is_frozen = False
        """The policy changes while rows are sampled, so that it must not be sent meanwhile."""
        self.is_stopped = False
        """Nobody waits for what is sampled any more: waiting for the server fails."""

    @property
    def weight_version(self) -> str:
        """Of the weights that samples come from: the policy_step, and a word that no other push has. ValueError if
        nothing was pushed."""
        if self._weight_version is None:
            raise ValueError("no weights were pushed to the vLLM server yet; call push before sampling")
        return self._weight_version

    @property
    def policy_step(self) -> int:
        """The version of the weights that samples come from. ValueError if nothing was pushed."""
        return int(self.weight_version.rpartition("-")[0])

    @property
    def info(self) -> dict[str, Any]:
        """What the server said of itself when it was last asked: model, `vocab_size`, `dtype`, `max_model_len`, ..."""
        return dict(self._info)

    def connect(self, model: nn.Module, *, num_tokens: int = 0, options: SamplingOptions | None = None) -> None:
        """Wait for the server and see that it serves this model, in contexts of `num_tokens`, with these options.

        TimeoutError if none comes up in time; ValueError, with both sides' story, for one that does not fit.
        """
        self._expected = Expected.of(model, num_tokens)
        self._find()
        if options is not None:
            self.check(options)

    def check(self, options: SamplingOptions) -> None:
        """ValueError if the server refuses the sampling options."""
        fields = sampling_fields(options, regex=self._regex)
        if fields in self._checked:
            return
        try:
            call(self.address, "check", {"sampling": fields}, timeout_s=self.timeout_s)
        except ServerRefused as refused:
            raise refusal(refused, fields, self._regex) from None
        self._checked.append(fields)

    def plain_logprobs(self, options: SamplingOptions) -> bool:
        """True if the log-probs of samples are those of the temperature softmax, as training scores tokens; False if
        they are renormalised over what cuts, penalties or a regex left."""
        return is_plain(sampling_fields(options, regex=self._regex), self._info.get("logprobs_mode", PROCESSED))

    def push(self, model: nn.Module, policy_step: int) -> str:
        """Send all weights, adapters merged, as that version; gives their weight_version. Collective if they are sharded.

        The server has the version when all of it has arrived and was verified; until then it does not sample.
        """
        return self._push_new(model, "weights", policy_step)

    def push_adapter(self, model: nn.Module, policy_step: int) -> str:
        """Send the active LoRA adapter as that version; gives its weight_version. ValueError if the model is sharded.

        The weights below it are sent once to each start of the server, in the server's own dtype.
        """
        return self._push_new(model, "adapter", policy_step)

    def expect(self, weight_version: str) -> None:
        """Sample from the weights of this weight_version, which another rank has pushed."""
        self._weight_version = weight_version

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        with self.session(options) as session:
            return sample_all(session, requests)

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[ServerSession]:
        """A session over the server. What has not ended when it is closed is given up."""
        fields = sampling_fields(options, regex=self._regex)
        weight_version = self.weight_version
        self.check(options)
        session = ServerSession(self.address, weight_version, fields, self.recover, self.timeout_s)
        try:
            yield session
        finally:
            session.close()

    def close(self) -> None:
        """Let the server go; what it has stays, and another trainer may push to it."""
        for transport in (self._transport, self._kept[1] if self._kept else None):
            if transport is not None:
                transport.close()
        self._kept = None

    def recover(self, reason: str) -> None:
        """See to it that the server is there with the current weights; `reason` is why that is in doubt.

        RuntimeError if another trainer has pushed to it; TimeoutError if it does not come back in time; WeightsLost if
        it was started again and this rank cannot give it the weights: while `is_frozen`, alone where the model is spread
        over ranks, or where another rank pushes and does not, having nothing to sample.
        """
        known = self._info.get("start_id")
        logger.warning("vLLM server %s: %s; looking for it", self.address, reason)
        found: float | None = None
        while True:
            self._find(reason)
            found = found or time.monotonic()
            if self._info["whole"] and self._info["weight_version"] == self._weight_version:
                return
            unfinished = not self._info["whole"] and self._info["pushing"] == self._weight_version
            if self._info["start_id"] == known and not unfinished:
                other = self._info["weight_version"] if self._info["whole"] else self._info["pushing"]
                raise RuntimeError(
                    f"the vLLM server {self.address} has the weights {other!r}, but this trainer pushed "
                    f"{self._weight_version!r}: another trainer uses the same server; give each a server of its own"
                )
            lost = f"the vLLM server {self.address} was started again and has lost the weights {self._weight_version!r}"
            if self.is_frozen:
                raise WeightsLost(f"{lost}, which the policy has left behind")
            if self._pushes and self._pushed is not None:
                if is_sharded(self._pushed.model):
                    raise WeightsLost(f"{lost}, and a model that is spread over ranks can only be sent between rounds")
                logger.warning(
                    "vLLM server %s has no weights of this training; pushing %s", self.address, self._weight_version
                )
                self._push()
                return
            waits_s = self.timeout_s if unfinished else min(self.timeout_s, GRACE_S)
            if time.monotonic() - found > waits_s:
                raise WeightsLost(f"{lost}, and the rank that pushes has not given it them within {waits_s:g} s")
            if self.is_stopped:
                raise RuntimeError(GIVEN_UP)
            time.sleep(POLL_S)

    def _find(self, reason: str | None = None) -> None:
        try:
            self._info = wait_until_up(self.address, timeout_s=self.timeout_s, is_given_up=lambda: self.is_stopped)
        except TimeoutError as error:
            raise TimeoutError(f"{error}" + (f"; it is looked for because {reason}" if reason else "")) from None
        if self._expected is not None:
            problems = incompatibilities(self._expected, self._info)
            if problems:
                raise ValueError(f"the vLLM server {self.address} does not fit this training: " + "; ".join(problems))

    def _push_new(self, model: nn.Module, kind: Literal["weights", "adapter"], policy_step: int) -> str:
        if self._expected is None:
            self.connect(model)
        if kind == "adapter" and is_sharded(model):
            raise ValueError("an adapter on a sharded model (ZeRO-3, FSDP) cannot be sent alone; merge it instead")
        if not self._pushes:
            # Where parameters are sharded, making whole ones needs every rank.
            for _ in served_weights(model) if is_sharded(model) else ():
                pass
            return self._weight_version or ""
        self._weight_version = f"{policy_step}-{uuid.uuid4().hex[:8]}"
        self._pushed = _Pushed(model, kind, self._weight_version, policy_step)
        self._push()
        return self._weight_version

    def _push(self) -> None:
        """Push what is current, again if the server goes away meanwhile and comes back."""
        assert self._pushed is not None
        pushed = self._pushed
        started = time.monotonic()
        for attempt in range(1, PUSH_ATTEMPTS + 1):
            try:
                if pushed.kind == "weights":
                    self._push_weights(pushed.model, pushed.weight_version, merge=True)
                else:
                    self._push_adapter(pushed)
                break
            except (ServerUnreachable, ServerTimeout, ServerRefused, GroupBroken) as error:
                story = f"pushing version {pushed.policy_step} to {self.address} failed: {error}{_remedy(error)}"
                gone_again = (
                    isinstance(error, (ServerUnreachable, GroupBroken))
                    or self._info.get("start_id") != self._start_id_now()
                )
                if not gone_again or attempt == PUSH_ATTEMPTS or is_sharded(pushed.model):
                    raise type(error)(*_arguments(error, f"{story} (attempt {attempt} of {PUSH_ATTEMPTS})")) from error
                logger.warning("%s; trying again", story)
                self._find(f"it went away in the middle of a push ({error})")
        logger.debug("pushed %s in %.2f s", pushed.weight_version, time.monotonic() - started)

    def _start_id_now(self) -> str | None:
        try:
            return call(self.address, "info", timeout_s=5.0)["start_id"]
        except (ConnectionError, ServerRefused):
            return None

    def _push_weights(self, model: nn.Module, weight_version: str, *, merge: bool) -> None:
        timeout_s = self.timeout_s
        checksum = 0
        with weights_to_the_end(model, merge=merge) as weights:
            self._find()  # it may have been started again since it was last looked at
            served = torch_dtype(self._info["dtype"])
            notes = [
                TensorSpec(name, dtype_name(served if empty.is_floating_point() else empty.dtype), tuple(empty.shape))
                for name, empty in served_weights(model, merge=merge, shapes_only=True)
            ]
            announcement = {"weight_version": weight_version, "tensors": notes_as_lists(notes), "timeout_s": timeout_s}
            # The server waits that long for rows to end; its answer needs a moment more.
            call(self.address, "begin", announcement, timeout_s=timeout_s + 5.0)
            tensors = (tensor for _, tensor in weights)
            transport = self._way(model)
            for bucket in transport.pack(notes, tensors, self._bucket_bytes):
                transport.send(self.address, weight_version, bucket, timeout_s=timeout_s)
                checksum = bucket.checksum
        call(self.address, "commit", {"weight_version": weight_version, "checksum": checksum}, timeout_s=timeout_s)

    def _way(self, model: nn.Module) -> Transport:
        """A process group is kept as long as the server lives, and is tried to be formed once. All else is chosen anew
        for each push: the server may have been started again on another machine."""
        if self._transport is not None:
            return self._transport
        start, device = self._info["start_id"], next(model.parameters()).device
        if self._kept is not None and self._kept[0] == start:
            if isinstance(self._kept[1], GlooTransport):
                return self._kept[1]
            device = None
        elif self._kept is not None:
            self._kept[1].close()
        found = choose_transport(self.address, timeout_s=self.timeout_s, device=device, group_port=self._group_port)
        self._kept = start, found
        return found

    def _push_adapter(self, pushed: _Pushed) -> None:
        from safetensors.torch import save

        self._find()  # it may have been started again since it was last looked at
        files = adapter_files(pushed.model)
        rank, largest = int(files.config["r"]), int(self._info["max_lora_rank"])
        if rank > largest:
            has = f"takes adapters up to rank {largest}" if largest else "was started without --enable-lora"
            raise ValueError(
                f"the adapter has rank {rank}, but the vLLM server {self.address} {has}; start it with --enable-lora "
                f"--max-lora-rank {rank} (or the next that vLLM knows), or merge the adapter into the weights"
            )
        if self._info["base"] != self._base:
            self._push_weights(pushed.model, self._base, merge=False)
            self._info["base"] = self._base
        served = torch_dtype(self._info["dtype"])
        tensors = {name: tensor.detach().to("cpu", served).contiguous() for name, tensor in files.tensors.items()}
        config = json.dumps(files.config, default=str).encode()
        body = io.BytesIO()
        body.write(config)
        body.write(save(tensors))
        data = body.getvalue()
        query = {
            "weight_version": pushed.weight_version,
            "base": self._base,
            "checksum": zlib.crc32(data),
            "config_bytes": len(config),
            "timeout_s": self.timeout_s,
        }
        call(self.address, "adapter", data, query=query, timeout_s=self.timeout_s + 5.0)


def incompatibilities(expected: Expected, info: dict[str, Any]) -> list[str]:
    """Why a server that says `info` of itself cannot serve this training; empty if it can."""
    problems = []
    sizes = {name: value for name, value in info["sizes"].items() if value is not None}
    wrong = [
        f"{name} {value!r} (the policy has {expected.sizes[name]!r})"
        for name, value in sizes.items()
        if name in expected.sizes and expected.sizes[name] is not None and expected.sizes[name] != value
    ]
    if wrong:
        problems.append(
            f"it serves {info['model']}, another model: {', '.join(wrong)}; start it with the policy's model"
        )
    if info["vocab_size"] != expected.vocab_size:
        problems.append(
            f"its vocabulary has {info['vocab_size']} tokens, the policy's {expected.vocab_size}; save the policy with "
            "its resized embeddings and serve that"
        )
    if expected.num_tokens > info["max_model_len"]:
        problems.append(
            f"its context holds {info['max_model_len']} tokens, but prompt and completion may have "
            f"{expected.num_tokens}; start it with --max-model-len {expected.num_tokens} or more, or lower "
            "max_completion_length"
        )
    return problems


def _remedy(error: Exception) -> str:
    """What to set if the server has said that it ran out of memory."""
    if "out of memory" not in str(error).lower():
        return ""
    return (
        "; the server ran out of memory: start it with a lower --gpu-memory-utilization or --max-model-len, or a "
        "higher --tensor-parallel-size"
    )


def _arguments(error: Exception, story: str) -> tuple[Any, ...]:
    return (error.status, story) if isinstance(error, ServerRefused) else (story,)
