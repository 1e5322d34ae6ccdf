"""Servers that start late, die, hang, or are not groupgrad's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_vllm import OPTIONS, Served, requests
from sample_checks import drained

from groupgrad.integrations.vllm.http import ServerRefused, ServerTimeout, call

LONG = requests(8, tokens=100)


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Iterator[Served]:
    """Not started: tests start and kill it."""
    served = serve()
    yield served
    served.kill()


@pytest.mark.slow
def test_a_server_whose_workers_hang_is_named_with_its_rows(served: Served, policy: Any) -> None:
    """It answers, but no token comes."""
    if served.process is None:
        served.start()
    served.engine().push(policy, 0)  # when it is up
    stuck = served.engine(timeout_s=4.0)
    stuck.push(policy, 1)
    freeze(served)
    try:
        with pytest.raises(TimeoutError, match=r"sampled no token for 4 s; rows .*0 \(prompt of 4 tokens\), 1 "):
            stuck.sample(LONG, OPTIONS)
        with pytest.raises(
            (ServerTimeout, ServerRefused), match=r"pushing version 2 .*(did not answer|vLLM did not pause)"
        ):
            stuck.push(policy, 2)
    finally:
        for worker in served.workers():
            worker.resume()


@pytest.mark.slow
def test_a_server_whose_engine_dies_says_so_until_it_ends(served: Served, policy: Any) -> None:
    if served.process is None:
        served.start()
    engine = served.engine()
    engine.push(policy, 0)
    with engine.session(OPTIONS) as session:
        tickets = [session.submit(row) for row in LONG]
        freeze(served)
        samples = dict(session.advance())
        for worker in served.workers():
            worker.kill()
        process = served.process
        assert process is not None

        def restart() -> None:
            process.wait()
            served.kill()
            served.start()

        threading.Thread(target=restart, daemon=True).start()
        samples.update(drained(session))
    assert [samples[t].ids for t in tickets] == [s.ids for s in engine.sample(LONG, OPTIONS)]
    assert call(served.address, "info", timeout_s=10.0)["weight_version"] == engine.weight_version

    # It dies and does not come back: the error names the rows.
    served.kill()
    engine.timeout_s = 2.0
    story = (
        r"no vLLM server is left, and none was back within 2 s .*: sampling 8 rows failed: .*have not ended: 0 \(prompt"
    )
    with pytest.raises(ConnectionError, match=story):
        engine.sample(LONG, OPTIONS)


def freeze(served: Served) -> None:
    """Suspend the processes that sample; the one that answers runs on."""
    for worker in served.workers():
        worker.suspend()
