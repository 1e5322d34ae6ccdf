"""Engine over one vLLM server or several with the same weights: rows are spread by load, and servers come and go."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.engines.base import Sample, SamplingOptions, TicketSession
from groupgrad.errors import WeightsLost
from groupgrad.integrations.vllm.client import ServerClient, another_trainer
from groupgrad.integrations.vllm.http import GIVEN_UP, POLL_S, Address, ServerRefused, ServerTimeout
from groupgrad.integrations.vllm.server_rows import ServerRows, open_rows
from groupgrad.integrations.vllm.vllm_params import PROCESSED, sampling_fields
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMEngine
from groupgrad.integrations.vllm.weight_sender import PolicyWeights, whole_pass
from groupgrad.integrations.vllm.weight_transport import GROUP_PORT
from groupgrad.integrations.vllm.wire import AS_LOADED
from groupgrad.models.shards import is_sharded

logger = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that one `advance` of a session waits for a row to end."""

FRUITLESS_ATTEMPTS = 3
"""Consecutive losses of a server that are tolerated while no row of it ends and no push begins."""

GRACE_S = 30.0
"""Longest that a rank waits for another rank to begin a push to a server that was started again."""

_SAME = ("dtype", "quantization", "logprobs_mode", "vllm")
"""Fields of `info` that all servers share: with others a row would depend on the server that samples it."""

_THREADS = DaemonThreads("vllm-servers")

_LOSSES = (ConnectionError, TimeoutError, ServerRefused)
"""Errors by which a server is lost."""


@dataclass(slots=True, eq=False)
class PooledServer:
    """A server of the pool."""

    client: ServerClient
    cause: Exception | str | None = None
    """Why it is lost, so that nothing is sampled there; None while it serves."""
    failures: int = 0
    """Losses since the last push or since a row of it ended."""
    look: Future[dict[str, Any]] | None = None
    """A look, in a thread, whether a lost server is back; its result is the server's `info`."""

    @property
    def is_back(self) -> bool:
        """True for a lost server that answers again."""
        return self.look is not None and self.look.done() and self.look.exception() is None


class VLLMServerPool(VLLMEngine):
    """Samples from vLLM servers, one or several, and pushes all weights to each; `vllm_params` says of which
    distribution their log-probs are.

    Call `connect` first, and `push` or `push_adapter` whenever the policy has changed. With several ranks each has an
    engine; only the one with `pushes=True` sends weights, the others learn their version by `share_weight_version`.

    All servers have to be there at `connect`. From then on one that dies, hangs or refuses is lost: its rows go to the
    others. When it answers again it is given the weights, at once if this rank may push now, else by the next push. So
    the policy must not change during sampling unless `is_frozen` is set. Where no server is left, the engine waits for
    one. `timeout_s` bounds every wait: for a server, for a push, for a token. `client_options` are those of
    `ServerClient`.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        timeout_s: float = 240.0,
        regex: str | None = None,
        pushes: bool = True,
        group_port: int = GROUP_PORT,
        **client_options: Any,
    ):
        super().__init__(regex)
        self.timeout_s, self.pushes = timeout_s, pushes
        self.members = [  # servers of one machine need ports of their own
            PooledServer(ServerClient(address, timeout_s=timeout_s, group_port=group_port + number, **client_options))
            for number, address in enumerate(addresses)
        ]
        self.base_version = f"base-{uuid.uuid4().hex[:8]}"
        """Weight version of the weights below an adapter, which do not change in training."""
        self._versions = {AS_LOADED, self.base_version}
        """Weight versions that a server may have without another trainer."""

    @property
    def live(self) -> list[PooledServer]:
        """The servers that are not lost."""
        return [member for member in self.members if member.cause is None]

    @property
    def info(self) -> dict[str, Any]:
        """The `info` of the first server, with the smallest `max_lora_rank` of all servers."""
        infos = [member.client.info for member in self.members]
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
        clients = [member.client for member in self.members]
        problem = _difference(clients)
        if problem is not None:
            raise ValueError(problem)
        self.max_model_len = min(int(client.info["max_model_len"]) for client in clients)
        self.logprobs_mode = str(clients[0].info.get("logprobs_mode", PROCESSED))

    def _push(self, push: Push) -> str:
        """Pushes to all servers that answer.

        ConnectionError, with each server's cause, if none does in time or all refuse; one server's own error.
        ValueError for an adapter on a sharded model.
        """
        if push.kind == "adapter" and is_sharded(push.model):
            raise ValueError("an adapter on a sharded model (ZeRO-3, FSDP) cannot be sent alone; merge it instead")
        if not self.pushes:
            self._push_sharded(push, [])
            return self._weight_version or ""
        if not all(member.client.info for member in self.members):
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
        except BaseException:
            if is_sharded(push.model):
                self._push_sharded(push, [])  # the passes that the other ranks make, which send nothing
            raise
        if is_sharded(push.model):
            self._push_sharded(push, self._answering())
        else:
            self._push_to(self._answering(), push)
            while not self.live and not all(map(self._is_in_vain, self.members)):
                self._wait(deadline)
                self._push_to(self._answering(), push)
        if not self.live:
            raise self._loss("no vLLM server took the weights")
        return push.weight_version

    def _push_sharded(self, push: Push, answering: Sequence[PooledServer]) -> None:
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

    def _push_to(self, members: Sequence[PooledServer], push: Push) -> None:
        def act(client: ServerClient) -> None:
            if len(self.members) > 1:  # others could go on, while this push would wait for workers that hang
                client.look_at_workers()
            client.push(push, self.base_version)

        self._each(members, act)

    def _is_in_vain(self, member: PooledServer) -> bool:
        """True for a lost server where another attempt at a push would change nothing."""
        is_refused = isinstance(member.cause, (ServerRefused, ServerTimeout)) and not member.client.is_restarted()
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
            member.client.close()

    def lose(self, member: PooledServer, cause: Exception | str) -> None:
        """Stops using a server until it is back."""
        member.cause, member.look, member.failures = cause, None, member.failures + 1
        story = "vLLM server %s is lost, and %d of %d are left: %s"
        logger.warning(story, member.client.address, len(self.live), len(self.members), cause)

    def readmit(self) -> None:
        """Uses servers that are back, with the weights given to them; RuntimeError if they are another trainer's."""
        for member in self._answering():
            if member.look is None or member.cause is None or member.failures > FRUITLESS_ATTEMPTS:
                continue
            info, client = member.look.result(), member.client
            version = info["weight_version"] if info["complete"] else info["pending_version"]
            if info["complete"] and version == self._weight_version:
                member.cause = None
            elif info["start_id"] == client.info.get("start_id") and self.pushes and version not in self._versions:
                raise another_trainer(client.address, version, self._weight_version)
            elif self._may_push and self._last_push is not None:
                logger.warning("vLLM server %s has lost the weights; pushing %s", client.address, self._weight_version)
                self._push_to([member], self._last_push)
            else:
                member.look = None  # it may have been given the weights when it is looked at again
            if member.cause is None:
                logger.warning("vLLM server %s is back", client.address)

    def wait_for_one(self) -> None:
        """Returns when a server can be used.

        WeightsLost if those that are back cannot be given these weights now: while `is_frozen`, alone on a sharded
        model, or where another rank pushes and does not notice, having nothing to sample. ConnectionError, with each
        server's cause, if none is back within `timeout_s`.
        """
        deadline, patience_s = time.monotonic() + self.timeout_s, min(self.timeout_s, GRACE_S)
        back_since: float | None = None
        while not self.live:
            self._wait(deadline)
            infos = [member.look.result() for member in self.members if member.is_back and member.look is not None]
            self.readmit()
            if self.live or self._may_push:
                continue
            if infos and back_since is None:
                back_since, deadline = time.monotonic(), math.inf
            if any(not info["complete"] and info["pending_version"] == self._weight_version for info in infos):
                patience_s = self.timeout_s  # another rank is about to give it the weights
            can_wait = not self.pushes and not self.is_frozen
            if back_since is not None and (not can_wait or time.monotonic() - back_since > patience_s):
                why = f", and the rank that pushes has not given it them within {patience_s:g} s" if can_wait else ""
                raise WeightsLost(self._story(f"no vLLM server has the weights {self._weight_version!r} any more{why}"))

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

    def _answering(self) -> list[PooledServer]:
        """The servers that are not lost or are back; begins to look at the others."""
        for member in self.members:
            look = member.look
            if member.cause is not None and (look is None or (look.done() and look.exception() is not None)):
                member.look = _THREADS.submit(_look, member.client)
        return [member for member in self.members if member.cause is None or member.is_back]

    def _each(self, members: Sequence[PooledServer], action: Callable[[ServerClient], Any]) -> None:
        """Calls `action` for each server, in threads for several. Servers whose call fails are lost, others in use."""

        def act(member: PooledServer) -> None:
            try:
                action(member.client)
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
        return f"{what}: " + "; ".join(f"{member.client.address}: {_cause(member)}" for member in lost)


class PoolSession(TicketSession):
    """A session that spreads rows over a pool's servers, and moves a lost server's rows to the remaining ones."""

    def __init__(self, pool: VLLMServerPool, options: SamplingOptions, pushed: Sequence[str]):
        super().__init__()
        self._pool, self._pushed = pool, pushed
        self._fields = sampling_fields(options, regex=pool.regex)
        self._parts: dict[PooledServer, ServerRows] = {}

    def advance(self) -> list[tuple[int, Sample]]:
        """Sends new requests and waits a moment; returns the rows that ended, in ticket order.

        ConnectionError with each server's cause if none is left, or TimeoutError if the only one samples nothing;
        ValueError for a row that vLLM refuses.
        """
        if not self._open:
            return []
        for member in [member for member in self._parts if member.cause is not None]:
            self._take_back(member)  # a push has lost it
        self._pool.readmit()
        self._assign_unsent()
        ended: dict[int, Sample] = {}
        for member, rows in list(self._parts.items()):
            try:
                samples = rows.advance()
                member.failures = 0 if samples else member.failures
                ended |= samples
            except _LOSSES as error:
                if isinstance(error, TimeoutError) and len(self._pool.members) == 1:
                    raise  # it answers, so there is no other start of it to wait for
                self._lose(member, error)
        for ticket in ended:
            del self._open[ticket]
        return sorted(ended.items())

    def close(self) -> None:
        """Aborts rows that have not ended; the servers stop sampling them."""
        for rows in self._parts.values():
            rows.close()
        self._parts.clear()
        self._open.clear()
        self._unsent.clear()

    def _assign_unsent(self) -> None:
        """Sends the requests that no server has to the remaining servers."""
        if not self._unsent:
            return
        try:
            self._pool.wait_for_one()
        except ConnectionError as error:
            raise ConnectionError(f"{error}; {open_rows(self._open)}") from None
        parts = list(map(self._rows_of, self._pool.live))
        tickets, self._unsent = sorted(self._unsent), []
        loads = [sum(map(self._cost, rows.requests)) for rows in parts]
        places = assign_rows(list(map(self._cost, tickets)), loads)
        for number, rows in enumerate(parts):
            requests = {ticket: self._open[ticket] for ticket, place in zip(tickets, places) if place == number}
            if requests:
                rows.send(requests)

    def _cost(self, ticket: int) -> int:
        """The most tokens that a row may sample, for the balance of loads."""
        return self._open[ticket].max_new_tokens

    def _rows_of(self, member: PooledServer) -> ServerRows:
        """A server's rows, begun at its first."""
        if member not in self._parts:
            pool, address = self._pool, member.client.address
            limits = {"timeout_s": pool.timeout_s, "wait_s": WAIT_S / len(pool.members)}
            self._parts[member] = ServerRows(address, self._pushed, self._fields, **limits)
        return self._parts[member]

    def _lose(self, member: PooledServer, error: Exception) -> None:
        self._pool.lose(member, error)
        self._take_back(member)

    def _take_back(self, member: PooledServer) -> None:
        rows = self._parts.pop(member, None)
        if rows is not None:
            self._unsent.extend(rows.requests)
            rows.close()


def assign_rows(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
    """The server of each row, by its index in `loads`, such that the servers' loads become even.

    Rows that follow each other stay together, as those of a group share a prompt.
    """
    places: list[int] = []
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for position, server in enumerate(order):
        rest = costs[len(places) :]
        room = _level(sum(rest), [loads[index] for index in order[position:]]) - loads[server]
        for cost in rest:
            if room < cost / 2 and server != order[-1]:
                break
            places.append(server)
            room -= cost
    return places


def _level(total: int, loads: Sequence[int]) -> float:
    """The load up to which the servers, from the least loaded on, are filled by `total`."""
    level = float(loads[0] + total)
    for count in range(2, len(loads) + 1):
        level = min(level, (total + sum(loads[:count])) / count)
    return level


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


def _cause(member: PooledServer) -> str:
    """Why a server was lost, and why it is not back."""
    look = member.look.exception() if member.look is not None and member.look.done() else None
    return str(member.cause) + ("" if look is None else f"; later: {look}")
