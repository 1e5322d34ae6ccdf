"""Repeats steps of a run and compares runs, number by number; see docs/replay.md."""

from __future__ import annotations

from groupgrad.apps.replay.bisecting import Bisection, bisect
from groupgrad.apps.replay.replaying import Replay, ReplayError, replay

__all__ = ["Bisection", "Replay", "ReplayError", "bisect", "replay"]
