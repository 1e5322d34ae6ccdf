"""The pages that are made from the code are whole, and the navigation names pages that exist."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.objectives.methods import LOSSES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def options() -> Any:
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "docs/site/options.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_has_one_row_with_its_default(options: Any) -> None:
    page = options.page()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE))
    assert len(re.findall(r"^\| `\w", page, re.MULTILINE)) == len(rows)
    records = (GRPOConfig, TaskArguments, ModelArguments)
    assert set(rows) == {field.name for record in records for field in dataclasses.fields(record)}
    assert (rows["loss_type"], rows["num_generations"], rows["beta"]) == ("'dapo'", "8", "0.0")
    objective = page.partition("\n## Objective\n")[2].partition("\n## ")[0]
    assert "`vespo_k_pos`" in objective and "`use_vllm`" not in objective


def test_the_fields_and_flags_of_the_command_alone_have_their_own_sections(options: Any) -> None:
    own = options.page().partition("\n## Of `groupgrad train` alone\n")[2]
    assert re.findall(r"^### (.+)$", own, re.MULTILINE) == [
        *("Data", "Rewards", "Model", "Adapter and quantization", "Flags that are no keys"),
    ]
    assert "| `lora_r` | `16` |" in own and "`loss_type`" not in own
    flags = own.partition("### Flags that are no keys")[2]
    assert set(re.findall(r"^\| `--([\w-]+)` \|", flags, re.MULTILINE)) == {
        *("config", "set", "dry-run", "num-processes", "accelerate-config"),
    }


def test_every_row_of_the_losses_is_on_their_page() -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    sources = re.findall(r"^\| `\w+`(?: \(default\))? \| [^|]+ \| [^|]+ \|([^|]*)\| [^|]+ \|$", page, re.MULTILINE)
    assert len(sources) == 1 + len(LOSSES) and all(source.strip() for source in sources)
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| ", page, re.MULTILINE)[1 : 1 + len(LOSSES)]
    assert sorted(rows) == sorted(LOSSES)


def test_the_navigation_names_pages_that_exist() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    made = {"index.md", "options.md", "changelog.md", "contributing.md", "security.md", "recipes/index.md"}
    for page in set(re.findall(r"[\w/-]+\.md", text)) - made:
        source = ROOT / "docs" / page
        assert any(path.exists() for path in (source, source.with_suffix(".ipynb"), ROOT / page)), page


def test_the_api_shows_the_methods_that_the_trainer_inherits() -> None:
    """mkdocstrings leaves out what a base class defines, unless `inherited_members` names it."""
    section = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").partition("::: groupgrad.GRPOTrainer")[2]
    own, inherited = (
        [name.strip() for name in found.split(",")]
        for found in re.findall(r"^ +(?:inherited_)?members: \[(.+)\]$", section, re.MULTILINE)[:2]
    )
    assert all(callable(getattr(GRPOTrainer, name)) for name in own)
    assert inherited == [name for name in own if name not in vars(GRPOTrainer)]
