"""Every file of `recipes/` trains, and its page says the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulated_vllm import simulate_vllm

from groupgrad import GRPOConfig
from groupgrad.rewards import REWARD_FUNCTIONS

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SMALL = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-3}
"""Sizes that a recipe may set, as small as a test needs them."""
NOT_OF_THE_CONFIGURATION = {"reward_funcs"}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))


def test_there_are_at_least_twelve() -> None:
    assert len(NAMES) >= 12
    listed = re.findall(r"\]\(([\w-]+)\.md\)", (RECIPES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted([*NAMES, "papers", "papers-real"])


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_file_says(name: str) -> None:
    page = (RECIPES / f"{name}.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \| .+ \|$", page, re.MULTILINE))
    settings = read(name)
    assert set(settings.pop("reward_funcs")) <= set(REWARD_FUNCTIONS)
    assert settings.pop("output_dir") == f"runs/{name}"
    assert {key: yaml.safe_load(value) for key, value in shown.items()} == settings
    assert "\nSource: [" in page and "\n**When:** " in page


@pytest.mark.filterwarnings("error:these settings have no effect")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_a_configuration_as_it_is(name: str, tmp_path: Path) -> None:
    settings = {key: value for key, value in read(name).items() if key not in NOT_OF_THE_CONFIGURATION}
    GRPOConfig(**settings | {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"})


@pytest.mark.quick("dapo", "gdpo", "moving_reference", "truncated_importance_sampling")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_trains(name: str, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {key: value for key, value in read(name).items() if key not in NOT_OF_THE_CONFIGURATION}
    if settings.get("use_vllm"):
        settings |= {"vllm_max_model_length": 64}
        started = simulate_vllm(monkeypatch)
    steps = 3 if settings.get("steps_per_generation") else 2
    if settings.get("advantage_estimator") == "maxrl":
        settings["reward_funcs"] = lambda completion_ids, **_: [float(len(ids) % 2) for ids in completion_ids]
    trainer = train(**settings | SMALL | {"max_steps": steps, "output_dir": str(tmp_path)})
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == steps
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in logged)
    assert any(entry["grad_norm"] > 0 for entry in logged)
    if settings.get("use_vllm"):
        assert started and all(entry["sampling/importance_sampling_ratio/mean"] > 0 for entry in logged)
