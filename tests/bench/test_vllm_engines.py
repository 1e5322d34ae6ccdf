"""The vLLM benchmarks: the plan of sampling ahead, a server that is slow on purpose, the report."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest


class TestPlan:
    @pytest.mark.parametrize(
        ("sampling", "rest", "ahead", "expected"),
        [
            ([1.0] * 4, 1.0, 0, 2.0),  # in turn
            ([1.0] * 4, 1.0, 1, 1.25),  # only the first batch is waited for: 1 + 4 * 1
            ([1.0] * 4, 2.0, 1, 2.25),  # training is what takes time: 1 + 4 * 2
            ([3.0] * 4, 1.0, 1, 3.25),  # sampling is: 4 * 3 + 1
            # Batch 0 ends at 1, and 1 and 2 are begun; trained until 2. Batch 1 has ended at 1, 2 ends at 3.
            # Batches 1 and 2 are trained until 4, 3 is begun at 3 and has ended at once.
            ([1.0, 0.0, 2.0, 0.0], 1.0, 2, 1.25),
            # With one ahead, batch 2 is begun at 2 and ends at 4: 1 + 1, 1, wait of 1, 1, 1.
            ([1.0, 0.0, 2.0, 0.0], 1.0, 1, 1.5),
        ],
    )
    def test_seconds_a_batch(self, sampling: list[float], rest: float, ahead: int, expected: float):
        import vllm_ahead

        assert vllm_ahead.seconds_a_batch(sampling, rest, ahead) == pytest.approx(expected)

    def test_in_flight_updates_leave_no_gap_between_generation_batches(self):
        import vllm_ahead

        # Batches 1 and 2 are begun at 1, and 2 ends at 4. Batch 3 is begun at 5, when batch 2 is trained, and waited
        # for from 7 to 8; in flight it is begun at 3 and sampled from 4 to 7.
        plan = [1.0, 1.0, 2.0, 3.0]
        found = [vllm_ahead.seconds_a_batch(plan, 2.0, 2, in_flight=flag) for flag in (False, True)]
        assert found == pytest.approx([10 / 4, 9 / 4])

    def test_generation_batches_at_the_start_may_be_left_out(self):
        import vllm_ahead

        assert vllm_ahead.seconds_a_batch([5.0, 1.0, 1.0], 2.0, 1, skip=1) == pytest.approx(2.0)

    def test_uneven_delays_have_the_same_mean_and_come_again(self):
        import vllm_ahead

        found = list(itertools.islice(vllm_ahead.delays("uneven", 1.0), 1000))
        assert found == list(itertools.islice(vllm_ahead.delays("uneven", 1.0), 1000))
        assert min(found) < 0.1 < 1.9 < max(found) < 2.0
        assert statistics.fmean(found) == pytest.approx(1.0, abs=0.05)
        assert list(itertools.islice(vllm_ahead.delays("even", 1.0), 3)) == [1.0, 1.0, 1.0]


class Echo(BaseHTTPRequestHandler):
    """Says what it was asked."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(409 if self.path == "/groupgrad/start" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"path": self.path, "body": body.decode()}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_slow_front_delays_generate_alone_and_changes_nothing():
    from vllm_server import SlowFront

    from groupgrad.integrations.vllm.http import Address, ServerRefused, call

    behind = HTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=behind.serve_forever, args=(0.01,), daemon=True).start()
    front = SlowFront(behind.server_address[1])
    front.delay = lambda: 0.3
    try:
        started = time.monotonic()
        told = call(Address.of(front.url), "update", b"abc", query={"first": 0}, timeout_s=5.0)
        assert told == {"path": "/groupgrad/update?first=0", "body": "abc"}
        assert front.delays == []
        with pytest.raises(ServerRefused) as refused:
            call(Address.of(front.url), "start", b"", timeout_s=5.0)
        assert refused.value.status == 409
        request = urllib.request.Request(f"{front.url}/groupgrad/generate", data=b"rows")
        with urllib.request.urlopen(request, timeout=5.0) as answer:
            assert json.load(answer)["body"] == "rows"
        assert time.monotonic() - started >= 0.3
        assert front.delays == [0.3]
    finally:
        front.close()
        behind.shutdown()
        behind.server_close()


def event(step: int, seconds: float, **more: float) -> dict[str, float]:
    return {
        "step": step,
        "step_time": seconds,
        "time/sampling": seconds / 4,
        "time/scoring": 0.0,
        "time/training": seconds / 2,
        "rewards/correctness_reward/mean": step / 100,
        **more,
    }


def result(accuracy: float, **more: float) -> dict[str, Any]:
    log = [event(step, seconds, **more) for step, seconds in ((5, 9.0), (10, 8.0), (15, 1.0), (20, 2.0), (25, 3.0))]
    return {"accuracy": accuracy, "greedy": 0.9, "format": 1.0, "log_history": [*log, {"train_runtime": 1.0}]}


class TestReport:
    def test_medians_leave_out_the_start(self):
        import vllm_report

        assert vllm_report.medians(result(0.9)["log_history"]) == {
            "step": 2.0,
            "sampling": 0.5,
            "weights": 0.0,
            "scoring": 0.0,
            "training": 1.0,
        }

    def test_accuracy_gap_is_between_the_farthest_two(self):
        import vllm_report

        assert vllm_report.accuracy_gap({"a": result(0.9), "b": result(0.96), "c": result(0.93)}) == pytest.approx(0.06)

    @pytest.mark.parametrize(("accuracy", "verdict"), [(0.95, "5.0 points apart: within 5"), (0.96, "NOT within 5")])
    def test_a_report_says_whether_engines_agree(self, accuracy: float, verdict: str):
        import vllm_report

        told = {"date": "today", "machine": "a machine", "versions": {"torch": "2"}}
        engines = {
            "seed": 0,
            "steps": 25,
            "chunk": 5,
            "num_held_out": 512,
            "before": {"accuracy": 0.2, "format": 0.2},
            "results": {
                "native": result(0.9, **{"sampling/logp_mismatch": 1e-6}),
                "colocate": result(accuracy, **{"sampling/sampling_logp_difference/mean": 2e-4, "time/weights": 0.25}),
            },
            **told,
        }
        run = {"delays": "even", "waiting": 1.0, "training": 1.0, "weights": 0.1, "ideal": 1.5}
        run |= {"in_flight": False, "lag": 0.0, "most_lag": 0.0, "mixed": 0.0}
        runs = [{**run, "ahead": 0, "seconds": 3.0}, {**run, "ahead": 1, "seconds": 2.0}]
        runs.append({**run, "ahead": 2, "seconds": 2.0, "in_flight": True, "lag": 5.25, "most_lag": 8.0, "mixed": 0.5})
        ahead = {
            "work": "a small one",
            "delay": 0.5,
            "own": 0.5,
            "rest": 1.0,
            "rounds": 12,
            "iterations": 4,
            "runs": runs,
            **told,
        }
        row = {"way": "server, HTTP", "bytes": 20 * 2**20, "seconds": 0.5, "least": 0.4, "most": 0.6}
        models = {"small": {"parameters": 130_000, "rows": [{**row, "parts": {"packing": 0.1, "sending": 0.3}}]}}
        pushes = {"repetitions": 5, "models": models, **told}

        text = vllm_report.render({"engines": engines, "ahead": ahead, "pushes": pushes}, "make bench-vllm")
        assert verdict in text
        assert "| native engine | 20.0% | 90.0% | 90.0% | 100.0% | 1.0e-06 |" in text
        assert "| vLLM in the training process (colocate) | 2.000 | 0.500 | 0.250 | 0.000 | 1.000 |" in text
        assert "| even, rollout_ahead=1 | 2.00 | 1.00 | 1.00 | 0.10 | 1.50 | 1.50× | 0.0 | 0 | 0% |" in text
        assert "| even, rollout_ahead=2, in flight | 2.00 | 1.00 | 1.00 | 0.10 | 1.50 | 1.50× | 5.2 | 8 | 50% |" in text
        assert "| server, HTTP | 20 MiB | 0.500 (0.400-0.600) | 0.100 | 0.300 | 0.100 |" in text
