from __future__ import annotations

import ast
import re

import torch
from huggingface_hub import ModelCard

from groupgrad.telemetry import write_model_card


def write(path, **changes) -> str:
    options = {
        "model_name": "ada/tiny-grpo",
        "base_model": "Qwen/Qwen3-0.6B",
        "dataset_name": "openai/gsm8k",
        "tags": ["math", "grpo"],
        "config_summary": {"loss_type": "dapo", "learning_rate": 1e-6, "odd|name": "a\nb"},
        "metrics": {"reward": 0.123456, "rewards/accuracy_reward/mean": 0.5},
        "versions": {"torch": "9.9"},
    }
    return write_model_card(path, **{**options, **changes})


def test_the_hub_reads_the_metadata(tmp_path):
    text = write(tmp_path / "model", license="mit", language="en")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert str(card).strip() == text.strip()
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.tags == ["generated_from_trainer", "groupgrad", "grpo", "math"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert (card.data.license, card.data.language) == ("mit", "en")


def test_the_text_has_settings_metrics_versions_and_the_citation(tmp_path):
    text = write(tmp_path / "CARD.md", wandb_url="https://example.org/run")
    assert (tmp_path / "CARD.md").exists()
    assert "| `loss_type` | dapo |" in text
    assert "| `learning_rate` | 1e-06 |" in text
    assert "| `odd\\|name` | a b |" in text
    assert "| reward | 0.1235 |" in text
    assert "| torch | 9.9 |" in text
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


def test_only_the_name_is_required(tmp_path):
    text = write_model_card(tmp_path, model_name="m")
    assert f"| torch | {torch.__version__.split('+')[0]}" in text
    assert "Training settings" not in text
    assert ModelCard.load(tmp_path / "README.md").data.tags == ["generated_from_trainer", "groupgrad", "grpo"]
