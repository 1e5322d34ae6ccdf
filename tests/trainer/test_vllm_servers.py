"""Training that samples from simulated vLLM servers over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from simulated_server import SimulatedServer, pretend_vllm, servers_of

from groupgrad.integrations.vllm.http import store_new_key


@pytest.fixture
def servers(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedServer]]:
    pretend_vllm(monkeypatch)
    yield from servers_of(make_model(seed=9), 3)


class Reward:
    """A reward of the tokens alone, which keeps them, and ends a server in the first of its calls."""

    __name__ = "reward"

    def __init__(self, victim: SimulatedServer | None = None):
        self.texts: list[list[int]] = []
        self._victim = victim

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.texts += completion_ids
        if self._victim is not None:
            self._victim.kill()
        return [float(ids[0] % 5) for ids in completion_ids]


@pytest.fixture
def train(make_trainer: Any, make_model: Any) -> Any:
    def run(reward: Reward, **where: Any) -> Any:
        trainer = make_trainer(
            model=make_model(seed=3),
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list("abcdefghi")}),
            per_device_train_batch_size=12,
            learning_rate=1e-3,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_timeout=10.0,
            vllm_importance_sampling_correction=False,
            **where,
        )
        trainer.train()
        trainer.vllm_policy.close()
        return trainer

    return run


def test_a_run_goes_on_when_one_of_its_servers_dies(servers: list[SimulatedServer], train: Any) -> None:
    alone, reward = Reward(), Reward(victim=servers[2])
    train(alone, vllm_server_base_url=servers[0].url)
    counts = [len(server.engine.sampled) for server in servers]
    assert counts == [36, 0, 0]
    urls = [server.url for server in servers]
    trainer = train(reward, vllm_server_base_url=urls)
    assert trainer.state.global_step == 3 and reward.texts == alone.texts
    assert [len(server.engine.sampled) for server in servers] == [52, 16, 4]


def test_a_script_without_a_key_finds_that_of_a_server_on_its_machine(
    servers: list[SimulatedServer], train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    server = servers[0]
    server.kill()
    key, error = store_new_key(server.port)
    assert error is None
    monkeypatch.setenv("VLLM_API_KEY", key)
    server.start()
    monkeypatch.delenv("VLLM_API_KEY")
    train(Reward(), vllm_server_port=server.port)
    assert len(server.engine.sampled) == 36
