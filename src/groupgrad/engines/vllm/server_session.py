"""Rows under way on a vLLM server."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from groupgrad.engines.base import Request, Sample
from groupgrad.engines.vllm.http import Address, ServerRefused, Stream
from groupgrad.engines.vllm.media import encode
from groupgrad.engines.vllm.vllm_params import REASONS, row_fields
from groupgrad.types import Media

logger = logging.getLogger(__name__)

WAIT_S = 0.05
"""Longest that one `advance` waits for a row to end."""

FRUITLESS_ATTEMPTS = 3
"""Times that the server may fail one after another with no row ended in between."""

# Words by which vLLM says that its engine has died; its server ends soon after.
_DEAD = ("EngineDeadError", "EngineCore")


@dataclass(slots=True)
class _Call:
    """One call of `generate` under way."""

    open: set[int]
    """Tickets of rows that have not ended."""
    stream: Stream | None = None
    num_tokens: int = 0
    """That the server has sampled for anybody, as it said last."""
    is_given_up: bool = False


@dataclass(slots=True)
class _Event:
    """What a reading thread tells."""

    call: _Call
    line: dict[str, Any] | None = None
    error: Exception | None = None
    """Why the call failed; both None if its answer ended."""


@dataclass(slots=True)
class ServerSession:
    """Requests may come at any time; those that came since the last `advance` go to the server in one call.

    `recover` brings the server back, with the weights of `weight_version`, and raises if it cannot.
    """

    address: Address
    weight_version: str
    fields: dict[str, Any]
    recover: Callable[[str], None]
    timeout_s: float
    _requests: dict[int, Request] = field(default_factory=dict)
    """All that have not ended, by ticket."""
    _waiting: list[int] = field(default_factory=list)
    """Tickets that no call is under way for."""
    _calls: list[_Call] = field(default_factory=list)
    _events: queue.SimpleQueue[_Event] = field(default_factory=queue.SimpleQueue)
    _encoded: dict[str, list[str]] = field(default_factory=dict)
    """Images as they are sent, by the key of their media."""
    _num_submitted: int = 0
    _failures: int = 0
    _moved: float = field(default_factory=time.monotonic)
    """When a token was last sampled."""

    def submit(self, request: Request) -> int:
        """The ticket of a request that the next `advance` sends."""
        ticket = self._num_submitted
        self._num_submitted += 1
        self._requests[ticket] = request
        self._waiting.append(ticket)
        return ticket

    @property
    def num_open(self) -> int:
        """Requests submitted that have not ended."""
        return len(self._requests)

    def release(self, ticket: int) -> None:
        """Nothing is kept but what vLLM's prefix cache holds, so nothing happens."""

    def advance(self) -> list[tuple[int, Sample]]:
        """Send what has come, wait a moment; rows that ended, in ticket order.

        TimeoutError naming the rows if no token comes for `timeout_s`; ValueError for a row that vLLM refuses.
        """
        if not self._requests:
            return []
        if self._waiting:
            self._send()
        ended: dict[int, Sample] = {}
        failure: str | None = None
        for event in self._take():
            if event.line is not None:
                self._heed(event.call, event.line, ended)
            elif isinstance(event.error, ServerRefused) and event.error.status == 400:
                raise ValueError(str(event.error))
            elif event.error is not None or event.call.open:
                failure = failure or str(event.error or "its answer ended before all rows had")
                self._give_up(event.call)
        for ticket in ended:
            del self._requests[ticket]
        if ended:
            self._failures = 0
        if failure is not None:
            self._restore(failure)
        elif time.monotonic() - self._moved > self.timeout_s:
            raise TimeoutError(self._stalled())
        return sorted(ended.items())

    def close(self) -> None:
        """Give up rows that have not ended; the server stops sampling them."""
        for call in list(self._calls):
            self._give_up(call)
        self._requests.clear()
        self._waiting.clear()

    def _send(self) -> None:
        tickets, self._waiting = self._waiting, []
        prompts: dict[tuple[tuple[int, ...], str], int] = {}
        media: list[Media | None] = []
        rows = []
        for ticket in tickets:
            request = self._requests[ticket]
            name = tuple(request.prompt_ids), "" if request.media is None else request.media.key
            place = prompts.setdefault(name, len(prompts))
            if place == len(media):
                media.append(request.media)
            rows.append({"row": ticket, "prompt": place, **row_fields(request)})
        told = [list(ids) for ids, _ in prompts]
        body = {
            "weight_version": self.weight_version,
            "sampling": self.fields,
            "prompts": told,
            "rows": rows,
            **self._told_images(media),
        }
        call = _Call(set(tickets))
        self._calls.append(call)
        self._moved = time.monotonic()
        threading.Thread(target=self._read, args=(call, body), name="vllm-rows", daemon=True).start()

    def _told_images(self, media: list[Media | None]) -> dict[str, Any]:
        """What the server is told of images: each prompt's once, however many rows it has."""
        if not any(media):
            return {}
        images: list[str] = []
        places: dict[str, list[int]] = {}
        for item in media:
            if item is not None and item.key not in places:
                if item.key not in self._encoded:
                    self._encoded[item.key] = [encode(image) for image in item.images]
                places[item.key] = list(range(len(images), len(images) + len(item.images)))
                images += self._encoded[item.key]
        return {"images": images, "images_of": [[] if item is None else places[item.key] for item in media]}

    def _read(self, call: _Call, body: dict[str, Any]) -> None:
        """In a thread of its own: tell of each line, then of the end."""
        try:
            call.stream = Stream(self.address, "generate", body, timeout_s=self.timeout_s)
            if call.is_given_up:  # before there was anything to close
                call.stream.close()
                return
            for line in call.stream:
                self._events.put(_Event(call, line))
            self._events.put(_Event(call))
        except Exception as error:  # whatever it is, the thread that waits must know
            self._events.put(_Event(call, error=error))

    def _take(self) -> list[_Event]:
        events = []
        try:
            events.append(self._events.get(timeout=WAIT_S))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        # A call that was given up may still tell something.
        known = {id(call) for call in self._calls}
        return [event for event in events if id(event.call) in known]

    def _heed(self, call: _Call, line: dict[str, Any], ended: dict[int, Sample]) -> None:
        if "row" not in line:
            if line["tokens"] != call.num_tokens:
                call.num_tokens, self._moved = line["tokens"], time.monotonic()
            return
        ticket = line["row"]
        if ticket not in call.open:
            return
        if "error" in line:
            if any(word in line["error"] for word in _DEAD):
                # The row stays open: the end of the answer, which follows, has it sampled again.
                return
            length = len(self._requests[ticket].prompt_ids)
            raise ValueError(f"vLLM did not sample row {ticket} (a prompt of {length} tokens): {line['error']}")
        if line["weight_version"] != self.weight_version:
            raise RuntimeError(
                f"row {ticket} was sampled from the weights {line['weight_version']!r}, not {self.weight_version!r}"
            )
        if line["reason"] not in REASONS:
            return  # as above
        call.open.discard(ticket)
        self._moved = time.monotonic()
        ended[ticket] = Sample(line["ids"], REASONS[line["reason"]], line["logprobs"])

    def _give_up(self, call: _Call) -> None:
        self._calls.remove(call)
        call.is_given_up = True
        self._waiting.extend(sorted(call.open))
        if call.stream is not None:
            call.stream.close()

    def _restore(self, failure: str) -> None:
        """Bring the server back; all rows that it has lost are sent again by the next `advance`."""
        self._failures += 1
        num_rows = len(self._requests)
        if self._failures > FRUITLESS_ATTEMPTS:
            raise ConnectionError(
                f"the vLLM server {self.address} failed {self._failures} times with {num_rows} rows to sample and none "
                f"sampled in between; last: {failure}; {self._named()}. Its own output says why"
            )
        self.recover(f"sampling {num_rows} rows failed: {failure}; {self._named()}")
        self._moved = time.monotonic()

    def _stalled(self) -> str:
        return (
            f"the vLLM server {self.address} sampled no token for {self.timeout_s:g} s; {self._named()}. It answers, "
            "so its workers hang: look into its output, or raise vllm_server_timeout"
        )

    def _named(self) -> str:
        """Which rows have not ended, in words."""
        rows = [f"{ticket} (prompt of {len(r.prompt_ids)} tokens)" for ticket, r in sorted(self._requests.items())]
        named = ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
        return f"rows that have not ended: {named}"
