"""Servers that start late, die, hang, or are not groupgrad's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_vllm import OPTIONS, Served, mean_difference, push_by, requests, vary
from sample_checks import drained
from waiting import until

from groupgrad.integrations.vllm.http import Address, ServerRefused, ServerTimeout, call
from groupgrad.integrations.vllm.weight_transport import HttpTransport
from groupgrad.integrations.vllm.wire import Bucket

LONG = requests(8, tokens=100)


@pytest.fixture(scope="module")
def served(serve: Callable[..., Served]) -> Iterator[Served]:
    """Not started: tests start and kill it."""
    served = serve()
    yield served
    served.kill()


@pytest.mark.slow
def test_a_server_that_comes_up_late_dies_and_comes_back(served: Served, policy: Any) -> None:
    engine = served.engine()
    threading.Timer(1.0, served.start).start()
    engine.connect(policy)
    first = engine.info["start_id"]

    # It dies during sampling, and another is started on the same port.
    engine.push(policy, 1)
    expected = [sample.ids for sample in engine.sample(LONG, OPTIONS)]
    with engine.session(OPTIONS) as session:
        tickets = [session.submit(LONG[0])]
        samples = drained(session)
        freeze(served)
        tickets += [session.submit(row) for row in LONG[1:]]
        session.advance()
        served.kill()
        restart = threading.Timer(1.0, served.start)
        restart.start()
        samples.update(drained(session))
    restart.join()
    assert engine.info["start_id"] != first
    assert [samples[ticket].ids for ticket in tickets] == expected
    assert engine.weight_version.startswith("1-")

    # It dies during a push.
    vary(policy, 2)
    transport = KillsOnce(served)
    push_by(engine.members[0], transport)
    engine.push(policy, 2)
    assert transport.killed
    samples = engine.sample(LONG, OPTIONS)
    assert mean_difference(policy, LONG, samples) < 1e-5

    # A restarted trainer connects to the running server, and pushes its own weights.
    again = served.engine()
    again.push(vary(policy, 3), 0)
    assert mean_difference(policy, LONG, again.sample(LONG, OPTIONS)) < 1e-5

    # Its workers hang: it answers, but no token comes.
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


class KillsOnce(HttpTransport):
    """Kills and restarts the server before the third bucket."""

    def __init__(self, served: Served):
        self._served, self.killed = served, False

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        if bucket.first > 0 and not self.killed:
            self.killed = True
            self._served.kill()
            self._served.start()
        super().send(address, weight_version, bucket, timeout_s=timeout_s)


@pytest.mark.slow
def test_a_server_does_not_start_on_a_port_that_is_taken(serve: Callable[..., Served]) -> None:
    served = serve()
    with socket.create_server(("127.0.0.1", served.port)):
        served.start()
        process = served.process
        assert process is not None
        until(lambda: process.poll() is not None, timeout_s=240.0)
    assert process.returncode == 2
    assert f"a server cannot listen at port {served.port} of 127.0.0.1: " in served.log.read_text()
