"""Training with servers that start late, die, or do not fit, and trainers that die or are interrupted."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from real_vllm import SETTINGS, Served, push_by, vary
from vllm_training import LARGE, logged, make_trainer
from waiting import until

from groupgrad.integrations.vllm.http import Address
from groupgrad.integrations.vllm.server_pool import PoolSession
from groupgrad.integrations.vllm.weight_transport import SharedMemoryTransport
from groupgrad.integrations.vllm.wire import Bucket

HERE = Path(__file__)
LONG = Dataset.from_dict({"prompt": ["a", "b" * 600]})


@pytest.fixture(scope="module")
def served(large_server: Callable[[], Served]) -> Served:
    return large_server()


@pytest.fixture
def train(make_model: Any, tokenizer: Any, tmp_path: Path, served: Served) -> Iterator[Callable[..., Any]]:
    """`train(**config fields)`: a trainer that samples from the server, or with `policy=` of another model."""
    made: list[Any] = []

    def make(*, policy: Any = None, **settings: Any) -> Any:
        policy = vary(make_model(seed=3, **LARGE), 3) if policy is None else policy
        where = {"vllm_mode": "server", "vllm_server_port": served.port}
        made.append(make_trainer(policy, tokenizer, tmp_path / "run", **{**where, **settings}))
        made[-1].engine.engine.members[0].bucket_bytes = 40_000
        return made[-1]

    yield make
    for trainer in made:
        trainer.vllm_policy.close()


class KillsAt(SharedMemoryTransport):
    """Kills and restarts the server during the push of one policy step, once."""

    def __init__(self, served: Served, version: int):
        self._served, self._start, self.killed = served, f"{version}-", False

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        if weight_version.startswith(self._start) and bucket.first > 0 and not self.killed:
            self.killed = True
            self._served.kill()
            self._served.start()
        super().send(address, weight_version, bucket, timeout_s=timeout_s)


def kill_while_sampling(served: Served, monkeypatch: pytest.MonkeyPatch, *, when: Callable[[], bool]) -> list[str]:
    """Kill and restart the server while it has rows and none has ended; returns the names of the sampling threads."""
    seen: list[str] = []
    send = PoolSession.send

    def sends(session: PoolSession, server: Any, tickets: Any) -> None:
        if seen or not when():
            send(session, server, tickets)
            return
        seen.append(threading.current_thread().name)
        for worker in served.workers():
            worker.suspend()
        send(session, server, tickets)
        time.sleep(0.5)
        served.kill()
        served.start()

    monkeypatch.setattr(PoolSession, "send", sends)
    return seen


def test_a_run_survives_servers_that_come_late_and_die(
    train: Any, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = train(max_steps=4)
    undisturbed.train()

    served.kill()
    threading.Timer(1.0, served.start).start()
    trainer = train(max_steps=4)
    seen = kill_while_sampling(served, monkeypatch, when=lambda: trainer.state.global_step == 1)
    transport = KillsAt(served, 2)
    push_by(trainer.engine.engine.members[0], transport)
    trainer.train()
    assert seen and transport.killed
    assert trainer.watch.policy_steps == [0, 1, 2, 3] and trainer.watch.gap < 1e-3
    assert trainer.watch.texts == undisturbed.watch.texts
    assert logged(trainer, "reward") == logged(undisturbed, "reward")
    assert logged(trainer, "loss") == pytest.approx(logged(undisturbed, "loss"), rel=1e-3, abs=1e-4)


def test_a_generation_batch_ahead_whose_server_died_is_sampled_anew(
    train: Any, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = train(max_steps=4, rollout_ahead=1)
    trainer.watch.trainer = None
    batches_ahead: list[str] = []

    def is_second_batch_ahead() -> bool:
        if "ahead" in (name := threading.current_thread().name):
            batches_ahead.append(name)
        return len(batches_ahead) == 2

    seen = kill_while_sampling(served, monkeypatch, when=is_second_batch_ahead)
    with caplog.at_level(logging.WARNING, "groupgrad"):
        trainer.train()
    assert len(seen) == 1 and "rollouts-ahead" in seen[0]
    anew = [record.message for record in caplog.records if "is sampled anew" in record.message]
    assert len(anew) == 1 and anew[0].startswith("generation batch 2 ") and "no vLLM server has the weights" in anew[0]
    # Batches 1 and 3 are from the weights one step before, batch 2 from its own.
    assert logged(trainer, "sampling/policy_lag") == [0, 1, 0, 1]
    differences = logged(trainer, "sampling/sampling_logp_difference/mean")
    assert max(differences[0], differences[2]) < 1e-3 < min(differences[1], differences[3])
    assert trainer.state.global_step == 4


def start(model: Path, run: Path, settings: dict[str, Any], stop_at: str) -> subprocess.Popen[bytes]:
    """A trainer in a process of its own; `stop_at` is explained in `trainer_worker.main`."""
    path = str(HERE.parents[1] / "helpers"), os.environ.get("PYTHONPATH")
    return subprocess.Popen(
        [
            sys.executable,
            str(HERE.with_name("trainer_worker.py")),
            *map(str, (model, run, json.dumps(settings), stop_at)),
        ],
        env={**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


@pytest.fixture
def policy_dir(make_model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    vary(make_model(seed=3, **LARGE), 3).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_trainer_that_was_killed_in_a_push_goes_on_with_the_running_server(
    train: Any, served: Served, policy_dir: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1}
    process = start(policy_dir, tmp_path / "run", {**settings, "vllm_server_port": served.port}, stop_at="3")
    until((tmp_path / "reached").exists, timeout_s=240.0)
    process.kill()
    process.wait()
    pid = served.process and served.process.pid

    trainer = train(**settings)
    trainer.train(resume_from_checkpoint=True)
    assert served.process is not None and served.process.pid == pid and served.process.poll() is None
    assert trainer.watch.policy_steps == [3, 4] and trainer.watch.gap < 1e-3
    assert max(logged(trainer, "sampling/sampling_logp_difference/mean")) < 1e-3
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2, 3, 4, 5]


def test_an_interrupt_ends_a_run_whose_server_hangs(
    train: Any, served: Served, policy_dir: Path, tmp_path: Path
) -> None:
    settings = {"max_steps": 6, "rollout_ahead": 1, "vllm_server_port": served.port}
    process = start(policy_dir, tmp_path / "run", settings, stop_at="ahead")
    try:
        until((tmp_path / "reached").exists, timeout_s=240.0)
        for worker in served.workers():
            worker.suspend()
        (tmp_path / "go").touch()
        time.sleep(2.0)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60.0)
        assert time.monotonic() - began < 15.0
        assert process.returncode == 130, said[-2000:]
    finally:
        process.kill()
        for worker in served.workers():
            worker.resume()
    # The server still works.
    trainer = train(max_steps=1)
    trainer.train()
    assert trainer.watch.gap < 1e-3


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"num_hidden_layers": 3}, {}, r"another model: num_hidden_layers 2 \(the policy has 3\)"),
        ({}, {"temperature": 0.7}, "tells log-probs as raw_logprobs.*start it with --logprobs-mode processed_logprobs"),
        ({}, {"generation_kwargs": {"temperatur": 1}}, "temperatur"),
        ({}, {"arguments": {"train_dataset": LONG}}, "600 tokens.*512 positions"),
    ],
)
def test_a_server_of_something_else_is_refused_before_anything_is_sampled(
    changes: dict[str, Any], settings: dict[str, Any], words: str, train: Any, served: Served, make_model: Any
) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=words):
        train(policy=make_model(**{**LARGE, **changes}), **settings)
    assert time.monotonic() - began < 20.0


def test_an_adapter_that_the_server_cannot_take_is_merged_or_refused(train: Any, caplog: Any) -> None:
    peft = pytest.importorskip("peft")
    arguments = {"peft_config": peft.LoraConfig(r=16, target_modules=["q_proj"])}
    with pytest.raises(ValueError, match=r"rank 16, and the vLLM server .* takes ranks up to 8; set 'auto'"):
        train(arguments=arguments, vllm_lora_updates="adapter")
    with caplog.at_level(logging.INFO, "groupgrad"):
        trainer = train(arguments=arguments, max_steps=1)
        trainer.train()
    assert "is merged into the weights that vLLM gets" in caplog.text and trainer.watch.gap < 1e-3
