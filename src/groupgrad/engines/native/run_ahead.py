"""Decides how many decode steps run before the host reads their tokens.

Reading a token costs time: a GPU's host waits for the step, and Python between two steps of a small model on a CPU
takes as long as the step. But only the host ends rows, and gives their slots to sequences that wait.
"""

# Steps that may run ahead of the host:
#
#   none             while the host examines every token: a stop string may end a row, or new requests are gathering
#                    and may be admitted after the next step.
#   compiled steps   see the ends of rows themselves. They run until a budget or the room in the slots is used up, or
#                    `RUN_SECONDS` are over, or rows that have ended have wasted as much time as the host's work on them
#                    takes (`idle_tokens`).
#   recorded steps   see no ends. They are launched for a fraction of the tokens that rows have (`unread_steps`), so
#                    that at most this fraction is computed behind the ends of rows and discarded.
#   no further than  a row's end, while sequences wait for its slot, or if it has a recurrent state that a request will
#                    continue: the state must be the one after the last token.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from groupgrad.engines.native.scheduler import Scheduler

AHEAD_FRACTION = 1 / 8
"""Tokens computed unread, as a fraction of the tokens that rows have."""


@dataclass(slots=True)
class Pace:
    """Seconds that a session's last decode steps took."""

    run_seconds: float
    """Several steps may run for about this long before the host reads their tokens."""
    step_seconds: float
    """Seconds of one step; equal to `run_seconds` until a step is measured, so that the first run has a single step."""
    host_seconds: float = 0.0
    """Seconds that the host works between two runs of steps."""


class RunAhead(NamedTuple):
    """The number of decode steps that may run before the host reads their tokens."""

    steps: int
    """Steps before the scheduler is needed, unless a row ends earlier; 1: the host reads every token."""
    unread_steps: int
    """Steps, at most `steps`, that may be launched without knowing whether rows have ended."""
    idle_tokens: int
    """Tokens that may be computed behind the ends of rows, by steps that see these ends."""


def run_ahead(scheduler: Scheduler, pace: Pace, *, has_stops: bool) -> RunAhead:
    """Returns the number of steps that the running rows may take ahead of the host.

    `has_stops` means that stop strings end rows.
    """
    running, cache = scheduler.running, scheduler.cache
    if has_stops or scheduler.gathering:
        return RunAhead(steps=1, unread_steps=1, idle_tokens=0)
    budget, longest, num_sampled = running[0].request.max_new_tokens, 0, 0
    for row in running:
        num_tokens = len(row.sampled_ids)
        budget = min(budget, row.request.max_new_tokens - num_tokens)
        longest = max(longest, len(row.history_ids) + num_tokens)
        num_sampled += num_tokens
    room = cache.suffixes.slot_size - longest + 1
    steps = max(1, min(budget, room, int(pace.run_seconds / pace.step_seconds)))
    keeps_state = bool(cache.state_tokens) and any(row.request.keep for row in running)
    if steps == 1 or scheduler.waiting or keeps_state:
        return RunAhead(steps, unread_steps=1, idle_tokens=0)
    unread_steps = int(AHEAD_FRACTION * num_sampled / len(running))
    idle_tokens = min(len(running), int(len(running) * pace.host_seconds / pace.step_seconds))
    return RunAhead(steps, max(1, min(steps, unread_steps)), idle_tokens)
