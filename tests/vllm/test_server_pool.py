"""Three real servers: one is killed in the middle of a generation batch, and one hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from real_vllm import OPTIONS, START_S, Served, pool_of, requests, vary
from sample_checks import drained
from waiting import until

from groupgrad.engines.base import Sample
from groupgrad.integrations.vllm.server_pool import VLLMServerPool

ROWS = requests(18, tokens=60)


def ids(samples: list[Sample]) -> list[list[int]]:
    return [sample.ids for sample in samples]


def test_rows_of_servers_that_die_and_hang_go_to_the_third(serve: Callable[..., Served], policy: Any) -> None:
    servers = [serve().start() for _ in range(3)]
    pool = pool_of(servers)
    pool.connect(policy, num_tokens=64, options=OPTIONS)
    pool.push(policy, 0)
    expected = ids(sampled_alone(servers[2], pool))
    assert ids(pool.sample(ROWS, OPTIONS)) == expected

    _have_patience(pool, 10.0)
    hung = servers[1].workers()
    with pool.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in ROWS]
        for worker in hung:
            worker.suspend()
        samples = dict(session.advance())
        servers[0].kill()
        samples.update(drained(session))
    assert ids([samples[ticket] for ticket in tickets]) == expected
    assert [member.cause is None for member in pool.members] == [False, False, True]

    pool.push(vary(policy, 1), 1)
    assert len(pool.live) == 1
    expected = ids(sampled_alone(servers[2], pool))
    for worker in hung:
        worker.resume()
    servers[0].start()

    def are_back() -> bool:
        assert ids(pool.sample(ROWS[:2], OPTIONS)) == expected[:2]
        time.sleep(0.5)
        return len(pool.live) == 3

    _have_patience(pool, 60.0)
    until(are_back, timeout_s=START_S)
    assert ids(pool.sample(ROWS, OPTIONS)) == expected


def sampled_alone(server: Served, pool: VLLMServerPool) -> list[Sample]:
    """Samples of this server alone, from the pool's weights."""
    engine = server.engine()
    engine.expect(pool.weight_version)
    return engine.sample(ROWS, OPTIONS)


def _have_patience(pool: VLLMServerPool, timeout_s: float) -> None:
    pool.timeout_s = timeout_s
    for member in pool.members:
        member.timeout_s = timeout_s
