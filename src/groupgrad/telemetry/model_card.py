"""Writes the model card (README.md) of a trained model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from importlib import metadata as installed
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

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


def write_model_card(
    path: str | Path,
    *,
    model_name: str,
    base_model: str | None = None,
    dataset_name: str | Sequence[str] | None = None,
    tags: Sequence[str] | str | None = None,
    config_summary: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    load_from: str | None = None,
    **metadata: Any,
) -> str:
    """Writes a model card to `path` (a file, or a folder that gets a README.md) and returns its text.

    The quick start loads `load_from`, or else `model_name`, a hub id or folder. `base_model` and `dataset_name` go to
    the metadata if they are hub ids; of a local path, the text has the last part only. `config_summary` and `metrics`
    become tables. `versions` defaults to the installed packages. Arguments in `metadata` that end in `_url`
    (`wandb_url=...`) become links; the others (`license`, `language`, `pipeline_tag`, ...) are metadata fields.
    """
    urls = {key.removesuffix("_url"): metadata.pop(key) for key in list(metadata) if key.endswith("_url")}
    datasets = as_list(dataset_name)
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model if base_model and _is_hub_id(base_model) else None,
        "datasets": [name for name in datasets if _is_hub_id(name)] or None,
        "model_name": _last_part(model_name),
        "tags": list(dict.fromkeys([*_TAGS, *as_list(tags)])),
    }
    card_data = ModelCardData(**{**fields, **{key: value for key, value in metadata.items() if value is not None}})
    sections = [
        f"# {_inline(_last_part(model_name))}",
        _introduction(base_model, datasets),
        "\n".join(f"- [{_inline(name)} run]({url})" for name, url in urls.items() if url),
        _quick_start(load_from or model_name),
        _table("Training settings", "Setting", config_summary),
        _table("Last logged metrics", "Metric", metrics),
        _table("Framework versions", "Package", versions if versions is not None else _installed_versions()),
        "## Citation\n\nThe method comes from the DeepSeekMath paper:\n\n" + _CITATION,
    ]
    text = f"---\n{card_data.to_yaml()}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"
    card = ModelCard(text)
    path = Path(path)
    card.save(path if path.suffix.lower() == ".md" else path / "README.md")
    return str(card)


def as_list(value: str | Sequence[str] | None) -> list[str]:
    """Converts a single string, a sequence of strings or None to a list."""
    return [value] if isinstance(value, str) else list(value or ())


def _introduction(base_model: str | None, datasets: Sequence[str]) -> str:
    text = "This model was trained with reinforcement learning by groupgrad"
    if base_model:
        text += f", starting from {_hub_link(base_model, '')}"
    if datasets:
        text += ", on " + " and ".join(_hub_link(name, "datasets/") for name in datasets)
    return (
        text + ".\nThe method is GRPO, group relative policy optimization "
        "([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)): several completions are sampled for each prompt, "
        "scored, and each is reinforced by how much better it did than the others of its prompt."
    )


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


def _table(title: str, column: str, rows: Mapping[str, Any] | None) -> str:
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


def _installed_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(installed.PackageNotFoundError):
            versions[package] = installed.version(package)
    return versions
