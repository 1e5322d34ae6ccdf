"""Reward functions of every kind in one runner: their arguments, rewards, columns, metrics and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import threading
import time
from typing import Any

import pytest
import torch

from groupgrad.errors import RewardError
from groupgrad.rewards import REWARD_FUNCTIONS, accuracy_reward, get_length_penalized_reward
from groupgrad.rewards.reward_runner import RewardRunner


@pytest.fixture
def run(make_rollouts):
    runners = []

    def score(functions, completions=("a", "bb"), rows=None, *, step=0, trainer_state=None, **extra):
        runner = RewardRunner(functions)
        runners.append(runner)
        return runner.score(make_rollouts(list(completions), rows, **extra), trainer_state=trainer_state, step=step)

    yield score
    for runner in runners:
        runner.close_workers()


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def in_both_forms(function):
    """The function, and an async one of the same name and arguments."""

    @functools.wraps(function)
    async def later(**kwargs):
        return function(**kwargs)

    return function, later


def values(table) -> list[list[float]]:
    return table.rewards.nan_to_num(nan=99.0).tolist()


def test_functions_of_every_kind_in_one_list(run):
    class Judge:
        async def __call__(self, completion_ids, **kwargs):
            await asyncio.sleep(0)
            return [10.0 * len(ids) for ids in completion_ids]

        def method(self, completions):
            return [c == "a" for c in completions]

    async def coroutine(completions, **kwargs):
        return [None, 3]

    def scaled(completions, factor, **kwargs):
        return [factor * len(c) for c in completions]

    strict = Judge()
    strict.__name__ = "strict_judge"  # an instance can have a name
    functions = [
        length,
        Judge(),
        functools.partial(functools.partial(strict, a=1), b=2),
        coroutine,
        functools.partial(scaled, factor=100),
        lambda prompts: (1, 2),
        Judge().method,
        lambda completions: coroutine(completions=completions),
        functools.partial(length, a=1),
    ]
    original = list(functions)
    table = run(functions)
    assert functions == original
    names = ["length", "Judge", "strict_judge", "coroutine", "scaled", "<lambda>", "method", "<lambda>_2", "length_2"]
    assert table.names == names and table.rewards.dtype == torch.float64
    assert values(table) == [[1, 10, 10, 99, 100, 1, 1, 99, 1], [2, 20, 20, 3, 200, 2, 0, 3, 2]]
    assert values(run(length)) == [[1.0], [2.0]]  # a single one needs no list


def test_every_argument_there_is(run):
    seen = {}

    def reward(**kwargs):
        seen.update(kwargs)
        return [0.0] * len(kwargs["prompts"])

    rows = [
        {"prompt": "p", "ground_truth": "1", "completion": "no", "completion_ids": "no"},
        {"prompt": "q", "task": "t"},
    ]
    state = object()
    run(reward, ["a", "bb"], rows, trainer_state=state, score_hint=[5, ...], environments=[1, 2])
    assert seen.pop("log_extra") and seen.pop("log_metric")
    assert seen.pop("trainer_state") is state
    assert seen == {
        "prompts": ["p", "q"],
        "completions": ["a", "bb"],
        "completion_ids": [[0], [0, 1]],
        "ground_truth": ["1", None],
        "task": [None, "t"],
        "score_hint": [5, None],
        "environments": [1, 2],
    }


def test_functions_get_what_they_name_and_a_partial_has_not_set(run):
    def reward(completions, ground_truth, log_metric=None, missing=7):
        assert missing == 7 and log_metric is not None
        return [float(c == g) for c, g in zip(completions, ground_truth)]

    def fixed(completions, ground_truth, **kwargs):
        return [float(ground_truth == "fixed")] * len(completions)

    rows = [{"prompt": "p", "ground_truth": text, "other": 1} for text in "ax"]
    table = run([reward, functools.partial(fixed, ground_truth="fixed")], ["a", "bb"], rows)
    assert values(table) == [[1.0, 1.0], [0.0, 1.0]]


def test_a_required_argument_that_does_not_exist(run):
    def reward(completions, solution, **kwargs):
        raise AssertionError("called")

    def reward_fn(responses, ground_truths):
        raise AssertionError("called")

    message = r"'reward', step 4: it requires the argument 'solution'.*available: prompts, .*log_metric, task\. Add"
    for function in in_both_forms(reward):
        with pytest.raises(RewardError, match=message):
            run(function, ["a"], [{"prompt": "p", "task": 1}], step=4)
    with pytest.raises(RewardError, match=r"requires the argument 'ground_truths'.*ground_truth, answer, solution"):
        run(reward_fn, ["a"], [{"prompt": "p", "label": "x"}])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"ground_truth": "a", "answer": "z"}, [1.0, 0.0]),
        ({"ground_truths": "a", "ground_truth": "z"}, [1.0, 0.0]),
        ({"answer": "bb", "solution": "z"}, [0.0, 1.0]),
        ({"solution": "b"}, [0.0, 1.0]),
    ],
)
def test_responses_and_ground_truths(run, columns, expected):
    def reward_fn(responses, ground_truths):
        return [1.0 if truth in response else 0.0 for response, truth in zip(responses, ground_truths)]

    rows = [{"prompt": "p", **columns}] * 2
    assert run(reward_fn, ["a", "bb"], rows).rewards.flatten().tolist() == expected


def test_messages_have_responses_and_changes_to_them_do_not_reach_the_next_function(run):
    prompt = [{"role": "user", "content": "q"}]
    completion = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "final"},
        {"role": "tool", "content": "x"},
    ]
    rows = [{"prompt": prompt, "tests": [1, 2]}]

    def change_all(prompts, completions, completion_ids, tests, **kwargs):
        prompts[0][0]["content"] = completions[0][0]["content"] = "changed"
        prompts.clear()
        completion_ids[0].clear()
        tests[0].append(3)
        return [0.0]

    def check_unchanged(prompts, completions, completion_ids, tests, responses, **kwargs):
        assert prompts == [[{"role": "user", "content": "q"}]]
        assert completions[0][0] == {"role": "assistant", "content": "call"}
        assert completion_ids == [[0]] and tests == [[1, 2]] and responses == ["final"]
        return [1.0]

    assert values(run([change_all, check_unchanged], [completion], rows)) == [[0.0, 1.0]]
    assert prompt[0]["content"] == "q" and rows[0]["tests"] == [1, 2]


def test_asynchronous_functions_overlap_each_other_and_the_synchronous(run):
    async def first(completions, **kwargs):
        await asyncio.sleep(0.5)
        return [1.0] * len(completions)

    second, third = functools.partial(first, a=1), functools.partial(first, a=2)

    def sync(completions, **kwargs):
        time.sleep(0.5)
        return [2.0] * len(completions)

    started = time.perf_counter()
    table = run([first, sync, second, third])
    assert time.perf_counter() - started < 0.95
    assert table.rewards.tolist() == [[1.0, 2.0, 1.0, 1.0]] * 2


def test_a_failing_row_is_found(run):
    def reward(completions, log_extra, **kwargs):
        log_extra("seen", completions)
        return [1 / (3 - len(c)) for c in completions]

    found = r"'reward' failed at step 12 on row 2 \(prompt 'p2', completion 'ccc'\): Zero"
    with pytest.raises(RewardError, match=found) as raised:
        run(reward, ["a", "bb", "ccc", "dddd"], step=12)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_failure_of_the_batch_as_a_whole(run):
    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        if len(completions) > 1:
            raise RuntimeError("too many")
        raise TypeError("too few")

    with pytest.raises(RewardError, match=r"failed at step 0 on a batch of 3 rows: RuntimeError: too many"):
        run(reward, ["a", "b", "c"])
    assert calls == [3, 1, 1, 1]


def test_a_failing_asynchronous_function_stops_the_others(run):
    cancelled = threading.Event()

    async def bad(completions, **kwargs):
        raise KeyError("lost")

    async def patient(completions, **kwargs):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    started = time.perf_counter()
    with pytest.raises(RewardError, match=r"'bad' failed at step 0 on a batch of 2 rows: KeyError: 'lost'") as raised:
        run([bad, patient])
    assert isinstance(raised.value.__cause__, KeyError)
    assert time.perf_counter() - started < 5 and cancelled.wait(5)


def test_keyboard_interrupt_passes_through(run):
    def reward(**kwargs):
        raise KeyboardInterrupt

    for function in in_both_forms(reward):
        with pytest.raises(KeyboardInterrupt):
            run(function)
        assert values(run(in_both_forms(length)[1])) == [[1.0], [2.0]]


def test_columns_and_metrics(run):
    def first(completions, log_extra=None, log_metric=None, **kwargs):
        for column in ("length", "advantage", "first"):
            log_extra(column, [len(c) for c in completions])
        log_metric("accuracy", 0.5)
        log_metric("accuracy", torch.tensor(1.0))
        log_metric("unknown", float("nan"))
        return [0.0] * len(completions)

    async def second(completions, log_extra=None, log_metric=None, **kwargs):
        log_extra("length", ["x", "y"])
        log_extra("own", ("u", "v"))
        log_metric("accuracy", 0)
        return [0.0] * len(completions)

    table = run([second, first])
    renamed = {f"first/{column}": [1, 2] for column in ("length", "advantage", "first")}
    assert table.columns == {"length": ["x", "y"], "own": ["u", "v"], **renamed}
    assert table.metrics["accuracy"].read() == pytest.approx(0.5)
    assert table.metrics["accuracy"].weight == 3
    assert "unknown" not in table.metrics


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lambda extra, _: extra("col", [1]), r"'reward', step 3: log_extra\('col', ...\) got \[1\] .*for 2 compl"),
        (lambda extra, _: extra("col", "ab"), r"log_extra\('col', ...\) got 'ab' \(str\)"),
        (lambda extra, _: extra("col", 5), r"log_extra\('col', ...\) got 5 \(int\)"),
        (lambda _, metric: metric("m", "high"), r"'reward', step 3: log_metric\('m', ...\) got 'high' \(str\)"),
        (lambda _, metric: metric("m", [1, 2]), r"log_metric\('m', ...\) got \[1, 2\]"),
        *(
            (lambda _, metric, name=name: metric(name, 1.0), f"'reward', step .*{name}.*the trainer logs itself")
            for name in ("reward", "loss", "completions/min_length")
        ),
    ],
)
def test_wrong_logs_are_errors(run, log, message):
    def reward(completions, log_extra, log_metric):
        log(log_extra, log_metric)
        return [0.0] * len(completions)

    for function in in_both_forms(reward):
        with pytest.raises(RewardError, match=message):
            run(function, step=3)


def test_logging_from_many_threads(run):
    def reward(completions, log_metric, **kwargs):
        threads = [threading.Thread(target=lambda: [log_metric("m", value) for value in range(500)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [0.0] * len(completions)

    metric = run(reward).metrics["m"]
    assert metric.weight == 4000 and metric.read() == pytest.approx(249.5)


def test_unscored_rows_are_reported_once_and_columns_belong_to_one_call(make_rollouts, caplog):
    def first(completions, trainer_state, log_extra):
        if trainer_state == "first":
            log_extra("once", ["x", "y"])
        return [None, 1.0]

    runner = RewardRunner([first, lambda completions: [None, None]])
    with caplog.at_level(logging.WARNING):
        rollouts = make_rollouts(["a", "b"])
        tables = [runner.score(rollouts, step=n, trainer_state=state) for n, state in enumerate(["first", "next"])]
    assert [list(table.columns) for table in tables] == [["once"], []]
    assert len(caplog.records) == 1
    assert "step 0: 1 of 2 completions got no reward" in caplog.text and "row 0" in caplog.text


@pytest.mark.parametrize(
    ("functions", "classes", "error", "message"),
    [
        ([], None, ValueError, r"reward_funcs=\[\]: completions need a reward"),
        ([length, 3], None, TypeError, r"reward_funcs contains 3 \(int\), which cannot be called"),
        (None, None, TypeError, r"contains None"),
        (dict, None, TypeError, "<class 'dict'> .*cannot be called with completions; give functions"),
        ("accuracy_reward", None, ValueError, r"'accuracy_reward'.*give the function itself"),
        ([length, length], object(), ValueError, r"1 reward_processing_classes for 2"),
        ([length], [None, None], ValueError, r"2 reward_processing_classes for 1"),
    ],
)
def test_invalid_arguments_fail_at_construction(functions, classes, error, message):
    with pytest.raises(error, match=message):
        RewardRunner(functions, classes)
    assert RewardRunner([length, length], [object(), None]).names == ["length", "length_2"]  # functions need none


def test_a_missing_math_verify_fails_at_construction(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for reward in (functools.partial(accuracy_reward, a=1), get_length_penalized_reward(accuracy_reward)):
        with pytest.raises(ImportError, match=r"pip install 'math-verify"):
            RewardRunner([length, reward])


def test_the_registry_scores(run):
    rows = [{"prompt": "p", "solution": "72"}]
    table = run(list(REWARD_FUNCTIONS.values()), [r"<think>t</think>\boxed{72}"], rows)
    assert table.names == [
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "think_format_reward",
        "soft_overlong_punishment_reward",
        "cosine_scaled_reward",
        "repetition_penalty_reward",
        "length_penalized_accuracy_reward",
    ]
    cosine = 0.5 + 0.25 * (1 + math.cos(math.pi * 26 / 1280))
    assert table.rewards.tolist()[0] == pytest.approx([1.0, 1.0, 1.0, 0.0, cosine, 0.0, 1.0])


# Rewards of environments, failed rollouts


def test_rewards_of_environments_follow_the_columns_of_functions(make_rollouts):
    own = [{"Maze": 1.5}, {"Maze": None}, {"Shop": -1.0}]
    rollouts = [
        dataclasses.replace(rollout, environment_rewards=rewards)
        for rollout, rewards in zip(make_rollouts(["a", "bb", "ccc"]), own)
    ]
    runner = RewardRunner(length, environment_names=["Maze", "Shop"])
    table = runner.score(rollouts)
    assert runner.names == table.names == ["length", "Maze", "Shop"]
    assert values(table) == [[1.0, 1.5, 99.0], [2.0, 99.0, 99.0], [3.0, 99.0, -1.0]]
    assert values(RewardRunner([], environment_names=["Maze"]).score(rollouts)) == [[1.5], [99.0], [99.0]]


def test_rewards_of_turns_stand_beside_their_sums(make_rollouts):
    """Two turns, of which one function scores each, another the end, and the environment the first."""
    rollouts = make_rollouts(["abcd", "y"])
    rollouts[0] = dataclasses.replace(
        rollouts[0], completion_ids=[5, 6, 7], sampled=[True, False, True], environment_rewards={"Maze": [0.25, None]}
    )

    def each(completion_ids: list[list[int]], **kwargs: Any) -> list[Any]:
        return [[1.0, -3.0], 4.0]

    table = RewardRunner([each, length], environment_names=["Maze"]).score(rollouts)
    assert values(table) == [[-2.0, 4.0, 0.25], [4.0, 1.0, 99.0]]
    assert list(table.by_turn) == [0]
    assert table.by_turn[0].nan_to_num(nan=99.0).tolist() == [[1.0, 99.0, 0.25], [-3.0, 4.0, 99.0]]
    assert not RewardRunner(length).score(rollouts).by_turn


def test_failed_rollouts_are_not_passed_to_functions_and_get_no_reward(make_rollouts):
    seen: list[Any] = []

    def note(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        seen.append(completions)
        log_extra("what", [text.upper() for text in completions])
        return [float(len(text)) for text in completions]

    rollouts = make_rollouts(["a", "bb", "ccc"])
    rollouts[1] = dataclasses.replace(rollouts[1], finish_reason="error")
    table = RewardRunner(note).score(rollouts)
    assert seen == [["a", "ccc"]]
    assert values(table) == [[1.0], [99.0], [3.0]]
    assert table.columns == {"what": ["A", None, "CCC"]}
    broken = [dataclasses.replace(rollout, finish_reason="error") for rollout in rollouts]
    assert RewardRunner(note).score(broken).rewards.isnan().tolist() == [[True]] * 3
    assert RewardRunner([note, length]).score([]).rewards.shape == (0, 2)
    assert len(seen) == 1
