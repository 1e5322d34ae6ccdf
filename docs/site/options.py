"""Writes the page of all options, of `GRPOConfig` and `groupgrad train`: `python docs/site/options.py` prints it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

from transformers import TrainingArguments

from groupgrad import GRPOConfig
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.apps.cli.parsing import train_parser
from groupgrad.config.field_rules import CHOICES, RANGES
from groupgrad.config.legacy import LegacyArguments

HEAD = """# Every option

`GRPOConfig` has the fields of `transformers.TrainingArguments` and the ones below. Each is also a flag of
`groupgrad train` (`--num_generations 8` or `--num-generations 8`) and a key of its YAML file. Values that cannot work
are refused before anything is sampled. [The last sections](#of-groupgrad-train-alone) have the flags and keys that only
`groupgrad train` has. This page is made from the code itself.

```python
from groupgrad import GRPOConfig

config = GRPOConfig(output_dir="runs/math", num_generations=8, max_completion_length=512, loss_type="dr_grpo")
```
"""

COMMAND = """## Of `groupgrad train` alone

The data, the rewards and the model, which a script passes to `GRPOTrainer`. Each option is a flag and a key of the YAML
file.
"""


def page() -> str:
    """The page as Markdown: own options by group, inherited ones, those for older scripts, and those of the command."""
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    groups = grouped(GRPOConfig, fields)
    known = {name for names in groups.values() for name in names}
    base = {field.name for field in dataclasses.fields(TrainingArguments)}
    legacy = {field.name for field in dataclasses.fields(LegacyArguments)} - base
    rest = {
        "Further options": [name for name in fields if name not in known | base | legacy],
        "For older scripts": [name for name in fields if name in legacy - known],
    }
    parts = [HEAD, *tables(groups | rest, fields)]
    parts.append(inherited(fields[name] for name in fields if name in base - known))
    return "\n".join([*parts, *of_command()])


def tables(groups: Mapping[str, Sequence[str]], fields: Mapping[str, dataclasses.Field], level: int = 2) -> list[str]:
    """A section with a table of its options for each group that has some."""
    found = []
    for title, names in groups.items():
        rows = "".join(f"\n| `{name}` | {default_of(fields[name])} | {meaning(fields[name])} |" for name in names)
        if rows:
            found.append(f"{'#' * level} {title}\n\n| option | default | what it does |\n|---|---|---|{rows}\n")
    return found


def of_command() -> list[str]:
    """The sections on what `groupgrad train` has beside `GRPOConfig`: further fields, and flags that are no fields."""
    parts = [COMMAND]
    for record in (TaskArguments, ModelArguments):
        fields = {field.name: field for field in dataclasses.fields(record)}
        parts += tables(grouped(record, fields), fields, level=3)
    parser = train_parser()
    others = [action for action in parser._actions if action.dest not in parser.fields() and action.dest != "help"]
    rows = "".join(f"\n| `{action.option_strings[0]}` | {escaped(action.help or '')} |" for action in others)
    return [*parts, f"### Flags that are no keys\n\n| flag | what it does |\n|---|---|{rows}\n"]


def grouped(record: type, known: Iterable[str]) -> dict[str, list[str]]:
    """Names of fields by the title (`# --- Title ---`) that they stand under in a class and its bases."""
    groups: dict[str, list[str]] = {}
    for cls in reversed(record.__mro__):
        if not cls.__module__.startswith("groupgrad."):
            continue
        try:
            lines = inspect.getsource(cls).splitlines()
        except OSError:  # a class made at run time
            continue
        title = None
        for line in lines:
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
    return escaped(text)


def escaped(text: str) -> str:
    """A text as a cell of a table."""
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
