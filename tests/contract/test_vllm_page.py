"""`docs/vllm.md` names every option of vLLM with its default."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from groupgrad import GRPOConfig
from groupgrad.config.legacy import LEGACY

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def options_on_the_page() -> dict[str, object]:
    """Names and defaults of its table of options."""
    found: dict[str, object] = {}
    table = PAGE.read_text(encoding="utf-8").partition("## Options")[2].partition("\n## ")[0]
    for line in table.splitlines():
        cells = line.strip("|").split(" | ")
        names, defaults = (re.findall(r"`([^`]+)`", cell) for cell in [*cells, "", ""][:2])
        found |= {name: ast.literal_eval(default) for name, default in zip(names, defaults)}
    return found


def test_every_option_is_there_with_its_default() -> None:
    wanted = {
        option.name: option.default
        for option in fields(GRPOConfig)
        if option.name.startswith("vllm_") or option.name in ("use_vllm", "rollout_ahead")
    }
    earlier = {name for name, row in LEGACY.items() if name.startswith("vllm_") and row.into is not None}
    assert options_on_the_page() == {name: default for name, default in wanted.items() if name not in LEGACY}
    assert all(f"`{name}` is its earlier name" in PAGE.read_text(encoding="utf-8") for name in earlier)
