"""Session over a vLLM server: requests go out in batches, samples come back one by one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupgrad.activity import sign_of_life
from groupgrad.engines.base import Request, Sample, TicketSession
from groupgrad.engines.vllm.http import Address, ServerRefused, Stream
from groupgrad.engines.vllm.media import encode
from groupgrad.engines.vllm.vllm_engine import policy_step_of
from groupgrad.engines.vllm.vllm_params import FINISH_REASONS, row_fields

logger = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that one `advance` waits for a row to end."""

FRUITLESS_ATTEMPTS = 3
"""Consecutive failures of the server that are tolerated while no row ends."""

# Words by which vLLM reports that its engine has died; its server ends soon after.
_ENGINE_DIED = ("EngineDeadError", "EngineCore")


class ServerSession(TicketSession):
    """A session whose requests may come at any time; each `advance` sends the new ones in one call.

    `pushed` are the weight versions up to the present one, and grows with each push. Rows come from the version at the
    session's start and, if a push keeps them, from later ones. `recover(reason)` brings the server back with the
    present version, and raises if it cannot.
    """

    def __init__(
        self,
        address: Address,
        pushed: Sequence[str],
        fields: dict[str, Any],
        recover: Callable[[str], None],
        timeout_s: float,
        wait_s: float = WAIT_S,
    ):
        super().__init__()
        self._wait_s = wait_s
        self._address, self._fields = address, fields
        self._pushed, self._first = pushed, len(pushed) - 1
        self._recover, self._timeout_s = recover, timeout_s
        self._calls: dict[Stream, set[int]] = {}
        """Calls of `generate` under way, with the tickets of their rows that have not ended."""
        self._events: queue.SimpleQueue[tuple[Stream, dict[str, Any] | Exception | None]] = queue.SimpleQueue()
        """From the reading threads: a line of the answer, the exception that the call failed with, or None at its
        end."""
        self._encoded: dict[str, list[str]] = {}
        """Images as they are sent, by the key of their media."""
        self._failures = 0
        self._num_tokens = 0
        """Tokens that the server has sampled for all its clients, by its last heartbeat."""
        self._last_progress = time.monotonic()
        """When a token was last sampled."""
        self._heard_at = 0.0
        """When a line last came."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Send new requests and wait a moment; returns the rows that ended, in ticket order.

        TimeoutError naming the rows if no token comes for `timeout_s`; ValueError for a row that vLLM refuses.
        """
        if not self._open:
            return []
        if self._unsent:
            self._send()
        ended: dict[int, Sample] = {}
        failure: str | None = None
        for call, event in self._next_events():
            if isinstance(event, dict):
                self._read_line(self._calls[call], event, ended)
            elif isinstance(event, ServerRefused) and event.status == 400:
                raise ValueError(str(event))
            elif event is not None or self._calls[call]:
                failure = failure or str(event or "its answer ended before all rows had")
                self._close_call(call)
            else:
                del self._calls[call]
        for ticket in ended:
            del self._open[ticket]
        if ended:
            self._failures = 0
        if failure is not None:
            self._restore(failure)
        elif time.monotonic() - self._last_progress > self._timeout_s and self._heard_at > self._last_progress:
            # A server that has been silent since then is left to the time limit of the call itself.
            raise TimeoutError(
                f"the vLLM server {self._address} sampled no token for {self._timeout_s:g} s; "
                f"{open_rows(self._open)}. It answers, so its workers hang: look into its output, or raise "
                "vllm_server_timeout"
            )
        return sorted(ended.items())

    def close(self) -> None:
        """Abort rows that have not ended; the server stops sampling them."""
        for call in list(self._calls):
            self._close_call(call)
        self._open.clear()
        self._unsent.clear()

    def _send(self) -> None:
        tickets, self._unsent = self._unsent, []
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
        call = Stream(self._address, "generate", body, timeout_s=self._timeout_s)
        self._calls[call] = set(tickets)
        self._last_progress = time.monotonic()
        threading.Thread(target=self._read, args=(call,), name="vllm-rows", daemon=True).start()

    def _read(self, call: Stream) -> None:
        """Make the call, in a thread of its own, and queue its lines and its end."""
        try:
            for line in call:
                sign_of_life()
                self._events.put((call, line))
            self._events.put((call, None))
        except Exception as error:  # raised or handled by the thread that waits
            self._events.put((call, error))

    def _next_events(self) -> list[tuple[Stream, dict[str, Any] | Exception | None]]:
        events = []
        try:
            events.append(self._events.get(timeout=self._wait_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            # A closed call may still queue events.
            return [event for event in events if event[0] in self._calls]

    def _read_line(self, open_tickets: set[int], line: dict[str, Any], ended: dict[int, Sample]) -> None:
        self._heard_at = time.monotonic()
        if "row" not in line:
            if line["num_tokens"] != self._num_tokens:
                self._num_tokens, self._last_progress = line["num_tokens"], time.monotonic()
            return
        ticket = line["row"]
        if ticket not in open_tickets:
            return
        if "error" in line:
            if any(word in line["error"] for word in _ENGINE_DIED):
                # The row stays open, and is sampled again after the end of this answer, which follows.
                return
            length = len(self._open[ticket].prompt_ids)
            raise ValueError(f"vLLM did not sample row {ticket} (a prompt of {length} tokens): {line['error']}")
        if line["finish_reason"] not in FINISH_REASONS:
            return  # aborted by the server: as for an engine that died
        open_tickets.discard(ticket)
        self._last_progress = time.monotonic()
        steps = self._policy_steps(ticket, line["weight_versions"])
        ended[ticket] = Sample(
            line["ids"], FINISH_REASONS[line["finish_reason"]], line["logprobs"], policy_versions=steps
        )

    def _policy_steps(self, ticket: int, weight_versions: Sequence[tuple[str, int]]) -> list[int]:
        """The optimizer step of each token's weights. RuntimeError for weights that no row of this session may have."""
        allowed = self._pushed[self._first :]
        if any(version not in allowed for version, _ in weight_versions):
            found = " and ".join(repr(version) for version, _ in weight_versions)
            raise RuntimeError(
                f"row {ticket} was sampled from the weights {found}, not {' or '.join(map(repr, allowed))}"
            )
        return [policy_step_of(version) for version, count in weight_versions for _ in range(count)]

    def _close_call(self, call: Stream) -> None:
        """Abort a call; its open rows are sent again by the next `advance`."""
        self._unsent.extend(sorted(self._calls.pop(call)))
        call.close()

    def _restore(self, failure: str) -> None:
        """Bring the server back. ConnectionError if it fails again and again."""
        self._failures += 1
        num_rows = len(self._open)
        if self._failures > FRUITLESS_ATTEMPTS:
            raise ConnectionError(
                f"the vLLM server {self._address} failed {self._failures} times with {num_rows} rows to sample and "
                f"none sampled in between; last: {failure}; {open_rows(self._open)}. Its own output says why"
            )
        self._recover(f"sampling {num_rows} rows failed: {failure}; {open_rows(self._open)}")
        self._last_progress = time.monotonic()


def open_rows(requests: Mapping[int, Request]) -> str:
    """Names the rows that have not ended, by ticket, for error messages."""
    rows = [f"{ticket} (prompt of {len(request.prompt_ids)} tokens)" for ticket, request in sorted(requests.items())]
    return f"rows that have not ended: {', '.join(rows[:8])}" + (f" and {len(rows) - 8} more" if rows[8:] else "")
