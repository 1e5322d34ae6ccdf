"""The window of measurements between two log events: many small metrics in, one flat dict of floats out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from groupgrad import dist
from groupgrad.metrics import Metric, merge

# A window longer than this per key is folded early, so that rare logging does not hoard small tensors.
_MAX_PENDING = 256


class MetricStore:
    """What was measured since the last flush, on this rank.

    Values may be tensors on an accelerator; they stay there until `flush` or `state_dict` reads them, all at once and
    in float64. Keys keep the order in which they were first seen in the life of the store.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}
        self._window: dict[str, list[Metric]] = {}

    def __len__(self) -> int:
        """Number of keys in the present window."""
        return len(self._window)

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Take measurements into the window. No collective, no wait for the device.

        A key that was first logged as one kind (`mean`, `max`, ...) and now comes as another is a ValueError; then
        nothing of `metrics` is taken.
        """
        for key, metric in metrics.items():
            self._check_kind(key, metric)
        for key, metric in metrics.items():
            self._kinds.setdefault(key, metric.kind)
            pending = self._window.setdefault(key, [])
            pending.append(Metric(metric.kind, _detached(metric.value), _detached(metric.weight)))
            if len(pending) >= _MAX_PENDING:
                self._window[key] = [_fold(key, _as_floats(pending))]

    def flush(self) -> dict[str, float]:
        """Collective. The merged numbers of all ranks' windows, after which the window is empty.

        One gather, whatever the number of keys; every rank gets the same floats. A key with nothing measured on any
        rank (a mean of weight 0, a NaN extremum) is left out. Two ranks that logged a key as different kinds are a
        ValueError on every rank.
        """
        parts = dist.all_gather_objects(self._folded())
        self._window.clear()
        merged: dict[str, list[Metric]] = {key: [] for key in self._kinds}
        for part in parts:
            for key, metric in part.items():
                self._kinds.setdefault(key, metric.kind)
                merged.setdefault(key, []).append(metric)
        numbers: dict[str, float] = {}
        for key, metrics in merged.items():
            number = _fold(key, metrics).read() if metrics else None
            if number is not None:
                numbers[key] = number
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """This rank's window and key order in plain lists and numbers. No collective: each rank saves its own."""
        window = [[key, metric.kind, metric.value, metric.weight] for key, metric in self._folded().items()]
        return {"kinds": [[key, kind] for key, kind in self._kinds.items()], "window": window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; what the store held before is dropped."""
        self._kinds = dict(state["kinds"])
        self._window = {key: [Metric(kind, value, weight)] for key, kind, value, weight in state["window"]}

    def _check_kind(self, key: str, metric: Metric) -> None:
        known = self._kinds.get(key, metric.kind)
        if metric.kind != known:
            raise ValueError(
                f"metric '{key}' was logged as '{known}' before and comes as '{metric.kind}' now; the two cannot be "
                f"combined into one number, so log it in one way only or give one of them another name"
            )

    def _folded(self) -> dict[str, Metric]:
        flat = _as_floats([metric for pending in self._window.values() for metric in pending])
        folded, start = {}, 0
        for key, pending in self._window.items():
            folded[key] = _fold(key, flat[start : start + len(pending)])
            start += len(pending)
        return folded


def _fold(key: str, metrics: Iterable[Metric]) -> Metric:
    result: Metric | None = None
    for metric in metrics:
        try:
            result = metric if result is None else merge(result, metric)
        except ValueError as error:
            raise ValueError(f"metric '{key}': {error}") from error
    assert result is not None
    return result


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _as_floats(metrics: list[Metric]) -> list[Metric]:
    """The same metrics as Python floats, with one transfer a device instead of one a number."""
    numbers = [number for metric in metrics for number in (metric.value, metric.weight)]
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_device.setdefault(number.device, {})[index] = number.reshape(())
    for device, found in by_device.items():
        # Stacking needs one dtype; float64 holds every float32 and count exactly, but not every accelerator has it.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([number.to(dtype) for number in found.values()])
        for index, value in zip(found, stacked.tolist()):
            numbers[index] = value
    floats = [float(number) for number in numbers]
    return [Metric(m.kind, floats[2 * i], floats[2 * i + 1]) for i, m in enumerate(metrics)]
