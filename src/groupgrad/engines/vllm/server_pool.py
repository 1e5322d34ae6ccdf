"""Engine over several vLLM servers with the same weights: rows are spread by load, and a server may come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.engines.base import Sample, SamplingOptions, TicketSession
from groupgrad.engines.vllm.client import VLLMServerEngine, another_trainer
from groupgrad.engines.vllm.http import GIVEN_UP, POLL_S, ServerRefused
from groupgrad.engines.vllm.server_session import FRUITLESS_ATTEMPTS, WAIT_S, ServerSession, open_rows
from groupgrad.engines.vllm.vllm_engine import Push, VLLMEngine
from groupgrad.engines.vllm.vllm_params import sampling_fields
from groupgrad.engines.vllm.wire import AS_LOADED
from groupgrad.errors import WeightsLost
from groupgrad.modeling.systems.sharding import is_sharded
from groupgrad.modeling.weights import drained_checkpoint_weights

logger = logging.getLogger(__name__)

PROBE_S = 10.0
"""Longest that a server and its workers may take to answer before weights are sent there."""

_SAME = ("dtype", "quantization", "logprobs_mode", "vllm")
"""Fields of `info` that all servers share: with others a row would depend on the server that samples it."""

_THREADS = DaemonThreads("vllm-servers")

_LOSSES = (ConnectionError, TimeoutError, ServerRefused)
"""Errors by which a server is lost."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool."""

    engine: VLLMServerEngine
    cause: str | None = None
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
    """Samples from several servers; each has an engine of its own, which pushes all weights to it.

    All of them have to be there at `connect`. From then on one that dies, hangs or refuses is lost: its rows go to the
    others. When it answers again it is given the weights, at once if this rank may push now, else by the next push.
    """

    def __init__(self, engines: Sequence[VLLMServerEngine]):
        self.members = [Member(engine) for engine in engines]
        super().__init__(engines[0].regex)
        self.timeout_s, self.pushes = engines[0].timeout_s, engines[0].pushes
        self._versions = {AS_LOADED, *(engine.base_version for engine in engines)}
        """Weight versions that a server may have without another trainer."""

    @property
    def is_stopped(self) -> bool:
        """True once training ends: waiting for vLLM fails."""
        return self.members[0].engine.is_stopped

    @is_stopped.setter
    def is_stopped(self, value: bool) -> None:
        for member in self.members:
            member.engine.is_stopped = value

    @property
    def live(self) -> list[Member]:
        """The servers that are not lost."""
        return [member for member in self.members if member.cause is None]

    def connect(self, model: nn.Module, *, num_tokens: int = 0, options: SamplingOptions | None = None) -> None:
        """Wait for all servers, and check that they serve this model and are alike.

        ConnectionError that names each server that did not come up; ValueError, with the values, for one that does not
        fit and for servers that differ.
        """
        self._each(self.members, lambda engine: engine.connect(model, num_tokens=num_tokens, options=options))
        if len(self.live) < len(self.members):
            raise ConnectionError(self._story("not all vLLM servers can be used"))
        problem = _difference([member.engine for member in self.members])
        if problem is not None:
            raise ValueError(problem)
        infos = [member.engine.info for member in self.members]
        self.max_model_len = min(member.engine.max_model_len for member in self.members)
        self.logprobs_mode = self.members[0].engine.logprobs_mode
        self.info = {**infos[0], "max_lora_rank": min(int(info.get("max_lora_rank") or 0) for info in infos)}

    def _push(self, push: Push) -> str:
        """Push to all servers that answer. ConnectionError, with each server's cause, if none does in time."""
        self.expect(push.weight_version)
        self._last_push = push
        self._versions.add(push.weight_version)
        for member in self.members:
            member.failures = 0
        deadline = time.monotonic() + self.timeout_s
        while self.pushes and not self._answering():
            self._wait(deadline)
        if is_sharded(push.model):
            self._push_sharded(push)
        elif self.pushes:
            self._push_to(self._answering(), push)
            while not self.live:
                self._wait(deadline)
                self._push_to(self._answering(), push)
        if not self.live:
            raise ConnectionError(self._story("no vLLM server took the weights"))
        return push.weight_version

    def _push_sharded(self, push: Push) -> None:
        """One server after another: a pass over sharded weights takes all ranks, which do not know who is lost."""
        answering, errors = self._answering() if self.pushes else [], []
        for member in self.members:
            if member in answering:
                try:
                    self._each([member], lambda engine: engine._push(push), in_threads=False)
                except Exception as error:  # after the passes for the other servers
                    errors.append(error)
            else:
                with drained_checkpoint_weights(push.model):
                    pass
        if errors:
            raise errors[0]

    def _push_to(self, members: Sequence[Member], push: Push) -> None:
        def act(engine: VLLMServerEngine) -> None:
            engine.look(PROBE_S)  # an engine's own push would wait for a dead server
            engine._push(push)

        self._each(members, act)

    def share_weight_version(self) -> None:
        """Collective. All ranks expect the weights that rank 0 has pushed, on the servers that took them."""
        mine = self._weight_version or "", [member.cause for member in self.members]
        weight_version, causes = dist.all_gather_objects(mine)[0]
        self.expect(weight_version)
        for member, cause in zip(self.members, causes):
            member.engine.expect(weight_version)
            member.cause = cause

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[PoolSession]:
        """A session over all servers; requests that have not ended when it is closed are aborted."""
        with closing(PoolSession(self, options, self.pushed)) as session:
            yield session

    def close(self) -> None:
        """Leave the servers; they keep their weights."""
        for member in self.members:
            member.engine.close()

    def lose(self, member: Member, cause: object) -> None:
        """Sample nothing on a server until it is back."""
        member.cause, member.look, member.failures = str(cause), None, member.failures + 1
        story = "vLLM server %s is lost, and %d of %d are left: %s"
        logger.warning(story, member.engine.address, len(self.live), len(self.members), cause)

    def readmit(self) -> None:
        """Use servers that are back, with the weights given to them; RuntimeError if they are another trainer's."""
        for member in self._answering():
            if member.look is None or member.cause is None or member.failures > FRUITLESS_ATTEMPTS:
                continue
            info, engine = member.look.result(), member.engine
            version = info["weight_version"] if info["complete"] else info["pending_version"]
            if info["complete"] and version == self._weight_version:
                member.cause = None
            elif info["start_id"] == engine.info.get("start_id") and self.pushes and version not in self._versions:
                raise another_trainer(engine.address, version, self._weight_version)
            elif self._may_push and self._last_push is not None:
                self._push_to([member], self._last_push)
            else:
                member.look = None  # it may have been given the weights when it is looked at again
            if member.cause is None:
                logger.warning("vLLM server %s is back", engine.address)

    def wait_for_one(self) -> None:
        """Return when a server can be used.

        WeightsLost if those that are back cannot be given these weights now. ConnectionError, with each server's cause,
        if none is back within `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        while not self.live:
            self._wait(deadline)
            is_any_back = any(member.is_back for member in self.members)
            self.readmit()
            if is_any_back and not self.live and not self._may_push:
                raise WeightsLost(self._story(f"no vLLM server has the weights {self._weight_version!r} any more"))

    @property
    def _may_push(self) -> bool:
        push = self._last_push
        return self.pushes and not self.is_frozen and push is not None and not is_sharded(push.model)

    def _wait(self, deadline: float) -> None:
        """Wait a moment for lost servers. ConnectionError with their causes after the deadline."""
        if all(member.failures > FRUITLESS_ATTEMPTS for member in self.members) or time.monotonic() > deadline:
            raise ConnectionError(self._story("no vLLM server is left"))
        if self.is_stopped:
            raise RuntimeError(GIVEN_UP)
        time.sleep(POLL_S)

    def _answering(self) -> list[Member]:
        """The servers that are not lost or are back; begins to look at the others."""
        for member in self.members:
            look = member.look
            if member.cause is not None and (look is None or (look.done() and look.exception() is not None)):
                if look is not None:
                    member.cause = str(look.exception())
                member.look = _THREADS.submit(_look, member.engine)
        return [member for member in self.members if member.cause is None or member.is_back]

    def _each(
        self, members: Sequence[Member], action: Callable[[VLLMServerEngine], Any], *, in_threads: bool = True
    ) -> None:
        """Call `action` for each server, at once in threads; where it fails the server is lost, or else used."""

        def act(member: Member) -> None:
            try:
                action(member.engine)
                member.cause = None
            except _LOSSES as error:
                self.lose(member, error)

        futures = [_THREADS.submit(act, member) for member in members if in_threads]
        wait(futures)
        for future in futures:
            future.result()
        for member in () if in_threads else members:
            act(member)

    def _story(self, what: str) -> str:
        causes = [f"{member.engine.address}: {member.cause}" for member in self.members if member.cause is not None]
        return f"{what}: " + "; ".join(causes)


@dataclass(slots=True)
class _Part:
    """The rows of a session that one server samples."""

    session: ServerSession
    tickets: dict[int, int] = field(default_factory=dict)
    """The pool's ticket of each open row, by the ticket that the server's session has given."""


class PoolSession(TicketSession):
    """A session that spreads rows over the servers of a pool, and those of a lost server over the others."""

    def __init__(self, pool: VLLMServerPool, options: SamplingOptions, pushed: Sequence[str]):
        super().__init__()
        self._pool, self._options, self._pushed = pool, options, pushed
        self._parts: dict[Member, _Part] = {}

    def advance(self) -> list[tuple[int, Sample]]:
        """Send new requests and wait a moment; returns the rows that ended, in ticket order.

        ConnectionError with each server's cause if none is left; ValueError for a row that vLLM refuses.
        """
        if not self._open:
            return []
        for member in [member for member in self._parts if member.cause is not None]:
            self._take_back(member)  # a push has lost it
        self._pool.readmit()
        self._spread()
        ended: dict[int, Sample] = {}
        for member, part in list(self._parts.items()):
            try:
                for ticket, sample in part.session.advance():
                    ended[part.tickets.pop(ticket)] = sample
                    member.failures = 0
            except _LOSSES as error:
                self._lose(member, error)
        for ticket in ended:
            del self._open[ticket]
        return sorted(ended.items())

    def close(self) -> None:
        """Abort rows that have not ended; the servers stop sampling them."""
        for part in self._parts.values():
            part.session.close()
        self._parts.clear()
        self._open.clear()
        self._unsent.clear()

    def _spread(self) -> None:
        """Hand the requests that no server has to those that are left."""
        while self._unsent:
            try:
                self._pool.wait_for_one()
            except ConnectionError as error:
                raise ConnectionError(f"{error}; {open_rows(self._open)}") from None
            parts = [part for member in self._pool.live if (part := self._part(member)) is not None]
            if not parts:
                continue
            tickets, self._unsent = sorted(self._unsent), []
            loads = [sum(map(self._cost, part.tickets.values())) for part in parts]
            for ticket, place in zip(tickets, spread(list(map(self._cost, tickets)), loads)):
                part = parts[place]
                part.tickets[part.session.submit(self._open[ticket])] = ticket

    def _cost(self, ticket: int) -> int:
        """The most tokens that a row may sample, for the balance of loads."""
        return self._open[ticket].max_new_tokens

    def _part(self, member: Member) -> _Part | None:
        """A server's part, begun at its first rows; None if the server is lost meanwhile."""
        if member not in self._parts:
            engine = member.engine
            try:
                engine.check(self._options)
            except _LOSSES as error:
                self._lose(member, error)
                return None
            fields = sampling_fields(self._options, regex=self._pool.regex)
            wait_s = WAIT_S / len(self._pool.members)
            self._parts[member] = _Part(
                ServerSession(engine.address, self._pushed, fields, _fail, self._pool.timeout_s, wait_s)
            )
        return self._parts[member]

    def _lose(self, member: Member, error: Exception) -> None:
        self._pool.lose(member, error)
        self._take_back(member)

    def _take_back(self, member: Member) -> None:
        part = self._parts.pop(member, None)
        if part is not None:
            self._unsent.extend(part.tickets.values())
            part.session.close()


def spread(costs: Sequence[int], loads: Sequence[int]) -> list[int]:
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


def _difference(engines: Sequence[VLLMServerEngine]) -> str | None:
    """Why these servers cannot share rows; None if they can."""
    first = engines[0]
    for number, engine in enumerate(engines):
        for earlier in engines[:number]:
            if engine.info["start_id"] == earlier.info["start_id"]:
                return (
                    f"vllm_server_base_url has {earlier.address} and {engine.address}, which are one server; name it "
                    "once"
                )
        for name in _SAME:
            if engine.info.get(name) != first.info.get(name):
                return (
                    f"the vLLM servers differ: {first.address} has {name} {first.info.get(name)!r}, {engine.address} "
                    f"{engine.info.get(name)!r}, and a row must not depend on who samples it; start them alike"
                )
    return None


def _look(engine: VLLMServerEngine) -> dict[str, Any]:
    time.sleep(POLL_S)  # between two looks
    return engine.look(PROBE_S)


def _fail(reason: str) -> None:
    """In place of an engine's `recover`: the server is lost."""
    raise ConnectionError(reason)
