"""Model card of a training run."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from groupgrad.run_folder.run_card import write_run_card


def write(folder, *, base_model="Qwen/Qwen3-0.6B", **changes) -> str:
    config = SimpleNamespace(output_dir=folder, loss_type="dapo", learning_rate=1e-6, scale_rewards="a\nb")
    model = SimpleNamespace(config=SimpleNamespace(_name_or_path=base_model))
    history = [{"reward": 0.123456, "rewards/odd|name/mean": 0.5}]
    fields = {"model_name": "ada/tiny-grpo", "dataset_name": "openai/gsm8k", "tags": ["math", "grpo"]}
    return write_run_card(config, model, history, **{**fields, **changes})


def test_the_text_has_settings_metrics_versions_and_the_citation(tmp_path):
    text = write(tmp_path, wandb_url="https://example.org/run")
    assert "| `loss_type` | dapo |" in text
    assert "| `learning_rate` | 1e-06 |" in text
    assert "| `scale_rewards` | a b |" in text
    assert "| reward | 0.1235 |" in text
    assert "| `rewards/odd\\|name/mean` | 0.5 |" in text
    assert f"| torch | {torch.__version__.split('+')[0]}" in text
    assert "2402.03300" in text
    assert "[wandb run](https://example.org/run)" in text
    assert "wandb_url" not in text


def test_the_quick_start_is_python_that_loads_this_model(tmp_path):
    text = write(tmp_path)
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    ast.parse(code)
    assert "model='ada/tiny-grpo'" in code


def test_local_paths_stay_out_of_the_metadata(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "base").mkdir(parents=True)
    text = write(tmp_path, model_name="/home/ada/runs/demo", base_model="runs/base", dataset_name=["/data/x.jsonl"])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "# demo" in text
    assert "`base`" in text
    assert "`x.jsonl`" in text
    assert "/data" not in text
    write_run_card(SimpleNamespace(output_dir=tmp_path / "runs"), SimpleNamespace())
    assert "model='runs'" in (tmp_path / "runs" / "README.md").read_text()


def test_only_the_folder_is_required(tmp_path):
    """An empty file, which a full disk leaves, is written anew."""
    (tmp_path / "README.md").touch()
    text = write_run_card(SimpleNamespace(output_dir=tmp_path), SimpleNamespace())
    assert f"# `{tmp_path.name}`" in text
    assert "Training settings" not in text
    assert "Last logged metrics" not in text
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["generated_from_trainer", "groupgrad", "grpo"]


@pytest.mark.parametrize("adapter", ["lora", "ia3"])
def test_an_adapter_is_tagged_by_its_type(adapter: str, tmp_path: Path, make_model: Any):
    peft = pytest.importorskip("peft")
    adapters = {
        "lora": peft.LoraConfig(target_modules=["q_proj"]),
        "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    }
    model = peft.get_peft_model(make_model(), adapters[adapter])
    text = write_run_card(SimpleNamespace(output_dir=tmp_path), model)
    header = yaml.safe_load(text.split("---")[1])
    assert header["library_name"] == "peft"
    assert [tag for tag in header["tags"] if tag in adapters] == [adapter]
