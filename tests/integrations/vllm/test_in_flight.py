"""Pushes of weights under rows that go on with them: which token is of which weights, and what the server keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sampling_thread import Sampling
from simulated_server import SimulatedServer, pool_of, pretend_vllm, servers_of
from waiting import until

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.integrations.vllm.http import ServerRefused, Stream, call
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy

OPTIONS = SamplingOptions(max_new_tokens=40, eos_ids=(1,))
ROWS = [Request([5, 6 + number // 2], seed=100 + number, max_new_tokens=40) for number in range(4)]


@pytest.fixture
def servers(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedServer]]:
    pretend_vllm(monkeypatch)
    for servers in servers_of(model, 2):
        for server in servers:
            server.engine.token_s = 0.02
        yield servers


def vary(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def check_tokens(server: SimulatedServer, samples: list[Sample], digests: list[int]) -> None:
    """Each token is that of the weights which are said to have sampled it; `digests` are of steps 0, 1, ..."""
    for row, sample in zip(ROWS, samples):
        assert sample.policy_versions is not None and len(sample.ids) == len(sample.policy_versions) == 40
        assert sample.policy_versions == sorted(sample.policy_versions)
        for number, (token, step) in enumerate(zip(sample.ids, sample.policy_versions)):
            model = server.engine.model
            server.engine.model = type("Weights", (), {"digest": digests[step]})()
            assert token == server.engine.token(row.prompt_ids, row.seed, number)
            server.engine.model = model


def test_each_token_of_a_row_names_the_weights_that_sampled_it(servers: list[SimulatedServer], model: Any) -> None:
    server = servers[0]
    engine = server.engine_of()
    policy, digests = VLLMPolicy(engine, model), []
    policy.refresh(0)
    digests.append(server.engine.model.digest)
    resets = server.engine.num_resets
    sampling = Sampling(policy, ROWS, OPTIONS)
    for step in (1, 2):
        time.sleep(0.2)
        vary(model)
        policy.refresh(step, keeps_rows=True)
        digests.append(server.engine.model.digest)
    samples = sampling.result()
    check_tokens(server, samples, digests)
    assert all(set(sample.policy_versions or ()) == {0, 1, 2} for sample in samples)
    assert server.engine.num_resets == resets, "the kept rows' keys and values are there"
    # A push without rows drops what was computed from earlier weights, and rows of earlier versions are refused.
    first = engine.pushed[0]
    policy.refresh(3)
    assert server.engine.num_resets == resets + 1
    body = {"weight_version": first, "sampling": {}, "prompts": [], "rows": []}
    with pytest.raises(ServerRefused, match="not '0-"):
        call(server.address, "generate", body, timeout_s=5.0)
    assert {step for sample in policy.sample(ROWS, OPTIONS) for step in sample.policy_versions or ()} == {3}


def test_rows_that_arrive_during_a_push_wait_for_its_weights(servers: list[SimulatedServer], model: Any) -> None:
    server = servers[0]
    engine = server.engine_of()
    engine.connect(model)
    version = engine.push(model, 0)
    body = {"weight_version": "1-b", "tensors": [], "timeout_s": 5.0, "keeps_rows": True}
    call(server.address, "start", body, timeout_s=5.0)
    assert not server.engine.may_sample.is_set()
    rows = {"weight_version": version, "sampling": {}, "prompts": [[5]]}
    rows["rows"] = [{"row": 0, "prompt": 0, "seed": 7, "max_tokens": 2}]
    lines: list[Any] = []
    late = threading.Thread(target=lambda: lines.append(call(server.address, "generate", rows, timeout_s=10.0)))
    late.start()
    until(lambda: 7 in server.engine.salts)
    assert server.engine.salts[7] == "1-b", "none of its keys and values is of earlier weights"
    with pytest.raises(ServerRefused):  # vLLM's own routes and other versions are refused as ever
        call(server.address, "generate", {**rows, "weight_version": "9-x"}, timeout_s=5.0)
    engine.push(model, 1, keeps_rows=True)  # which ends the push that was left unfinished
    late.join(10.0)
    assert server.engine.may_sample.is_set() and lines[0]["weight_versions"] == [[engine.weight_version, 2]]


def test_rows_that_an_unfinished_push_has_paused_end_after_the_next_one(
    servers: list[SimulatedServer], model: Any
) -> None:
    """A trainer has died in its push; the next one, in which nothing is sampled, would wait for rows to end."""
    server = servers[0]
    engine = server.engine_of()
    rows = {"weight_version": engine.push(model, 0), "sampling": {}, "prompts": [[5]]}
    rows["rows"] = [{"row": 0, "prompt": 0, "seed": 7, "max_tokens": 500}]
    lines: list[Any] = []
    early = threading.Thread(target=lambda: lines.extend(Stream(server.address, "generate", rows, timeout_s=10.0)))
    early.start()
    until(lambda: 7 in server.engine.salts)
    body = {"weight_version": "1-b", "tensors": [], "timeout_s": 5.0, "keeps_rows": True}
    call(server.address, "start", body, timeout_s=5.0)
    server.engine.token_s = 0.0
    VLLMPolicy(engine, model).refresh(1)
    early.join(10.0)
    assert lines[-1]["weight_versions"][-1][0] == engine.weight_version
    assert server.engine.may_sample.is_set() and len(engine.sample(ROWS, OPTIONS)) == 4
    resets = server.engine.num_resets
    VLLMPolicy(engine, model).refresh(2)
    assert server.engine.num_resets == resets + 1


@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_vllm_that_does_not_pause_keeps_its_weights(
    servers: list[SimulatedServer], model: Any, keeps_rows: bool
) -> None:
    server = servers[0]
    engine = server.engine_of(timeout_s=0.3)
    version = engine.push(model, 0)

    async def never(**_: Any) -> None:
        await __import__("asyncio").sleep(60.0)

    server.engine.pause_generation = never  # type: ignore[method-assign]
    server.engine.may_sample.clear()
    with pytest.raises(ServerRefused, match=r"vLLM did not pause within 0\.3 s; weights cannot change"):
        engine.push(model, 1, keeps_rows=keeps_rows)
    info = call(server.address, "info", timeout_s=5.0)
    assert info["complete"] and info["weight_version"] == version
    until(server.engine.may_sample.is_set)


def test_a_push_waits_for_the_rows_that_are_sampled_and_for_no_row_that_was_given_up(
    servers: list[SimulatedServer], model: Any
) -> None:
    server = servers[0]
    policy = VLLMPolicy(server.engine_of(), model)
    policy.refresh(0)
    digests = [server.engine.model.digest]
    sampling = Sampling(policy, ROWS, OPTIONS)
    until(lambda: server.engine.num_running == len(ROWS))
    vary(model)
    another = server.engine_of()
    another.push(model, 1)
    check_tokens(server, sampling.result(), digests)
    server.engine.token_s = 0.2  # eight seconds a row
    with another.session(OPTIONS) as session:
        session.submit(ROWS[0])
        session.advance()
    started = time.monotonic()
    another.push(model, 2)
    assert time.monotonic() - started < 4.0


def sampling_on(servers: list[SimulatedServer], model: Any) -> tuple[VLLMPolicy, Sampling]:
    """A policy on several servers, and its rows, of which each server has some."""
    pool = pool_of(servers)
    pool.connect(model, num_tokens=48, options=OPTIONS)
    policy = VLLMPolicy(pool, model)
    policy.refresh(0)
    sampling = Sampling(policy, ROWS, OPTIONS)
    until(lambda: all(server.engine.salts for server in servers))
    return policy, sampling


def test_rows_of_a_server_that_a_push_loses_are_sampled_by_the_others(
    servers: list[SimulatedServer], model: Any
) -> None:
    policy, sampling = sampling_on(servers, model)
    digests = [servers[0].engine.model.digest]

    async def fails(**_: Any) -> None:
        raise RuntimeError("no pause here")

    servers[1].engine.pause_generation = fails  # type: ignore[method-assign]
    vary(model)
    policy.refresh(1, keeps_rows=True)
    digests.append(servers[0].engine.model.digest)
    check_tokens(servers[0], sampling.result(), digests)
    assert sorted(servers[0].engine.sampled) == [100, 101, 102, 103]
