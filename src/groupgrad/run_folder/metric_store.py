"""Collects metrics between two log events and merges them over micro-batches and ranks into one dict of floats."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from groupgrad import dist
from groupgrad.metrics import Metric, merge

# After this many values a key is folded into one, so that rare logging does not accumulate small tensors.
_MAX_PENDING = 256


class MetricStore:
    """Metrics of this rank since the last flush.

    Values may be tensors on an accelerator; `flush` and `state_dict` read them all at once, in float64. Keys keep the
    order in which the store first got them, over all flushes.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._window: dict[str, list[Metric]] = {}

    def __len__(self) -> int:
        """Number of keys since the last flush."""
        return len(self._window)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Adds metrics. No collective, and no wait for the device.

        ValueError, and none is added, if a key was logged before as another kind (`mean`, `max`, ...).
        """
        for key, metric in metrics.items():
            kind = self._kinds.get(key, metric.kind)
            if metric.kind != kind:
                raise ValueError(
                    f"metric '{key}' was logged as '{kind}' before and comes as '{metric.kind}' now; the two cannot "
                    f"be combined into one number, so log it in one way only or give one of them another name"
                )
        for key, metric in metrics.items():
            self._kinds.setdefault(key, metric.kind)
            pending = self._window.setdefault(key, [])
            pending.append(metric)
            if len(pending) >= _MAX_PENDING:
                self._window[key] = [_fold(key, _as_floats(pending))]

    def flush(self) -> dict[str, float]:
        """Returns the metrics merged over all ranks, the same floats on each, and starts anew. Collective, one gather.

        Leaves out keys without a measurement on any rank (a mean of weight 0, a NaN extremum). ValueError on every
        rank if two ranks logged a key as different kinds.
        """
        folded_by_rank = dist.all_gather_objects(self._folded())
        self._window.clear()
        by_key: dict[str, list[Metric]] = {key: [] for key in self._kinds}
        for folded in folded_by_rank:
            for key, metric in folded.items():
                self._kinds.setdefault(key, metric.kind)
                by_key.setdefault(key, []).append(metric)
        numbers = {key: _fold(key, metrics).read() for key, metrics in by_key.items() if metrics}
        return {key: number for key, number in numbers.items() if number is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's metrics and key order as plain lists and numbers. No collective."""
        window = [[key, metric.kind, metric.value, metric.weight] for key, metric in self._folded().items()]
        return {"kinds": [[key, kind] for key, kind in self._kinds.items()], "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces all metrics by those of a `state_dict`."""
        self._kinds = dict(state["kinds"])
        self._window = {key: [Metric(kind, value, weight)] for key, kind, value, weight in state["window"]}

    def join_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """None: on another number of ranks the metrics start anew."""

    def _folded(self) -> dict[str, Metric]:
        """Returns one metric a key, as floats."""
        flat = _as_floats([metric for pending in self._window.values() for metric in pending])
        folded, start = {}, 0
        for key, pending in self._window.items():
            folded[key] = _fold(key, flat[start : start + len(pending)])
            start += len(pending)
        return folded


def _fold(key: str, metrics: Iterable[Metric]) -> Metric:
    try:
        return functools.reduce(merge, metrics)
    except ValueError as error:
        raise ValueError(f"metric '{key}': {error}") from error


def _as_floats(metrics: list[Metric]) -> list[Metric]:
    """Converts values to Python floats with one transfer a device instead of one a value."""
    numbers = [number for metric in metrics for number in (metric.value, metric.weight)]
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, {})[index] = number.reshape(())
    for device, tensors in by_device.items():
        # Stacking needs one dtype. float64 holds every float32 and count exactly, but MPS does not have it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([number.to(dtype) for number in tensors.values()])
        for index, value in zip(tensors, stacked.tolist()):
            numbers[index] = value
    floats = [float(number) for number in numbers]
    return [Metric(m.kind, floats[2 * i], floats[2 * i + 1]) for i, m in enumerate(metrics)]
