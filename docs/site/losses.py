"""Writes what docs/losses.md takes from the files of losses and estimators: `python docs/site/losses.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from groupgrad import GRPOConfig
from groupgrad.objectives import ESTIMATORS, LOSSES, MASKS

PAGE = Path(__file__).parents[1] / "losses.md"


def with_links(text: str) -> str:
    """Links the numbers of papers."""
    return re.sub(r"arXiv:(\d{4}\.\d{5})", r"[\1](https://arxiv.org/abs/\1)", text)


class Definition:
    """The documentation of a loss, an estimator or a mask, read from its file."""

    def __init__(self, package: str, name: str, definition: Any):
        self.name, self.definition = name, definition
        text = inspect.cleandoc(import_module(f"groupgrad.objectives.{package}.{name}").__doc__ or "")
        first, *rest = [part if "$$" in part else " ".join(part.split()) for part in text.split("\n\n")]
        self.title, _, self.summary = first.partition(": ")
        self.parts = [part for part in rest if not part.startswith(("When: ", "Source: "))]
        marked = {part.partition(": ")[0]: part.partition(": ")[2] for part in rest if part not in self.parts}
        self.when, self.source = marked["When"], with_links(marked.get("Source", "none"))

    def row(self, default: str) -> str:
        """Its row of the table."""
        mark = " (default)" if self.name == default else ""
        cells = (self.summary[0].upper() + self.summary[1:], self.source, self.when)
        return f"| [`{self.name}`](#{self.name}){mark} | {' | '.join(text.removesuffix('.') for text in cells)} |"

    def section(self, option: str) -> str:
        """Its section: what its docstring says beyond the summary, its settings and its metrics."""
        parts = [f"### {self.name}", f"**{self.title}**: {self.summary}", *map(with_links, self.parts)]
        settings = [
            f"`{field.name}` = {field.default}{in_range(field)}: {meaning}"
            for field, meaning in described(self.definition.settings)
        ]
        if settings:
            parts.append(f"`{option}`: {' '.join(settings)}")
        fields = {field.name for field in dataclasses.fields(GRPOConfig)}
        known = [name for name in getattr(self.definition, "reads", ()) if name in fields]
        facts = {"Options": known, "Metrics": getattr(self.definition, "metrics", ())}
        lines = [f"{title}: {', '.join(f'`{name}`' for name in names)}." for title, names in facts.items() if names]
        return "\n\n".join([*parts, *([" ".join(lines)] if lines else [])])


def in_range(field: dataclasses.Field[Any]) -> str:
    """The range of a setting in brackets, if it has one."""
    return f" ({field.metadata['range'].words})" if field.metadata else ""


def described(settings: type[Any] | None) -> list[tuple[Any, str]]:
    """The fields of a record of settings, with the text below each."""
    if settings is None:
        return []
    texts = dict(
        re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', inspect.getsource(settings), re.MULTILINE | re.DOTALL)
    )
    return [(field, " ".join(texts[field.name].split())) for field in dataclasses.fields(settings)]


def table(definitions: Mapping[str, Definition], option: str) -> str:
    """A row for each, the default first."""
    default = str(getattr(GRPOConfig(use_cpu=True), option))
    names = sorted(definitions, key=lambda name: (name != default, name))
    head = f"| `{option}` | what it is | source | when |\n|---|---|---|---|\n"
    return head + "\n".join(definitions[name].row(default) for name in names)


def blocks() -> dict[str, str]:
    """The parts of the page that are written here, by the names of their marks."""
    losses = {name: Definition("methods", name, method) for name, method in LOSSES.items()}
    estimators = {name: Definition("estimators", name, estimator) for name, estimator in ESTIMATORS.items()}
    masks = {name: Definition("masks", name, mask) for name, mask in MASKS.items()}
    return {
        "table of losses": table(losses, "loss_type"),
        "losses": "\n\n".join(one.section("loss_settings") for one in losses.values()),
        "table of estimators": table(estimators, "advantage_estimator"),
        "estimators": "\n\n".join(one.section("advantage_settings") for one in estimators.values()),
        "table of masks": table(masks, "off_policy_mask"),
        "masks": "\n\n".join(one.section("off_policy_mask_settings") for one in masks.values()),
    }


def written(page: str) -> str:
    """The page with the parts that are written here."""
    for name, text in blocks().items():
        begin, end = f"<!-- {name}: written by docs/site/losses.py -->\n", f"\n<!-- end of {name} -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"{PAGE} has no part between {begin!r} and {end!r}")
        page = before + begin + text + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
