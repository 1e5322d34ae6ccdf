from __future__ import annotations

import json

import pytest
import torch

from groupgrad import dist
from groupgrad.metrics import average, latest, maximum, mean_of, minimum, total
from groupgrad.run_folder.metric_store import MetricStore


def test_each_kind_has_its_own_merge_and_a_flush_empties_the_window():
    """A mean is the sum over the count, no mean of means; keys with nothing measured are left out."""
    store, nan = MetricStore(), float("nan")
    store.add({"length": mean_of(30.0, 3), "kl": mean_of(0.0, 0), "low": minimum(nan)})
    store.add({"length": mean_of(50.0, 1)})
    store.add({"a": total(1), "b": minimum(2), "c": maximum(2), "d": latest(5), "e": average(1)})
    store.add({"a": total(2), "b": minimum(nan), "c": maximum(7), "d": latest(4), "e": average(2)})
    store.add({"a": total(4), "b": minimum(1), "c": maximum(3), "d": latest(9), "e": average(6)})
    assert store.flush() == {"length": 20.0, "a": 7.0, "b": 1.0, "c": 7.0, "d": 9.0, "e": 3.0}
    assert store.flush() == {} and len(store) == 0


def test_keys_keep_the_order_first_seen_over_windows():
    store = MetricStore()
    store.add({"z": average(1), "a": average(1)})
    store.flush()
    store.add({"m": average(1)})
    store.add({"a": average(1), "z": average(1)})
    assert list(store.flush()) == ["z", "a", "m"]


def test_tensors_are_detached_and_summed_in_float64():
    store = MetricStore()
    value = torch.tensor(2.0**24, requires_grad=True) * 1
    store.add({"tokens": total(value), "n": total(torch.tensor(3)), "h": average(torch.tensor(0.5).bfloat16())})
    store.add({"tokens": total(torch.tensor(1.0)), "n": total(4), "h": average(1.5)})
    assert store.flush() == {"tokens": 2.0**24 + 1, "n": 7.0, "h": 1.0}  # float32 would lose the 1


def test_a_long_window_is_folded_and_stays_exact():
    store = MetricStore()
    for i in range(1000):
        store.add({"x": mean_of(torch.tensor(float(i)), 2)})
    assert max(len(pending) for pending in store._window.values()) < 300
    assert store.flush() == {"x": 499.5 / 2}


def test_a_kind_clash_names_the_key_and_adds_nothing():
    store = MetricStore()
    store.add({"score": average(1.0)})
    with pytest.raises(ValueError, match=r"'score'.*'mean'.*'max'"):
        store.add({"other": average(1.0), "score": maximum(1.0)})
    assert store.flush() == {"score": 1.0}


def test_a_resume_inside_a_window_is_exact():
    whole, first = MetricStore(), MetricStore()
    early = {"x": mean_of(torch.tensor(0.1), 3), "top": maximum(2.0)}
    late = {"top": maximum(1.0), "x": mean_of(0.7, 5), "new": average(4.0)}
    whole.add(early)
    whole.add(late)
    first.add(early)
    second = MetricStore()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.add(late)
    resumed, expected = second.flush(), whole.flush()
    assert resumed == expected
    assert list(resumed) == list(expected)
    with pytest.raises(ValueError, match="'x'"):
        second.add({"x": maximum(1.0)})


def test_ranks_are_merged_with_one_gather(monkeypatch):
    """Ranks that disagree on the kind of a metric are told its name."""
    calls, others = [], [{"x": mean_of(9.0, 3), "only_there": total(2.0), "top": maximum(1.0)}, {"x": maximum(1.0)}]
    monkeypatch.setattr(
        dist, "all_gather_objects", lambda mine: (calls.append(mine), [mine, others[len(calls) - 1]])[1]
    )
    store = MetricStore()
    store.add({"top": maximum(0.5), "x": mean_of(1.0, 1)})
    assert store.flush() == {"top": 1.0, "x": 2.5, "only_there": 2.0}
    assert len(calls) == 1
    store.add({"x": average(1.0)})
    with pytest.raises(ValueError, match="'x'"):
        store.flush()
