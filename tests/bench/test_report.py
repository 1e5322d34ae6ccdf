"""The report's numbers are medians and ratios of what workers sent."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import run
from floor import Machine
from plumbing import PeakMemory, Series
from report import Result, Results, render
from worker import Recorder, random_reward
from workloads import WORKLOADS


def step(seconds: float, peak_mib: float, lengths: list[int], **phases: float) -> dict:
    return {
        "seconds": seconds,
        "peak_bytes": peak_mib * 2**20,
        "held_bytes": 2**30,
        "lengths": lengths,
        "phases": phases,
    }


@pytest.fixture
def result():
    ours = [step(1.0, 100, [10, 30], sampling=0.5, training=0.4), step(3.0, 300, [10, 30], sampling=1.0, training=1.6)]
    ours.append(step(2.0, 200, [20, 20], sampling=0.8, training=1.0))
    for one, sampling, training in zip(ours, (0.25, 0.8, 0.4), (0.1, 0.4, 0.5)):
        one["floors"] = {"sampling": sampling, "training": training}
    theirs = [step(8.0, 1000, [5, 5], sampling=3.0), step(2.0, 500, [5, 5], sampling=1.0), step(6.0, 600, [5, 5])]
    return Result(
        WORKLOADS["uniform"],
        {"groupgrad": Series(tuple(ours)), "trl": Series(tuple(theirs))},
        {"groupgrad": {"groupgrad": "0.1", "torch": "2.0"}, "trl": {"trl": "1.0", "torch": "2.0"}},
        Machine(100.0, 80.0, 20.0),
    )


def results_of(*found, **fields):
    return Results(machine="a machine", repetitions=3, date="today", results=list(found), **fields)


def test_medians_and_ratios(result):
    assert result.ours.median_seconds == 2.0
    assert result.ratio == 3.0
    assert result.ratio_per_token == pytest.approx((16 / 30) / (6 / 120))
    assert result.memory_share == pytest.approx(200 / 600)
    assert (result.ours.mean_length, result.ours.mean_longest) == (20.0, pytest.approx(80 / 3))
    assert result.theirs.phase("sampling") == 2.0


def test_share_of_the_floor_is_a_median_over_steps(result):
    assert result.ours.share_of_floor("sampling") == pytest.approx(0.5)
    assert result.ours.share_of_floor("training") == pytest.approx(0.25)
    assert result.ours.share_of_floor("nothing") is None


def test_missed_targets_are_marked(result):
    text = render(results_of(result), notes="## Where the time goes\nHere.")
    assert "| uniform | 2.00 (1.00-3.00) | 6.00 (2.00-8.00) | 3.00× |" in text
    assert "33% (missed) | 104 | 1,024 / 1,024 |" in text  # memory, target 25 %
    assert "50% (missed)" in text  # sampling, target 60 % of the floor
    assert "torch (ours) 2.0" in text
    assert text.endswith("## Where the time goes\nHere.\n")


def test_a_slow_ratio_is_marked(result):
    slow = replace(result, series={"groupgrad": result.ours, "trl": Series((step(2.0, 1, [5, 5]),))})
    assert "1.00× (missed)" in render(results_of(slow))


def test_without_trl_there_are_dashes(result):
    alone = replace(result, series={"groupgrad": result.ours}, versions={"groupgrad": {"groupgrad": "0.1"}})
    assert "| uniform | 2.00 (1.00-3.00) | - | - | - | 1.7× |" in render(results_of(alone))


def test_failures_are_reported():
    assert "- gsm8k: no data" in render(results_of(failures={"gsm8k": "no data"}))


def test_only_whole_runs_write_the_results_file():
    assert run.parse([]).output == run.BENCH / "RESULTS.md"
    assert run.parse(["--repetitions", "3"]).repetitions == 3
    for partial in (["--only", "uniform"], ["--quick"], ["--without_trl"]):
        assert run.parse(partial).output is None
    assert run.parse(["--quick"]).repetitions == 1
    with pytest.raises(SystemExit):
        run.parse(["--only", "unknown"])


def test_a_recorder_notes_what_reward_functions_see():
    recorder = Recorder()
    first, second = recorder.wrap(random_reward), recorder.wrap(lambda completion_ids, **_: [1.0, 2.0])
    inputs = {"completion_ids": [[1, 2], [3]], "prompt_tokens": [7, 7], "flat": [True, False], "prompts": ["", ""]}
    rewards = first(**inputs)
    second(**inputs)
    assert rewards[0] == 0.5 != rewards[1]
    assert recorder.lengths == [2, 1] and recorder.prompt_tokens == [7, 7]
    assert recorder.rewards == [1.5, rewards[1] + 2.0]
    assert first.__name__ == "random_reward"


def test_peak_memory_sees_what_was_freed():
    memory = PeakMemory()
    before = memory.settle()
    memory.reset()
    block = bytearray(256 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    del block
    # The system may take other pages of this process away meanwhile.
    assert memory.peak() - before >= 180 * 2**20
    memory.reset()
    assert memory.peak() - before < 90 * 2**20


def test_memory_settles_when_no_thread_works_any_more():
    memory, kept = PeakMemory(), []
    before = memory.settle()

    def work() -> None:
        while time.thread_time() < 0.3:
            pass
        kept.append(b"x" * (256 * 2**20))

    thread = threading.Thread(target=work)
    thread.start()
    assert memory.settle() - before >= 180 * 2**20
    thread.join()
