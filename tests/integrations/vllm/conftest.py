"""A simulated vLLM server for the tests of what speaks with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from simulated_server import SimulatedServer, pretend_vllm, servers_of


@pytest.fixture
def server(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedServer]:
    pretend_vllm(monkeypatch)
    for (server,) in servers_of(model, 1):
        yield server
