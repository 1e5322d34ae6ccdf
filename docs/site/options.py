"""Writes the page of all options from `GRPOConfig`: `python docs/site/options.py` prints it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable

from transformers import TrainingArguments

from groupgrad import GRPOConfig
from groupgrad.config.field_rules import CHOICES, RANGES
from groupgrad.config.legacy import LegacyArguments

HEAD = """# Every option

`GRPOConfig` has the fields of `transformers.TrainingArguments` and the ones below. Each is also a flag of
`groupgrad train` (`--num_generations 8` or `--num-generations 8`) and a key of its YAML file. Values that cannot work
are refused before anything is sampled. This page is made from the configuration itself.

```python
from groupgrad import GRPOConfig

config = GRPOConfig(output_dir="runs/math", num_generations=8, max_completion_length=512, loss_type="dr_grpo")
```
"""


def page() -> str:
    """The page as Markdown: own options by group, inherited ones, and those for older scripts."""
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    groups = grouped(fields)
    known = {name for names in groups.values() for name in names}
    base = {field.name for field in dataclasses.fields(TrainingArguments)}
    legacy = {field.name for field in dataclasses.fields(LegacyArguments)} - base
    rest = {
        "Further options": [name for name in fields if name not in known | base | legacy],
        "For older scripts": [name for name in fields if name in legacy - known],
    }
    parts = [HEAD]
    for title, names in (groups | rest).items():
        if names:
            parts.append(f"## {title}\n\n| option | default | what it does |\n|---|---|---|")
            parts[-1] += "".join(
                f"\n| `{name}` | {default_of(fields[name])} | {meaning(fields[name])} |" for name in names
            )
            parts[-1] += "\n"
    parts.append(inherited(fields[name] for name in fields if name in base - known))
    return "\n".join(parts)


def grouped(known: Iterable[str]) -> dict[str, list[str]]:
    """Names of fields by the title (`# --- Title ---`) that they stand under in the classes of the configuration."""
    groups: dict[str, list[str]] = {}
    for cls in reversed(GRPOConfig.__mro__):
        if not cls.__module__.startswith("groupgrad."):
            continue
        title = None
        for line in inspect.getsource(cls).splitlines():
            if match := re.match(r"    # --- (.+) ---", line):
                title = match[1]
            elif (match := re.match(r"    (\w+): ", line)) and title and match[1] in known:
                groups.setdefault(title, []).append(match[1])
    return groups


def default_of(field: dataclasses.Field) -> str:
    """The default value as it is written in Python."""
    made = field.default_factory is not dataclasses.MISSING
    value = field.default_factory() if made else field.default  # pyright: ignore[reportCallIssue]
    return f"`{getattr(value, 'value', value)!r}`"


def meaning(field: dataclasses.Field) -> str:
    """The help of an option, and the values that it may have."""
    text = field.metadata.get("help", "")
    if field.name in RANGES:
        text += f" *{RANGES[field.name][0].remedy[:1].upper()}{RANGES[field.name][0].remedy[1:]}.*"
    missing = [choice for choice in CHOICES.get(field.name, ()) if choice not in text]
    if missing:
        text += f" *One of {', '.join(CHOICES[field.name])}.*"
    return text.replace("|", "\\|").replace("<", "&lt;")


def inherited(fields: Iterable[dataclasses.Field]) -> str:
    """The table of options that come from `transformers.TrainingArguments`, whose documentation describes them."""
    rows = "\n".join(f"| `{field.name}` | {default_of(field)} |" for field in fields)
    return (
        "## Of `transformers.TrainingArguments`\n\nThe documentation of transformers describes them.\n\n"
        f"| option | default |\n|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    print(page(), end="")
