"""Fills the model card of a training run from its configuration, model and log history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupgrad.telemetry.model_card import as_list, write_model_card

SETTINGS = (
    "loss_type",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "epsilon",
    "num_iterations",
    "scale_rewards",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
)
"""Configuration fields in the card's table of settings."""

OTHER_NAMES = {
    "finetuned_from": "base_model",
    "dataset": "dataset_name",
    "dataset_tags": "dataset_name",
    "tasks": "pipeline_tag",
}
"""Arguments of `Trainer.create_model_card`, with their names in `write_model_card`."""


def write_run_card(
    config: Any,
    model: Any,
    log_history: Sequence[Mapping[str, Any]] = (),
    *,
    model_name: str | None = None,
    hub_model_id: str | None = None,
    **fields: Any,
) -> str:
    """Writes the model card of a run into `config.output_dir` and returns its text.

    The base model and the adapter type are read from `model`, the last metrics from `log_history`. The card's example
    loads `hub_model_id`. `fields` are arguments of `write_model_card`, also by their names in `OTHER_NAMES`; those that
    are None are ignored.
    """
    fields = {OTHER_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    if hasattr(model, "peft_config"):
        fields.setdefault("library_name", "peft")
        types = [getattr(adapter.peft_type, "value", adapter.peft_type) for adapter in model.peft_config.values()]
        fields["tags"] = [*dict.fromkeys(type_.lower() for type_ in types), *as_list(fields.get("tags"))]
    fields.setdefault("base_model", getattr(getattr(model, "config", None), "_name_or_path", None) or None)
    fields.setdefault("config_summary", {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)})
    fields.setdefault("metrics", last_metrics(log_history))
    name = model_name or hub_model_id or str(config.output_dir)
    return write_model_card(
        Path(str(config.output_dir)) / "README.md", model_name=name, load_from=hub_model_id, **fields
    )


def last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the last logged value of each quality metric: rewards, lengths, loss, KL and entropy."""
    metrics: dict[str, float] = {}
    for event in log_history:
        numbers = {key: value for key, value in event.items() if isinstance(value, (int, float))}
        metrics |= {key: value for key, value in numbers.items() if _is_quality_metric(key)}
    return metrics


def _is_quality_metric(key: str) -> bool:
    plain = key.removeprefix("eval_")
    return plain in ("loss", "kl", "entropy") or "reward" in plain or plain.endswith("completions/mean_length")
