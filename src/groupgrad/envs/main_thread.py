"""Detects tools that work only on the main thread, such as tools that limit their time by `signal.alarm`."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from groupgrad.concurrency.deadline import DeadlinePassed, call_within
from groupgrad.concurrency.workers import Outcome, late

logger = logging.getLogger(__name__)

_COMPLAINTS = ("only works in main thread", "There is no current event loop in thread")
"""Parts of Python's errors: of `signal.signal`, and of `asyncio.get_event_loop`."""
_MAX_CHARS = 400
"""Longest result that counts as such an error; a tool may find the same words in a page or in the output of code."""


@dataclass(slots=True)
class MainThreadNeed:
    """The finding that one tool works on the main thread alone."""

    is_needed: bool | None = None
    """None until a call has failed on another thread and was repeated on the main one."""

    def calls_here(self) -> bool:
        """True if the tool needs the main thread and this is it."""
        return bool(self.is_needed) and threading.current_thread() is threading.main_thread()

    def may_help(self, content: Any, name: str) -> bool:
        """True if a call with this result is to be repeated here. Warns once if this is not the main thread."""
        if self.is_needed is False or not _complains(content):
            return False
        if threading.current_thread() is threading.main_thread():
            return True
        self.is_needed = False
        logger.warning(
            "the tool '%s' works on the main thread alone (%s), and this run makes its rollouts on another one; set "
            "rollout_ahead=0 and start the training on the main thread, or take signals out of the tool: "
            "tool_timeout_s bounds its time",
            name,
            content,
        )
        return False

    def learn(self, repeated: Any, name: str, complaint: Any) -> None:
        """Notes if the repeated call went well; the next calls then run on the main thread at once."""
        if self.is_needed is None:
            self.is_needed = not _complains(repeated)
            if self.is_needed:
                logger.warning(
                    "the tool '%s' works on the main thread alone (%s): its calls run there, one after another, while "
                    "nothing is sampled. Without signals in the tool they run side by side, and tool_timeout_s bounds "
                    "their time",
                    name,
                    complaint,
                )


def call_here(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    timeout_s: float,
    then: Callable[[Any], Any],
    name: str,
) -> Outcome:
    """Runs `then(function(**arguments))` on this thread, interrupted after `timeout_s`. Raises KeyboardInterrupt."""
    started = time.monotonic()
    message = (
        f"the tool '{name}' did not end within tool_timeout_s={timeout_s:g} and could not be interrupted on the main "
        "thread; have it end by itself"
    )
    try:
        value = call_within(timeout_s, lambda: then(functools.partial(function, **arguments)()), message)
    except DeadlinePassed:
        return late(timeout_s, time.monotonic() - started)
    except (Exception, SystemExit) as error:
        return Outcome(error=error, seconds=time.monotonic() - started)
    return Outcome(value, seconds=time.monotonic() - started)


def _complains(content: Any) -> bool:
    is_short = isinstance(content, str) and len(content) <= _MAX_CHARS
    return is_short and any(complaint in content for complaint in _COMPLAINTS)
