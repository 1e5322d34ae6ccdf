"""Generation batches sampled on request, and generation batches sampled while others are trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from groupgrad.activity import Timings
from groupgrad.errors import WeightsLost
from groupgrad.rollout.prefetch import RolloutPrefetcher
from groupgrad.rollout.requests import GenerationRequest

ROWS: dict[int, dict[str, Any]] = {0: {"prompt": "x"}}


def request(number: int, step: int, phase: str = "train") -> GenerationRequest:
    return GenerationRequest(ROWS, [0], num_rows=1, num_generations=1, phase=phase, number=number, step=step)


class Story:
    """A source and weights that record their calls; a rollout is (generation batch, version of its weights, step)."""

    is_exact = False

    def __init__(
        self, *, waits_for: dict[int, threading.Event] | None = None, fails: dict[int, Exception] | None = None
    ):
        self.lines: list[str] = []
        self.version, self.is_frozen, self.is_stopped = -1, False, False
        self.waits_for, self.fails = waits_for or {}, fails or {}
        self.lock = threading.Lock()

    def __call__(self, request: GenerationRequest) -> list[Any]:
        with self.lock:
            self.lines.append(
                f"sample {request.phase} {request.number} with {self.version}{' frozen' if self.is_frozen else ''}"
            )
        used = self.version
        while not self.waits_for.get(request.number, _SET).wait(0.01):
            if self.is_stopped:
                raise RuntimeError("given up")
        if request.number in self.fails:
            raise self.fails.pop(request.number)
        return [(request.number, used, request.step)]

    def refresh(self, version: int, *, keeps_rows: bool = False) -> None:
        with self.lock:
            self.lines.append(f"refresh {version}{' under rows' if keeps_rows else ''}")
            self.version = version

    def invalidate(self) -> None:
        self.lines.append("invalidate")

    def sleep(self) -> None:
        self.lines.append("sleep")

    def stop(self) -> None:
        self.is_stopped = True

    @contextmanager
    def freeze_weights(self) -> Iterator[None]:
        self.is_frozen = True
        try:
            yield
        finally:
            self.is_frozen = False

    def metrics(self, rollouts: Any) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.lines.append("close")


class Always(dict[int, Exception]):
    """The failure of generation batch 0 at every attempt."""

    def __init__(self, error: Exception):
        super().__init__({0: error})

    def pop(self, key: int) -> Exception:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self[key]


_SET = threading.Event()
_SET.set()


def prefetcher(story: Story, ahead: int = 0, **options: bool) -> RolloutPrefetcher:
    vllm_policy: Any = story
    return RolloutPrefetcher(story, Timings(), vllm_policy, ahead=ahead, **options)


def begun(ahead: int = 1, *, in_flight: bool = False, **how: Any) -> tuple[Story, RolloutPrefetcher]:
    """A prefetcher, of which generation batch 0 was requested with those ahead of it; `how` is of the story."""
    story = Story(**how)
    sampler = prefetcher(story, ahead=ahead, in_flight=in_flight)
    sampler(request(0, 0), [request(number, 0) for number in range(1, ahead + 1)])
    return story, sampler


def settle(sampler: RolloutPrefetcher) -> None:
    """Waits until the generation batches begun are sampled."""
    for job in sampler._jobs.values():
        job.exception(timeout=10)


def test_weights_are_refreshed_before_a_generation_batch_and_sleep_after_it():
    story = Story()
    assert prefetcher(story)(request(0, 3)) == [(0, 3, 3)]
    assert story.lines == ["refresh 3", "sample train 0 with 3", "sleep"]


def test_a_generation_batch_ahead_comes_from_weights_one_batch_old():
    story = Story()
    sampler = prefetcher(story, ahead=1)
    sampled = []
    for step in range(4):
        sampled += sampler(request(step, step), [request(step + 1, step)] if step < 3 else [])
        settle(sampler)
    # The first batch is sampled at once, each other one at the step before its own.
    assert sampled == [(0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 2, 2)]
    assert [line for line in story.lines if line.startswith("sample")] == [
        "sample train 0 with 0",
        "sample train 1 with 0 frozen",
        "sample train 2 with 1 frozen",
        "sample train 3 with 2 frozen",
    ]


def test_generation_batches_ahead_are_never_older_than_allowed():
    story = Story()
    sampler = prefetcher(story, ahead=2)
    ages = []
    for step in range(9):
        sampled: Any = sampler(request(step, step), [request(step + 1, step), request(step + 2, step)])
        ages.append(step - sampled[0][1])
        settle(sampler)
    assert max(ages) == 2 and ages[0] == 0


def test_weights_are_not_sent_while_rows_are_sampled():
    gate = threading.Event()
    story, sampler = begun(2, waits_for={2: gate})
    sampler._jobs[1].exception(timeout=10)
    assert sampler(request(1, 1), [request(2, 1), request(3, 1)]) == [(1, 0, 0)]
    assert "refresh 1" not in story.lines, "generation batch 2 is being sampled"
    gate.set()
    settle(sampler)
    assert sampler(request(2, 2), [request(3, 2)]) == [(2, 0, 0)]
    assert "refresh 2" in story.lines
    settle(sampler)
    assert sampler(request(3, 3)) == [(3, 2, 2)]


def test_weights_are_sent_while_rows_are_sampled_if_these_go_on_with_them():
    gate = threading.Event()
    story, sampler = begun(2, in_flight=True, waits_for={2: gate})
    deadline = time.monotonic() + 10
    while "sample train 2 with 0 frozen" not in story.lines:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert sampler(request(1, 1), [request(2, 1), request(3, 1)]) == [(1, 0, 0)]
    assert "refresh 1 under rows" in story.lines and 3 in sampler._jobs, "the next batch waits for none"
    gate.set()
    settle(sampler)
    assert sampler(request(2, 2), [request(3, 2)]) == [(2, 0, 0)]
    assert story.lines[-1] == "refresh 2", "nothing is sampled any more"


def test_evaluation_waits_for_batches_ahead_and_uses_the_present_weights():
    gate = threading.Event()
    story, sampler = begun(waits_for={1: gate})
    threading.Timer(0.1, gate.set).start()
    assert sampler(request(0, 1, "eval")) == [(0, 1, 1)]
    assert story.lines[-3:] == ["refresh 1", "sample eval 0 with 1", "sleep"]
    assert sampler(request(1, 1)) == [(1, 0, 0)], "what was sampled before is not lost"


def test_a_batch_ahead_whose_weights_were_lost_is_sampled_anew(caplog):
    _, sampler = begun(fails={1: WeightsLost("the server was started again")})
    settle(sampler)
    assert sampler(request(1, 1), [request(2, 1)]) == [(1, 1, 1)]
    assert "generation batch 1 is sampled anew: the server was started again" in caplog.text
    settle(sampler)
    assert sampler(request(2, 2)) == [(2, 1, 1)]


def test_a_batch_sampled_on_request_is_sampled_anew_a_limited_number_of_times(caplog):
    lost = WeightsLost("the server was started again")
    story = Story(fails={0: lost})
    assert prefetcher(story)(request(0, 4)) == [(0, 4, 4)]
    once = ["refresh 4", "sample train 0 with 4"]
    assert story.lines == [*once, "invalidate", *once, "sleep"]
    assert "generation batch 0 is sampled anew: the server was started again" in caplog.text
    always = Story()
    always.fails = Always(lost)
    with pytest.raises(WeightsLost, match="started again"):
        prefetcher(always)(request(0, 4))
    assert always.lines == [*once, "invalidate", *once, "invalidate", *once]


def test_any_other_failure_ahead_is_raised_when_its_batch_is_requested():
    _, sampler = begun(fails={1: ValueError("a row does not fit")})
    with pytest.raises(ValueError, match="a row does not fit"):
        sampler(request(1, 1))


def test_closing_gives_up_what_is_sampled_ahead():
    story, sampler = begun(waits_for={1: threading.Event()})
    started = time.monotonic()
    sampler.close()
    assert time.monotonic() - started < 5
    assert story.is_stopped
    sampler.close()


def test_waiting_counts_as_sampling_and_sending_as_weights():
    timings = Timings()
    story: Any = Story()
    sampler = RolloutPrefetcher(story, timings, story, ahead=1)
    sampler(request(0, 0), [request(1, 0)])
    assert set(timings.take()) == {"weights", "sampling"}
    sampler.close()
