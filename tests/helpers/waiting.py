"""Waits for conditions, and finds free ports."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Waits until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
