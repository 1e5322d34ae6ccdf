"""Two processes whose rows on one vLLM server go on over pushes of the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import run_on
from simulated_server import SimulatedServer, pretend_vllm, servers_of

SCRIPT = Path(__file__).with_name("in_flight_ranks.py")


@pytest.fixture
def server(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedServer]:
    pretend_vllm(monkeypatch)
    for servers in servers_of(make_model(seed=9), 1):
        servers[0].engine.token_s = 0.05
        yield servers[0]


@pytest.mark.slow
def test_rows_of_all_ranks_go_on_over_a_push(
    server: SimulatedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine
    digests: dict[int, int] = {}
    renamed = engine.update_weight_version

    async def recorded(version: str) -> None:
        digests[int(version.partition("-")[0])] = engine.model.digest
        await renamed(version)

    monkeypatch.setattr(engine, "update_weight_version", recorded)
    run_on(2, SCRIPT, tmp_path, server.url, timeout_s=200)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))

    assert first["pushed"] == second["pushed"] and [int(version[0]) for version in first["pushed"]] == [0, 1, 2, 3, 4]
    assert torch.equal(first["weights"], second["weights"])
    for rank in (first, second):
        assert any(len(set(row["steps"])) > 1 for row in rank["rows"]), "a push has met rows of each rank"
        for row in rank["rows"]:
            assert row["steps"] == sorted(row["steps"]) and len(row["steps"]) == len(row["ids"]) == 12
            for number, (token, step) in enumerate(zip(row["ids"], row["steps"])):
                engine.model = SimpleNamespace(digest=digests[step])
                assert token == engine.token(row["prompt"], row["seed"], number), "it names the weights that drew it"
    lags = [entry["sampling/policy_lag"] for entry in first["log"] if "sampling/policy_lag" in entry]
    assert len(lags) == 5 and max(lags) <= 2
