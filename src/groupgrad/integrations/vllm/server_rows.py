"""Rows that one vLLM server samples: requests go out in batches, samples come back one by one."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad.activity import sign_of_life
from groupgrad.engines.base import Request, Sample
from groupgrad.integrations.vllm.http import Address, ServerRefused, Stream
from groupgrad.integrations.vllm.media import encode
from groupgrad.integrations.vllm.vllm_params import FINISH_REASONS, row_fields
from groupgrad.integrations.vllm.vllm_policy import policy_step_of

# Words by which vLLM reports that its engine has died; its server ends soon after.
_ENGINE_DIED = ("EngineDeadError", "EngineCore")


class ServerRows:
    """Rows of a session on one server, by the session's tickets; each `send` is one call.

    `pushed` are the weight versions up to the present one, and grows with each push. Rows come from the version at the
    construction and, if a push keeps them, from later ones. `advance` waits `wait_s` at most.
    """

    def __init__(
        self, address: Address, pushed: Sequence[str], fields: dict[str, Any], *, timeout_s: float, wait_s: float
    ):
        self._address, self._fields = address, fields
        self._pushed, self._first = pushed, len(pushed) - 1
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self.requests: dict[int, Request] = {}
        """Rows that have not ended."""
        self._calls: dict[Stream, set[int]] = {}
        """Calls of `generate` under way, with the tickets of their rows that have not ended."""
        self._events: queue.SimpleQueue[tuple[Stream, dict[str, Any] | Exception | None]] = queue.SimpleQueue()
        """From the reading threads: a line of the answer, the exception that the call failed with, or None at its
        end."""
        self._encoded: dict[str, list[str]] = {}
        """Images as they are sent, by the key of their media."""
        self._failure: str | None = None
        """Why a call has failed."""
        self._num_tokens = 0
        """Tokens that the server has sampled for all its clients, by its last heartbeat."""
        self._last_progress = time.monotonic()
        """When a token was last sampled."""
        self._heard_at = 0.0
        """When a line last came."""

    def send(self, requests: Mapping[int, Request]) -> None:
        """Asks the server to sample these rows too."""
        self.requests.update(requests)
        prompts: dict[tuple[int, ...], int] = {}
        images: dict[str, list[str]] = {}
        rows = []
        for ticket, request in requests.items():
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
        self._calls[call] = set(requests)
        self._last_progress = time.monotonic()
        threading.Thread(target=self._read, args=(call,), name="vllm-rows", daemon=True).start()

    def advance(self) -> dict[int, Sample]:
        """Waits a moment; returns the rows that ended.

        ConnectionError if the server does not sample the others; TimeoutError naming them if no token comes for
        `timeout_s`; ValueError for a row that vLLM refuses.
        """
        if not self.requests:
            return {}
        ended: dict[int, Sample] = {}
        for call, event in () if self._failure else self._next_events():
            if isinstance(event, dict):
                self._read_line(self._calls[call], event, ended)
            elif isinstance(event, ServerRefused) and event.status == 400:
                raise ValueError(str(event))
            elif event is not None or self._calls[call]:
                self._failure = self._failure or str(event or "its answer ended before all rows had")
            else:
                del self._calls[call]
        for ticket in ended:
            del self.requests[ticket]
        if self._failure and not ended:
            raise ConnectionError(f"sampling {len(self.requests)} rows failed: {self._failure}")
        if time.monotonic() - self._last_progress > self._timeout_s and self._heard_at > self._last_progress:
            # A server that has been silent since then is left to the time limit of the call itself.
            raise TimeoutError(
                f"the vLLM server {self._address} sampled no token for {self._timeout_s:g} s; "
                f"{open_rows(self.requests)}. It answers, so its workers hang: look into its output, or raise "
                "vllm_server_timeout"
            )
        return ended

    def close(self) -> None:
        """Aborts rows that have not ended; the server stops sampling them."""
        for call in self._calls:
            call.close()
        self._calls.clear()
        self.requests.clear()

    def _read(self, call: Stream) -> None:
        """Makes the call, in a thread of its own, and queues its lines and its end."""
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
            return events

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
            length = len(self.requests[ticket].prompt_ids)
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
        """The optimizer step of each token's weights. RuntimeError for weights that none of these rows may have."""
        allowed = self._pushed[self._first :]
        if any(version not in allowed for version, _ in weight_versions):
            found = " and ".join(repr(version) for version, _ in weight_versions)
            raise RuntimeError(
                f"row {ticket} was sampled from the weights {found}, not {' or '.join(map(repr, allowed))}"
            )
        return [policy_step_of(version) for version, count in weight_versions for _ in range(count)]


def open_rows(requests: Mapping[int, Request]) -> str:
    """Names the rows that have not ended, by ticket, for error messages."""
    rows = [f"{ticket} (prompt of {len(request.prompt_ids)} tokens)" for ticket, request in sorted(requests.items())]
    return f"rows that have not ended: {', '.join(rows[:8])}" + (f" and {len(rows) - 8} more" if rows[8:] else "")
