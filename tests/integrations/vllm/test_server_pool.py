"""Several servers: rows spread by load, servers that die, hang and come back, and lists that cannot work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_checks import drained
from simulated_server import SimulatedServer, pool_of, pretend_vllm, servers_of
from waiting import until

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.errors import WeightsLost
from groupgrad.integrations.vllm import server_pool
from groupgrad.integrations.vllm.http import Address, call
from groupgrad.integrations.vllm.server_pool import VLLMServerPool, assign_rows
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy
from groupgrad.models.weights import checkpoint_weights

OPTIONS = SamplingOptions(max_new_tokens=8, eos_ids=(1,))
ROWS = [Request([5, 6 + number // 4], seed=100 + number, max_new_tokens=8) for number in range(24)]


@pytest.fixture
def servers(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedServer]]:
    pretend_vllm(monkeypatch)
    yield from servers_of(model, 3)


@pytest.fixture
def pool(servers: list[SimulatedServer], model: Any) -> VLLMServerPool:
    """Three servers with the weights of the model."""
    pool = pool_of(servers)
    pool.connect(model, num_tokens=16, options=OPTIONS)
    pool.push(model, 0)
    return pool


@pytest.fixture
def expected(servers: list[SimulatedServer], pool: VLLMServerPool) -> list[Sample]:
    """The samples of one server that has all rows."""
    alone = servers[0].engine_of()
    alone.expect(pool.weight_version)
    return alone.sample(ROWS, OPTIONS)


def sampled(servers: list[SimulatedServer]) -> list[int]:
    """Rows that ended on each server."""
    return [len(server.engine.sampled) for server in servers]


def test_rows_are_spread_and_do_not_depend_on_who_samples_them(
    servers: list[SimulatedServer], pool: VLLMServerPool, expected: list[Sample]
) -> None:
    before = sampled(servers)
    assert pool.sample(ROWS, OPTIONS) == expected
    assert [after - count for after, count in zip(sampled(servers), before)] == [8, 8, 8]
    digests = {server.engine.model.digest for server in servers}
    assert len(digests) == 1 and pool.weight_version.startswith("0-")


def test_rows_that_come_later_go_to_the_server_with_the_least_to_do(
    servers: list[SimulatedServer], pool: VLLMServerPool
) -> None:
    servers[1].engine.token_s = 0.2
    with pool.session(OPTIONS) as session:
        for row in ROWS[:3]:
            session.submit(row)
        while session.num_open > 1:
            session.advance()
        assert sampled(servers) == [1, 0, 1]
        for row in ROWS[3:7]:
            session.submit(row)
        while session.num_open > 1:
            session.advance()
        assert sampled(servers) == [3, 0, 3]


def test_rows_that_are_aborted_end_on_their_servers(
    servers: list[SimulatedServer], pool: VLLMServerPool, expected: list[Sample]
) -> None:
    """At once where a server has no other row of the call; one that has not been sent never starts."""
    for server in servers:
        server.engine.token_s = 0.1
    before = sampled(servers)
    with pool.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in ROWS[:4]]
        session.advance()
        session.abort([*tickets[:3], session.submit(ROWS[4])])
        samples = drained(session)
    assert samples == {tickets[3]: expected[3]}
    until(lambda: not any(server.engine.num_running for server in servers))
    assert sum(sampled(servers)) - sum(before) <= 2


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    loads=st.lists(st.integers(0, 300), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_loads_become_even(costs: list[int], loads: list[int]) -> None:
    after = list(loads)
    places = assign_rows(costs, loads)
    for cost, place in zip(costs, places):
        after[place] += cost
    assert len(places) == len(costs)
    used = [after[place] for place in set(places)]
    # No server that got rows has more than any other but by a row or two, which cannot be cut.
    assert max(used) - min(after) <= 2 * max(costs)
    if len(set(costs)) == 1 and not any(loads):  # rows that follow each other stay together
        assert sum(place != following for place, following in pairwise(places)) < len(loads)


def test_the_rows_of_servers_that_die_and_hang_go_to_the_others(
    servers: list[SimulatedServer], model: Any, expected: list[Sample], caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(servers, timeout_s=1.0)
    pool.connect(model)
    pool.push(model, 0)
    dies, hangs, lives = servers
    dies.engine.token_s = lives.engine.token_s = 0.02
    with caplog.at_level(logging.WARNING), pool.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in ROWS]
        samples = dict(session.advance())
        hangs.engine.worker.is_hung.set()
        dies.kill()
        samples.update(drained(session))
    assert [samples[ticket] for ticket in tickets] == expected
    assert [member.cause is None for member in pool.members] == [False, False, True]
    assert len(lives.engine.sampled) >= 16
    first, second = pool.members[:2]
    assert first.cause is not None and second.cause is not None
    assert "is not there" in str(first.cause) or "ended" in str(first.cause)
    assert f"vLLM server {dies.url} is lost, and 2 of 3 are left" in caplog.text

    # The next generation batch: new weights for the one that is left, without waiting for the others.
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    started = time.monotonic()
    pool.push(model, 1)
    assert time.monotonic() - started < 1.0 and len(pool.live) == 1

    # They are back, one as a new process without weights, one with old weights.
    hangs.engine.worker.is_hung.clear()
    dies.start()
    until_back(pool)
    assert {server.engine.model.digest for server in servers} == {lives.engine.model.digest}
    before = sampled(servers)
    pool.sample(ROWS, OPTIONS)
    assert [after - count for after, count in zip(sampled(servers), before)] == [8, 8, 8]


def until_back(pool: VLLMServerPool, timeout_s: float = 10.0) -> None:
    """Have sessions look for lost servers until all serve."""
    until(lambda: len(pool.live) == len(pool.members) or pool.sample(ROWS[:1], OPTIONS) is None, timeout_s)


def test_a_server_that_comes_back_in_the_middle_of_a_generation_batch_samples_again(
    servers: list[SimulatedServer], pool: VLLMServerPool
) -> None:
    first = servers[0]
    with pool.session(OPTIONS) as session:
        first.kill()
        for row in ROWS[:6]:
            session.submit(row)
        drained(session)
        first.start()
        deadline = time.monotonic() + 10.0
        while not first.engine.sampled:  # turns of an agent, say
            assert time.monotonic() < deadline
            session.submit(ROWS[0])
            session.advance()
        drained(session)
    assert len(pool.live) == 3


@pytest.mark.slow
def test_when_all_servers_are_gone_each_is_named_with_its_cause(servers: list[SimulatedServer], model: Any) -> None:
    pool = pool_of(servers, timeout_s=1.0)
    pool.connect(model)
    pool.push(model, 0)
    for server in servers[1:]:
        server.kill()
    servers[0].engine.worker.is_hung.set()
    with pytest.raises(ConnectionError, match="no vLLM server is left") as caught:
        pool.sample(ROWS, OPTIONS)
    story = str(caught.value)
    assert (
        all(server.url in story for server in servers) and "rows that have not ended: 0 (prompt of 2 tokens)" in story
    )
    assert story.count("Connection refused") == 2 and ("within 1 s" in story or "for 1 s" in story)
    with pytest.raises(ConnectionError, match="no vLLM server is left"):
        pool.push(model, 1)


@pytest.mark.slow
def test_when_all_servers_are_gone_one_that_comes_back_gets_all_rows(
    servers: list[SimulatedServer], pool: VLLMServerPool, expected: list[Sample]
) -> None:
    with pool.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in ROWS]
        for server in servers:
            server.kill()
        restart = threading.Timer(0.5, servers[2].start)
        restart.start()
        samples = drained(session)
    restart.join()
    assert [samples[ticket] for ticket in tickets] == expected and sampled(servers)[2] == 24


@pytest.mark.slow
def test_weights_that_the_policy_has_left_behind_are_not_pushed(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any
) -> None:
    policy = VLLMPolicy(pool, model)
    with policy.freeze_weights():
        servers[0].kill()
        servers[0].start()
        assert len(pool.sample(ROWS, OPTIONS)) == 24 and pool.members[0].cause is not None
        for server in servers[1:]:
            server.kill()
            server.start()
        with pytest.raises(WeightsLost, match=r"no vLLM server has the weights '0-\w+' any more: http"):
            pool.sample(ROWS, OPTIONS)
    policy.refresh(1)
    assert len(pool.live) >= 1 and len(pool.sample(ROWS, OPTIONS)) == 24


def test_sampling_that_is_given_up_waits_for_no_server(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any
) -> None:
    policy = VLLMPolicy(pool, model)
    for server in servers:
        server.kill()
    threading.Timer(0.3, policy.stop).start()
    with policy.freeze_weights(), pytest.raises(RuntimeError, match="given up, since training ends"):
        policy.sample(ROWS, OPTIONS)


def test_a_rank_that_does_not_push_follows_the_one_that_does(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any, expected: list[Sample]
) -> None:
    other = pool_of(servers, pushes=False)
    other.connect(model)
    other.expect(pool.weight_version)
    assert other.sample(ROWS, OPTIONS) == expected
    servers[1].kill()
    assert other.sample(ROWS, OPTIONS) == expected and other.members[1].cause is not None
    servers[1].start()
    pool.sample(ROWS, OPTIONS)
    until_back(pool)
    until_back(other)


def test_servers_of_another_trainer_are_an_error(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any
) -> None:
    version = servers[1].engine_of().push(model, 0)
    with pytest.raises(RuntimeError, match=f"{servers[1].url} has the weights '{version}'.* another trainer uses"):
        for _ in range(50):
            pool.sample(ROWS, OPTIONS)
            time.sleep(0.05)


def test_a_push_that_one_server_refuses_is_the_others(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(servers[2].engine.worker.receiver, "load", refuse)
    pool.push(model, 1)
    assert [member.cause is None for member in pool.members] == [True, True, False]
    assert "out of memory" in str(pool.members[2].cause)
    assert len(pool.sample(ROWS, OPTIONS)) == 24


def test_sharded_weights_are_gathered_once_for_each_server(
    servers: list[SimulatedServer], pool: VLLMServerPool, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks take part in each pass, and do not know which servers rank 0 has lost, be it all of them."""
    from groupgrad.integrations.vllm import weight_sender

    passes: list[int] = []

    def counted(policy: Any, *, shapes_only: bool = False, **options: Any) -> Iterator[Any]:
        yield from checkpoint_weights(policy, shapes_only=shapes_only, **options)
        if not shapes_only:
            passes.append(1)

    for module in (weight_sender, server_pool):
        monkeypatch.setattr(module, "is_sharded", lambda model: True)
    monkeypatch.setattr(weight_sender, "checkpoint_weights", counted)
    servers[1].kill()
    pool.lose(pool.members[1], "it was killed")
    pool.push(model, 1)
    assert len(passes) == 3 and [member.cause is None for member in pool.members] == [True, False, True]
    pool_of(servers, pushes=False).push(model, 1)
    assert len(passes) == 6
    for server, member in zip(servers, pool.members):
        server.kill()
        pool.lose(member, "it was killed")
    pool.timeout_s = 1.0
    with pytest.raises(ConnectionError):
        pool.push(model, 2)
    assert len(passes) == 9


# --- Lists that cannot work ---


def test_a_server_that_is_not_there_at_the_start_is_an_error(servers: list[SimulatedServer], model: Any) -> None:
    servers[1].kill()
    pool = pool_of(servers, timeout_s=0.5)
    with pytest.raises(
        ConnectionError, match=rf"not all vLLM servers can be used: {servers[1].url}: no vLLM server came"
    ):
        pool.connect(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda config: setattr(config, "get_vocab_size", lambda: 91), "its vocabulary has 91 tokens, the policy's 92"),
        (lambda config: setattr(config, "dtype", "bfloat16"), "has dtype 'float32', http.* 'bfloat16', and a row must"),
        (lambda config: setattr(config, "quantization", "fp8"), "has quantization None, http.* 'fp8'"),
    ],
)
def test_a_server_of_another_kind_is_an_error(
    servers: list[SimulatedServer], model: Any, change: Callable[[Any], None], words: str
) -> None:
    change(servers[2].engine.model_config)
    with pytest.raises(ValueError, match=words) as caught:
        pool_of(servers).connect(model, num_tokens=16, options=OPTIONS)
    assert servers[2].url in str(caught.value)


def test_two_names_of_one_server_are_an_error(servers: list[SimulatedServer], model: Any) -> None:
    pool = VLLMServerPool([Address(host, servers[0].port) for host in ("127.0.0.1", "localhost")], timeout_s=5.0)
    with pytest.raises(ValueError, match="which are one server; name it once"):
        pool.connect(model)


def test_a_wrong_key_is_named_at_once(
    servers: list[SimulatedServer], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, words in (
        ("wrong", "does not take the key in VLLM_API_KEY"),
        ("", "wants a key, and this trainer has none"),
    ):
        monkeypatch.setenv("VLLM_API_KEY", key)
        started = time.monotonic()
        with pytest.raises(Exception, match=f"{words}; set VLLM_API_KEY in the trainer's environment"):
            servers[0].engine_of().connect(model)
        with pytest.raises(ConnectionError, match=words):
            pool_of(servers).connect(model)
        assert time.monotonic() - started < 2.0
    monkeypatch.setenv("VLLM_API_KEY", "the-key-of-these-tests")
    assert call(Address.of(servers[0].url), "info", timeout_s=5.0)["complete"]
