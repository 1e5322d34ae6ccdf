"""Engine over one vLLM server or several with the same weights: rows are spread by load, and servers come and go."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import closing
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.engines.base import SamplingOptions
from groupgrad.errors import WeightsLost
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import GIVEN_UP, POLL_S, Address, ServerRefused, ServerTimeout
from groupgrad.integrations.vllm.pool_session import PoolSession
from groupgrad.integrations.vllm.vllm_params import sampling_fields
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMEngine
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, whole_pass
from groupgrad.integrations.vllm.weight_transport import GROUP_PORT
from groupgrad.integrations.vllm.wire import AS_LOADED
from groupgrad.models.shards import is_sharded

logger = logging.getLogger(__name__)

FRUITLESS_ATTEMPTS = 3
"""Consecutive losses of a server that are tolerated while no row of it ends and no push begins."""

_SAME = ("dtype", "quantization", "logprobs_mode", "vllm")
"""Fields of `info` that all servers share: with others a row would depend on the server that samples it."""

_THREADS = DaemonThreads("vllm-servers")

_LOSSES = (ConnectionError, TimeoutError, ServerRefused)
"""Errors by which a server is lost."""


class VLLMServerPool(VLLMEngine):
    """Samples from vLLM servers, one or several, and pushes all weights to each; `vllm_params` says of which
    distribution their log-probs are.

    Call `connect` first, and `push` or `push_adapter` whenever the policy has changed. With several ranks each has an
    engine; only the one with `pushes=True` sends weights, the others learn their version by `share_weight_version`.

    All servers have to be there at `connect`. From then on one that dies, hangs or refuses is lost: its rows go to the
    others. When it answers again it is given the weights, at once if this rank may push now, else by the next push. So
    the policy must not change during sampling unless `is_frozen` is set. Where no server is left, the engine waits for
    one. `timeout_s` bounds every wait: for a server, for a push, for a token.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        timeout_s: float = 240.0,
        regex: str | None = None,
        pushes: bool = True,
        group_port: int = GROUP_PORT,
    ):
        super().__init__(regex)
        self.timeout_s, self.pushes = timeout_s, pushes
        self.members = [  # servers of one machine need ports of their own
            ServerClient(address, timeout_s=timeout_s, group_port=group_port + number)
            for number, address in enumerate(addresses)
        ]
        self.base_version = f"base-{uuid.uuid4().hex[:8]}"
        """Weight version of the weights below an adapter, which do not change in training."""
        self._versions = {AS_LOADED, self.base_version}
        """Weight versions that a server may have without another trainer."""

    @property
    def live(self) -> list[ServerClient]:
        """The servers that are not lost."""
        return [member for member in self.members if member.cause is None]

    @property
    def info(self) -> dict[str, Any]:
        """The `info` of the first server, with the smallest `max_lora_rank` of all servers."""
        infos = [member.info for member in self.members]
        return {**infos[0], "max_lora_rank": min(int(info.get("max_lora_rank") or 0) for info in infos)}

    def connect(self, model: nn.Module, *, num_tokens: int = 0, options: SamplingOptions | None = None) -> None:
        """Waits for all servers, and checks that they have the same settings and serve this model, contexts of
        `num_tokens` and these options.

        TimeoutError for a server that does not come up in time, ConnectionError that names each of several; ValueError,
        with the values, for one that does not fit and for servers that differ.
        """
        fields = None if options is None else sampling_fields(options, regex=self.regex)

        def act(client: ServerClient) -> None:
            client.connect(model, num_tokens, lambda: self.is_stopped)
            if fields is not None:
                client.check(fields, self.regex)

        self._each(self.members, act)
        if len(self.live) < len(self.members):
            raise self._loss("not all vLLM servers can be used")
        problem = _difference(self.members)
        if problem is not None:
            raise ValueError(problem)
        self.max_model_len = min(int(member.info["max_model_len"]) for member in self.members)
        self.logprobs_mode = str(self.members[0].info["logprobs_mode"])

    def _push(self, push: Push) -> str:
        """Pushes to all servers that answer.

        ConnectionError, with each server's cause, if none does in time or all refuse; one server's own error.
        """
        if not self.pushes:
            self._push_sharded(push, [])
            return self._weight_version or ""
        if not all(member.info for member in self.members):
            self.connect(push.model)
        self.expect(push.weight_version)
        self._last_push = push
        self._versions.add(push.weight_version)
        for member in self.members:
            member.failures = 0
        deadline = time.monotonic() + self.timeout_s
        try:
            while not self._answering():
                self._wait(deadline)
        finally:
            if is_sharded(push.model):  # the other ranks make these passes, whether a server is there or not
                self._push_sharded(push, self._answering())
        if not is_sharded(push.model):
            self._push_to(self._answering(), push)
            while not self.live and not all(map(self._is_in_vain, self.members)):
                self._wait(deadline)
                self._push_to(self._answering(), push)
        if not self.live:
            raise self._loss("no vLLM server took the weights")
        return push.weight_version

    def _push_sharded(self, push: Push, answering: Sequence[ServerClient]) -> None:
        """One server after another: a pass over sharded weights takes all ranks, which do not know who is lost."""
        errors = []
        for member in self.members:
            if member in answering:
                try:
                    self._each([member], lambda client: client.push(push, self.base_version))
                except Exception as error:  # after the passes for the other servers
                    errors.append(error)
            else:
                with whole_pass(PolicyWeights(push.model)):
                    pass
        if errors:
            raise errors[0]

    def _push_to(self, members: Sequence[ServerClient], push: Push) -> None:
        def act(client: ServerClient) -> None:
            if len(self.members) > 1:  # others could go on, while this push would wait for workers that hang
                client.look_at_workers()
            client.push(push, self.base_version)

        self._each(members, act)

    def _is_in_vain(self, member: ServerClient) -> bool:
        """True for a lost server where another attempt at a push would change nothing."""
        is_refused = isinstance(member.cause, (ServerRefused, ServerTimeout)) and not member.is_restarted()
        return is_refused or member.failures > FRUITLESS_ATTEMPTS

    def share_weight_version(self) -> None:
        """Collective. All ranks expect the weights that rank 0 has pushed, on the servers that took them."""
        causes = [member.cause and str(member.cause) for member in self.members]
        weight_version, causes = dist.all_gather_objects((self._weight_version or "", causes))[0]
        self.expect(weight_version)
        for member, cause in zip(self.members, causes):
            member.cause = cause

    def session(self, options: SamplingOptions) -> closing[PoolSession]:
        """A session over all servers; requests that have not ended when it is closed are aborted."""
        return closing(PoolSession(self, options, self.pushed))

    def close(self) -> None:
        """Leaves the servers; they keep their weights."""
        for member in self.members:
            member.close()

    def lose(self, member: ServerClient, cause: Exception | str) -> None:
        """Stops using a server until it is back."""
        member.cause, member.looking, member.failures = cause, None, member.failures + 1
        story = "vLLM server %s is lost, and %d of %d are left: %s"
        logger.warning(story, member.address, len(self.live), len(self.members), cause)

    def readmit(self) -> None:
        """Uses servers that are back, with the weights given to them; RuntimeError if they are another trainer's."""
        for member in self._answering():
            if member.looking is None or member.cause is None or member.failures > FRUITLESS_ATTEMPTS:
                continue
            info = member.looking.result()
            version = info["weight_version"] if info["complete"] else info["pending_version"]
            if info["complete"] and version == self._weight_version:
                member.cause = None
            elif info["start_id"] == member.info.get("start_id") and self.pushes and version not in self._versions:
                raise RuntimeError(
                    f"the vLLM server {member.address} has the weights {version!r}, but this trainer pushed "
                    f"{self._weight_version!r}: another trainer uses the same server; give each a server of its own"
                )
            elif self._may_push and self._last_push is not None:
                logger.warning("vLLM server %s has lost the weights; pushing %s", member.address, self._weight_version)
                self._push_to([member], self._last_push)
            else:
                member.looking = None  # it may have been given the weights when it is looked at again
            if member.cause is None:
                logger.warning("vLLM server %s is back", member.address)

    def wait_for_one(self) -> None:
        """Returns when a server can be used.

        WeightsLost if those that are back are not given these weights: while `is_frozen`, alone on a sharded model, or
        where another rank pushes and does not notice within `timeout_s`, having nothing to sample. ConnectionError,
        with each server's cause, if none is back within `timeout_s`.
        """
        deadline, was_back = time.monotonic() + self.timeout_s, False
        while not self.live:
            is_given_up = self.pushes or self.is_frozen or time.monotonic() > deadline
            if was_back and is_given_up and not self._may_push:
                raise WeightsLost(self._story(f"no vLLM server has the weights {self._weight_version!r} any more"))
            self._wait(deadline)
            was_back = was_back or any(member.is_back for member in self.members)
            self.readmit()

    @property
    def _may_push(self) -> bool:
        push = self._last_push
        return self.pushes and not self.is_frozen and push is not None and not is_sharded(push.model)

    def _wait(self, deadline: float) -> None:
        """Waits a moment for lost servers. ConnectionError with their causes after the deadline."""
        is_late = time.monotonic() > deadline
        if is_late or all(member.failures > FRUITLESS_ATTEMPTS for member in self.members):
            how = f"and none was back within {self.timeout_s:g} s" if is_late else "since they fail again and again"
            raise ConnectionError(self._story(f"no vLLM server is left, {how} (their own output says why)"))
        if self.is_stopped:
            raise RuntimeError(GIVEN_UP)
        time.sleep(POLL_S)

    def _answering(self) -> list[ServerClient]:
        """The servers that are not lost or are back; begins to look at the others."""
        for member in self.members:
            look = member.looking
            if member.cause is not None and (look is None or (look.done() and look.exception() is not None)):
                member.looking = _THREADS.submit(_look, member)
        return [member for member in self.members if member.cause is None or member.is_back]

    def _each(self, members: Sequence[ServerClient], action: Callable[[ServerClient], Any]) -> None:
        """Calls `action` for each server, in threads for several. Servers whose call fails are lost, others in use."""

        def act(member: ServerClient) -> None:
            try:
                action(member)
                member.cause = None
            except _LOSSES as error:
                self.lose(member, error)

        if len(members) == 1:
            act(members[0])
            return
        futures = [_THREADS.submit(act, member) for member in members]
        wait(futures)
        for future in futures:
            future.result()

    def _loss(self, what: str) -> Exception:
        """The error to raise for lost servers: the only server's own error, or one that names each with its cause."""
        cause = self.members[0].cause
        if len(self.members) == 1 and isinstance(cause, Exception):
            return cause
        return ConnectionError(self._story(what))

    def _story(self, what: str) -> str:
        lost = [member for member in self.members if member.cause is not None]
        return f"{what}: " + "; ".join(f"{member.address}: {_cause(member)}" for member in lost)


def _difference(clients: Sequence[ServerClient]) -> str | None:
    """Why these servers cannot share rows; None if they can."""
    first = clients[0]
    for number, client in enumerate(clients):
        for earlier in clients[:number]:
            if client.info["start_id"] == earlier.info["start_id"]:
                return (
                    f"vllm_server_base_url has {earlier.address} and {client.address}, which are one server; name it "
                    "once"
                )
        for name in _SAME:
            if client.info.get(name) != first.info.get(name):
                return (
                    f"the vLLM servers differ: {first.address} has {name} {first.info.get(name)!r}, {client.address} "
                    f"{client.info.get(name)!r}, and a row must not depend on who samples it; start them alike"
                )
    return None


def _look(client: ServerClient) -> dict[str, Any]:
    time.sleep(POLL_S)  # between two looks
    info = client.look()
    client.look_at_workers()
    return info


def _cause(member: ServerClient) -> str:
    """Why a server was lost, and why it is not back."""
    look = member.looking.exception() if member.looking is not None and member.looking.done() else None
    return str(member.cause) + ("" if look is None else f"; later: {look}")
