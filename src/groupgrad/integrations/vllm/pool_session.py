"""Rows that vLLM servers sample: requests go out in batches, samples come back one by one, lost servers' rows move."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from groupgrad.activity import sign_of_life
from groupgrad.engines.base import Request, Sample, SamplingOptions, TicketSession
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import ServerRefused, Stream
from groupgrad.integrations.vllm.media import encode
from groupgrad.integrations.vllm.vllm_params import FINISH_REASONS, row_fields, sampling_fields
from groupgrad.integrations.vllm.vllm_policy import policy_step_of

if TYPE_CHECKING:
    from groupgrad.integrations.vllm.server_pool import VLLMServerPool

WAIT_S = 0.05
"""Longest that one `advance` of a session waits for a row to end."""

# Words by which vLLM reports that its engine has died; its server ends soon after.
_ENGINE_DIED = ("EngineDeadError", "EngineCore")


@dataclass(slots=True, eq=False)
class _Call:
    """A call for rows of one server."""

    server: ServerClient
    stream: Stream
    tickets: set[int]
    """Its rows that have not ended."""
    num_tokens: int = 0
    """Tokens that the server has sampled for all its clients, by its last heartbeat."""
    last_progress: float = field(default_factory=time.monotonic)
    """When a token was last sampled."""
    heard_at: float = 0.0
    """When a line last came."""


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
            elif event is not None or call.tickets:
                story = f"sampling {len(call.tickets)} rows failed: {event or 'its answer ended before all rows had'}"
                self._lose(call.server, ConnectionError(story))
            else:
                self._calls.remove(call)
        self._check_progress()
        for ticket in ended:
            del self._open[ticket]
        return sorted(ended.items())

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
        call.heard_at = time.monotonic()
        if "row" not in line:
            if line["num_tokens"] != call.num_tokens:
                call.num_tokens, call.last_progress = line["num_tokens"], call.heard_at
            return
        ticket = line["row"]
        if "error" in line:
            if any(word in line["error"] for word in _ENGINE_DIED):
                # The row stays open, and is sampled again after the end of this answer, which follows.
                return
            length = len(self._open[ticket].prompt_ids)
            raise ValueError(f"vLLM did not sample row {ticket} (a prompt of {length} tokens): {line['error']}")
        if line["finish_reason"] not in FINISH_REASONS:
            return  # aborted by the server: as for an engine that died
        call.tickets.remove(ticket)
        call.last_progress, call.server.failures = call.heard_at, 0
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

    def _check_progress(self) -> None:
        """Loses servers that answer and sample no token for `timeout_s`; TimeoutError if there is no other."""
        timeout_s = self._pool.timeout_s
        for call in list(self._calls):
            # A server that has been silent since then is left to the time limit of the call itself.
            if time.monotonic() - call.last_progress > timeout_s and call.heard_at > call.last_progress:
                error = TimeoutError(
                    f"the vLLM server {call.server.address} sampled no token for {timeout_s:g} s; "
                    f"{open_rows({ticket: self._open[ticket] for ticket in call.tickets})}. It answers, so its workers "
                    "hang: look into its output, or raise vllm_server_timeout"
                )
                if len(self._pool.members) == 1:
                    raise error  # it answers, so there is no other start of it to wait for
                self._lose(call.server, error)

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
