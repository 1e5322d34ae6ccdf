"""Engine over one vLLM server or several with the same weights: rows are spread by load, and servers come and go."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import nn

from groupgrad import dist
from groupgrad.activity import sign_of_life
from groupgrad.concurrency.daemon_threads import DaemonThreads
from groupgrad.engines.base import Request, Sample, SamplingOptions, TicketSession
from groupgrad.errors import WeightsLost
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import GIVEN_UP, POLL_S, Address, ServerRefused, ServerTimeout, Stream
from groupgrad.integrations.vllm.media import encode
from groupgrad.integrations.vllm.vllm_params import FINISH_REASONS, row_fields, sampling_fields
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMEngine, policy_step_of
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

WAIT_S = 0.05
"""Longest that one `advance` of a session waits for a row to end."""

# Words by which vLLM reports that its engine has died; its server ends soon after.
_ENGINE_DIED = ("EngineDeadError", "EngineCore")


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


@dataclass(slots=True, eq=False)
class _Call:
    """A call for rows of one server."""

    server: ServerClient
    stream: Stream
    tickets: set[int]
    """Its rows that have not ended."""


class PoolSession(TicketSession):
    """A session that spreads rows over a pool's servers, and moves a lost server's rows to the remaining ones.

    `pushed` are the weight versions up to the present one, and grows with each push. Rows come from the version at the
    beginning of the session and, if a push keeps them, from later ones.
    """

    def __init__(self, pool: VLLMServerPool, options: SamplingOptions, pushed: Sequence[str]):
        super().__init__()
        self._pool, self._pushed, self._first = pool, pushed, len(pushed) - 1
        self._fields = sampling_fields(options, regex=pool.regex)
        self._calls: list[_Call] = []
        """Calls under way."""
        self._events: queue.SimpleQueue[tuple[_Call, dict[str, Any] | Exception | None]] = queue.SimpleQueue()
        """From the reading threads: a line of the answer, the exception that the call failed with, or None at its
        end."""
        self._encoded: dict[str, list[str]] = {}
        """Images as they are sent, by the key of their media."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Sends new requests and waits a moment; returns the rows that ended, in ticket order.

        ConnectionError with each server's cause if none is left, or TimeoutError if the only one samples nothing;
        ValueError for a row that vLLM refuses.
        """
        if not self._open:
            return []
        for call in [call for call in self._calls if call.server.cause is not None]:
            self._take_back(call)  # a push has lost its server
        self._pool.readmit()
        self._assign_unsent()
        ended: dict[int, Sample] = {}
        for call, event in self._next_events():
            if call not in self._calls:  # its rows were taken back
                continue
            if isinstance(event, dict):
                self._read_line(call, event, ended)
            elif isinstance(event, ServerRefused) and event.status == 400:
                raise ValueError(str(event))
            elif isinstance(event, ServerTimeout) and len(self._pool.members) == 1 and self._answers(call.server):
                raise TimeoutError(  # so there is no other start of it to wait for
                    f"the vLLM server {call.server.address} sampled no token for {self._pool.timeout_s:g} s; "
                    f"{open_rows({ticket: self._open[ticket] for ticket in call.tickets})}. It answers, so its workers "
                    "hang: look into its output, or raise vllm_server_timeout"
                )
            elif event is not None or call.tickets:
                story = f"sampling {len(call.tickets)} rows failed: {event or 'its answer ended before all rows had'}"
                self._lose(call.server, ConnectionError(story))
            else:
                self._calls.remove(call)
        for ticket in ended:
            del self._open[ticket]
        return sorted(ended.items())

    def abort(self, tickets: Iterable[int]) -> None:
        """Gives these rows up. A server samples them until no row of the same call is wanted."""
        aborted = set(tickets)
        super().abort(aborted)
        for call in [call for call in self._calls if call.tickets & aborted]:
            call.tickets -= aborted
            if not call.tickets:
                self._calls.remove(call)
                call.stream.close()

    def close(self) -> None:
        """Aborts rows that have not ended; the servers stop sampling them."""
        for call in list(self._calls):
            self._take_back(call)
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
        servers = self._pool.live
        loads = dict.fromkeys(servers, 0)
        for call in self._calls:
            loads[call.server] += sum(map(self._cost, call.tickets))
        tickets, self._unsent = sorted(self._unsent), []
        places = assign_rows(list(map(self._cost, tickets)), list(loads.values()))
        for number, server in enumerate(servers):
            if of_server := [ticket for ticket, place in zip(tickets, places) if place == number]:
                self.send(server, of_server)

    def _cost(self, ticket: int) -> int:
        """The most tokens that a row may sample, for the balance of loads."""
        return self._open[ticket].max_new_tokens

    def send(self, server: ServerClient, tickets: Sequence[int]) -> None:
        """Asks the server to sample these rows too."""
        prompts: dict[tuple[int, ...], int] = {}
        images: dict[str, list[str]] = {}
        rows = []
        for ticket in tickets:
            request = self._open[ticket]
            prompt = prompts.setdefault(tuple(request.prompt_ids), len(prompts))
            rows.append({"row": ticket, "prompt": prompt, **row_fields(request)})
            if request.media is not None:
                rows[-1]["images"] = key = request.media.key
                if key not in self._encoded:
                    self._encoded[key] = [encode(image) for image in request.media.images]
                images[key] = self._encoded[key]
        body = {"weight_version": self._pushed[-1], "sampling": self._fields, "rows": rows}
        body |= {"prompts": list(map(list, prompts)), "images": images}
        stream = Stream(server.address, "generate", body, timeout_s=self._pool.timeout_s)
        self._calls.append(_Call(server, stream, set(tickets)))
        threading.Thread(target=self._read, args=(self._calls[-1],), name="vllm-rows", daemon=True).start()

    def _read(self, call: _Call) -> None:
        """Makes the call, in a thread of its own, and queues its lines and its end."""
        try:
            for line in call.stream:
                sign_of_life()
                self._events.put((call, line))
            self._events.put((call, None))
        except Exception as error:  # raised or handled by the thread that waits
            self._events.put((call, error))

    def _next_events(self) -> list[tuple[_Call, dict[str, Any] | Exception | None]]:
        events = []
        try:
            events.append(self._events.get(timeout=WAIT_S))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def _read_line(self, call: _Call, line: dict[str, Any], ended: dict[int, Sample]) -> None:
        ticket = line.get("row")
        if ticket not in call.tickets:
            return  # tokens have come, or a row that was aborted
        if "error" in line:
            if any(word in line["error"] for word in _ENGINE_DIED):
                # The row stays open, and is sampled again after the end of this answer, which follows.
                return
            length = len(self._open[ticket].prompt_ids)
            raise ValueError(f"vLLM did not sample row {ticket} (a prompt of {length} tokens): {line['error']}")
        if line["finish_reason"] not in FINISH_REASONS:
            return  # aborted by the server: as for an engine that died
        call.tickets.remove(ticket)
        call.server.failures = 0
        steps = self._policy_steps(ticket, line["weight_versions"])
        ended[ticket] = Sample(
            line["ids"], FINISH_REASONS[line["finish_reason"]], line["logprobs"], policy_versions=steps
        )

    def _policy_steps(self, ticket: int, weight_versions: Sequence[tuple[str, int]]) -> list[int]:
        """The optimizer step of each token's weights. RuntimeError for weights that none of these rows may have."""
        allowed = self._pushed[self._first :]
        if any(version not in allowed for version, _ in weight_versions):
            found = " and ".join(repr(version) for version, _ in weight_versions)
            raise RuntimeError(
                f"row {ticket} was sampled from the weights {found}, not {' or '.join(map(repr, allowed))}"
            )
        return [policy_step_of(version) for version, count in weight_versions for _ in range(count)]

    def _answers(self, server: ServerClient) -> bool:
        try:
            return bool(server.look())
        except _LOSSES:
            return False

    def _lose(self, server: ServerClient, error: Exception) -> None:
        self._pool.lose(server, error)
        for call in [call for call in self._calls if call.server is server]:
            self._take_back(call)

    def _take_back(self, call: _Call) -> None:
        self._calls.remove(call)
        self._unsent.extend(call.tickets)
        call.stream.close()


def open_rows(requests: Mapping[int, Request]) -> str:
    """Names the rows that have not ended, by ticket, for error messages."""
    rows = [f"{ticket} (prompt of {len(request.prompt_ids)} tokens)" for ticket, request in sorted(requests.items())]
    return f"rows that have not ended: {', '.join(rows[:8])}" + (f" and {len(rows) - 8} more" if rows[8:] else "")


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
    return min((total + sum(loads[:count])) / count for count in range(1, len(loads) + 1))
