"""The README.md that goes with a trained model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    """Write a model card to `path` (a file, or a folder that gets a README.md) and return its text.

    `model_name` is the hub id or folder that the quick start loads, unless `load_from` names another. `base_model` and
    `dataset_name` go to the metadata where they have the form of hub ids; a local path is named in the text only, as
    its last part. `config_summary` and `metrics` become tables. `versions` None lists what is installed. Of `metadata`,
    arguments that end in `_url` (`wandb_url=...`) become links; the others (`license`, `language`, `pipeline_tag`, ...)
    are metadata fields.
    """
    links = {key[: -len("_url")]: metadata.pop(key) for key in list(metadata) if key.endswith("_url")}
    datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or ())
    fields: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base_model if base_model and _is_hub_id(base_model) else None,
        "datasets": [name for name in datasets if _is_hub_id(name)] or None,
        "model_name": _last_part(model_name),
        "tags": _merged([*_TAGS, *([tags] if isinstance(tags, str) else tags or ())]),
    }
    card_data = ModelCardData(**{**fields, **{key: value for key, value in metadata.items() if value is not None}})
    parts = [
        f"# {_inline(_last_part(model_name))}",
        _introduction(base_model, datasets),
        _links(links),
        _quick_start(load_from or model_name),
        _table("Training settings", "Setting", config_summary),
        _table("Last logged metrics", "Metric", metrics),
        _table("Framework versions", "Package", versions if versions is not None else _installed_versions()),
        "## Citation\n\nThe method comes from the DeepSeekMath paper:\n\n" + _CITATION,
    ]
    text = f"---\n{card_data.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"
    card = ModelCard(text)
    target = Path(path)
    if target.suffix.lower() != ".md":
        target = target / "README.md"
    card.save(target)
    return str(card)


def _introduction(base_model: str | None, datasets: Sequence[str]) -> str:
    text = "This model was trained with reinforcement learning by groupgrad"
    if base_model:
        text += f", starting from {_named(base_model, '')}"
    if datasets:
        text += ", on " + " and ".join(_named(name, "datasets/") for name in datasets)
    return (
        text + ".\nThe method is GRPO, group relative policy optimization "
        "([arXiv:2402.03300](https://arxiv.org/abs/2402.03300)): several completions are sampled for each prompt, "
        "scored, and each is reinforced by how much better it did than the others of its prompt."
    )


def _links(links: Mapping[str, Any]) -> str:
    return "\n".join(f"- [{_inline(name)} run]({url})" for name, url in links.items() if url)


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
    lines += [f"| {_inline(key)} | {_inline(_value(value))} |" for key, value in rows.items()]
    return "\n".join(lines)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _inline(text: Any) -> str:
    """`text` as table-safe code, or bare where it is only letters, digits and harmless signs."""
    flat = " ".join(str(text).split())
    if re.fullmatch(r"[\w .,:+/%()=-]*", flat) and "_" not in flat:
        return flat
    return "`" + flat.replace("`", "'").replace("|", "\\|") + "`"


def _named(name: str, kind: str) -> str:
    return f"[{name}](https://huggingface.co/{kind}{name})" if _is_hub_id(name) else f"`{_last_part(name)}`"


def _last_part(name: str) -> str:
    return Path(name).name or name


def _is_hub_id(name: str) -> bool:
    # A folder on this machine may look like `user/name`; the hub would refuse or misread a card that names it.
    if Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _merged(tags: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(tags))


def _installed_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = installed.version(package)
        except installed.PackageNotFoundError:
            continue
    return versions
