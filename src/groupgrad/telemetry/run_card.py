"""The model card of a training run: what the trainer knows, under the names that `write_model_card` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupgrad.telemetry.model_card import write_model_card

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
"""Fields of the configuration that the card shows."""

OTHER_NAMES = {
    "finetuned_from": "base_model",
    "dataset": "dataset_name",
    "dataset_tags": "dataset_name",
    "tasks": "pipeline_tag",
}
"""What `Trainer.create_model_card` calls some fields, and their name here."""


def write_run_card(
    config: Any,
    model: Any,
    log_history: Sequence[Mapping[str, Any]] = (),
    *,
    model_name: str | None = None,
    hub_model_id: str | None = None,
    **fields: Any,
) -> str:
    """Write the card of a run into `config.output_dir` and return its text.

    `model` tells what was trained from, and whether the result is an adapter; `log_history` the last numbers.
    `hub_model_id` is what the card's example loads. `fields` are those of `write_model_card`, some also by the names in
    `OTHER_NAMES`; None counts as not given.
    """
    given = {OTHER_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    if hasattr(model, "peft_config"):
        given.setdefault("library_name", "peft")
        kinds = [getattr(adapter.peft_type, "value", adapter.peft_type) for adapter in model.peft_config.values()]
        given["tags"] = [*dict.fromkeys(kind.lower() for kind in kinds), *_listed(given.get("tags"))]
    given.setdefault("base_model", getattr(getattr(model, "config", None), "_name_or_path", None) or None)
    given.setdefault("config_summary", {name: getattr(config, name) for name in SETTINGS if hasattr(config, name)})
    given.setdefault("metrics", last_metrics(log_history))
    name = model_name or hub_model_id or str(config.output_dir)
    return write_model_card(
        Path(str(config.output_dir)) / "README.md", model_name=name, load_from=hub_model_id, **given
    )


def last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers logged last that tell how good the model is: rewards, lengths, loss, KL, entropy."""
    last: dict[str, float] = {}
    for entry in log_history:
        last |= {key: value for key, value in entry.items() if _tells_quality(key) and isinstance(value, (int, float))}
    return last


def _tells_quality(key: str) -> bool:
    plain = key.removeprefix("eval_")
    return plain in ("loss", "kl", "entropy") or "reward" in plain or plain.endswith("completions/mean_length")


def _listed(tags: str | Sequence[str] | None) -> list[str]:
    return [tags] if isinstance(tags, str) else list(tags or ())
