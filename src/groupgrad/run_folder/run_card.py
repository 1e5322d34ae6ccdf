"""Writes the model card (README.md) of a training run from its configuration, model and log history."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from groupgrad import compat

logger = logging.getLogger(__name__)

SETTINGS = (
    "loss_type",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "epsilon",
    "num_iterations",
    "advantage_estimator",
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
"""Arguments of `Trainer.create_model_card`, with their names here."""

_MARK = "was trained with reinforcement learning by groupgrad"
_REPLACED_CARDS = (_MARK, "# Model Card for Model ID")
"""Texts of the cards that a run replaces: its own, and the template that PEFT saves with an adapter."""
_QUALITY = re.compile(r"^(eval_)?(loss|kl|entropy)$|reward|completions/mean_length$")
_kept: set[Path] = set()
"""Files of the user that have been warned of."""

_TAGS = ("generated_from_trainer", "groupgrad", "grpo")
_PACKAGES = ("groupgrad", "torch", "transformers", "accelerate", "datasets", "tokenizers", "peft")

_CITATION = """\
```bibtex
@misc{shao2024deepseekmath,
  title         = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},
  author        = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Xiao Bi and
                   Haowei Zhang and Mingchuan Zhang and Y. K. Li and Y. Wu and Daya Guo},
  year          = {2024},
  eprint        = {2402.03300},
  archivePrefix = {arXiv},
  primaryClass  = {cs.CL}
}
```"""


def write_run_card(
    config: Any,
    model: Any,
    log_history: Sequence[Mapping[str, Any]] = (),
    *,
    model_name: str | None = None,
    hub_model_id: str | None = None,
    **fields: Any,
) -> str:
    """Writes the model card of a run into `config.output_dir` and returns its text; a README of the user's stays.

    The base model and the adapter type are read from `model`, the last metrics from `log_history`. The quick start
    loads `hub_model_id`, or else `model_name` or the output folder. `fields` are metadata (`base_model`,
    `dataset_name`, `tags`, `license`, `language`, `pipeline_tag`, ...), also by their names in `OTHER_NAMES`; those
    that end in `_url` (`wandb_url=...`) become links, and those that are None are ignored. Base model and data sets go
    to the metadata if they are hub ids; of a local path, the text has the last part only.
    """
    fields = {OTHER_NAMES.get(name, name): value for name, value in fields.items() if value is not None}
    urls = {key.removesuffix("_url"): fields.pop(key) for key in list(fields) if key.endswith("_url")}
    name = model_name or hub_model_id or _short_path(str(config.output_dir))
    base_model = fields.pop("base_model", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    datasets = _as_list(fields.pop("dataset_name", ()))
    adapters = getattr(model, "peft_config", {}).values()
    types = [getattr(adapter.peft_type, "value", adapter.peft_type) for adapter in adapters]
    tags = [*_TAGS, *(type_.lower() for type_ in types), *_as_list(fields.pop("tags", ()))]
    defaults = {
        "library_name": "peft" if types else "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model if base_model and _is_hub_id(base_model) else None,
        "datasets": [dataset for dataset in datasets if _is_hub_id(dataset)] or None,
        "model_name": _last_part(name),
        "tags": list(dict.fromkeys(tags)),
    }
    settings = {key: getattr(config, key) for key in SETTINGS if hasattr(config, key)}
    versions = {package: version for package in _PACKAGES if (version := compat.installed_version(package))}
    sections = [
        f"# {_inline(_last_part(name))}",
        _introduction(base_model, datasets),
        "\n".join(f"- [{_inline(title)} run]({url})" for title, url in urls.items()),
        _quick_start(hub_model_id or name),
        _table("Training settings", "Setting", settings),
        _table("Last logged metrics", "Metric", last_metrics(log_history)),
        _table("Framework versions", "Package", versions),
        "## Citation\n\nThe method comes from the DeepSeekMath paper:\n\n" + _CITATION,
    ]
    header = ModelCardData(**{**defaults, **fields}).to_yaml()
    card = ModelCard(f"---\n{header}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n")
    path = Path(str(config.output_dir)) / "README.md"
    # A full disk leaves an empty file.
    if (
        path.is_file()
        and path.stat().st_size
        and not any(mark in path.read_text(errors="replace") for mark in _REPLACED_CARDS)
    ):
        if path not in _kept:
            _kept.add(path)
            logger.warning("%s is kept, since groupgrad has not written it; the run's model card is not written", path)
    else:
        card.save(path)
    return str(card)


def last_metrics(log_history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the last logged value of each quality metric: rewards, lengths, loss, KL and entropy."""
    metrics: dict[str, float] = {}
    for event in log_history:
        metrics |= {k: v for k, v in event.items() if isinstance(v, (int, float)) and _QUALITY.search(k)}
    return metrics


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _introduction(base_model: str | None, datasets: Sequence[str]) -> str:
    text = f"This model {_MARK}"
    if base_model:
        text += f", starting from {_hub_link(base_model, '')}"
    if datasets:
        text += ", on " + " and ".join(_hub_link(name, "datasets/") for name in datasets)
    return (
        text + ".\nThe method is GRPO, group relative policy optimization "
        "([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)): several completions are sampled for each prompt, "
        "scored, and each is reinforced by how much better it did than the others of its prompt."
    )


def _short_path(path: str) -> str:
    """The path relative to the working directory if it is inside, else unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _quick_start(model_name: str) -> str:
    return f"""\
## Quick start

```python
from transformers import pipeline

generator = pipeline("text-generation", model={model_name!r})
prompt = "A train leaves at 9:40 and arrives at 11:05. How long is the journey?"
if generator.tokenizer.chat_template:
    prompt = [{{"role": "user", "content": prompt}}]
print(generator(prompt, max_new_tokens=256, return_full_text=False)[0]["generated_text"])
```"""


def _table(title: str, column: str, rows: Mapping[str, Any]) -> str:
    if not rows:
        return ""
    lines = [f"## {title}", "", f"| {column} | Value |", "|---|---|"]
    for key, value in rows.items():
        lines.append(f"| {_inline(key)} | {_inline(f'{value:.4g}' if isinstance(value, float) else value)} |")
    return "\n".join(lines)


def _inline(text: Any) -> str:
    """Formats text as code that is safe in a table; letters, digits and harmless signs stay plain."""
    flat = " ".join(str(text).split())
    if re.fullmatch(r"[\w .,:+/%()=-]*", flat) and "_" not in flat:
        return flat
    return "`" + flat.replace("`", "'").replace("|", "\\|") + "`"


def _hub_link(name: str, folder: str) -> str:
    return f"[{name}](https://huggingface.co/{folder}{name})" if _is_hub_id(name) else f"`{_last_part(name)}`"


def _last_part(name: str) -> str:
    return Path(name).name or name


def _is_hub_id(name: str) -> bool:
    # A local folder may look like `user/name`; the hub would reject or misread it in the metadata.
    if Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
