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
from groupgrad.objectives import ESTIMATORS, LOSSES, MASKS

ROOT = Path(__file__).parents[2]


def page_script(name: str) -> Any:
    """A script of the site, as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / f"docs/site/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def options() -> Any:
    return page_script("options")


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


def test_the_page_of_losses_says_what_their_files_say() -> None:
    page = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
    assert page == page_script("losses").written(page), "run `python docs/site/losses.py`"
    for names in (LOSSES, ESTIMATORS, MASKS):
        assert all(f"| [`{name}`](#{name})" in page and f"\n### {name}\n" in page for name in names)
    assert "| [`dapo`](#dapo) (default) |" in page and "`threshold` = 0.2 (more than 0): Divergence of a token" in page


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
