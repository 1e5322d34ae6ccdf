"""Metrics, completions, progress, timings, reward curves and the model card of a training run."""

from __future__ import annotations

from groupgrad.telemetry.completions import CompletionLog
from groupgrad.telemetry.curves import plot_rewards, write_metrics
from groupgrad.telemetry.metric_store import MetricStore
from groupgrad.telemetry.model_card import write_model_card
from groupgrad.telemetry.progress import ProgressCallback
from groupgrad.telemetry.timings import Timings

__all__ = [
    "CompletionLog",
    "MetricStore",
    "ProgressCallback",
    "Timings",
    "plot_rewards",
    "write_metrics",
    "write_model_card",
]
