"""`groupgrad train` runs: flags in both spellings and a file of settings take effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from groupgrad.cli.main import main

FILE = """\
max_steps: 2
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 3
reward_weights: [0.5]
logging_steps: 10
"""


def test_flags_and_a_file_take_effect(
    tmp_path: Path, make_model: Any, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """What the log of the run shows of each setting; a flag wins over the file."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "counts.py").write_text(
        "def count(completions, answer, **kwargs):\n    return [float(len(text)) for text in completions]\n"
    )
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    flags = [
        *("--config", "run.yaml", "--dataset_name", "rows.jsonl", "--model_name_or_path", str(tmp_path / "model")),
        *("--reward_funcs", "counts.count", "--output-dir", "out", "--report_to", "none", "--use-cpu"),
        *("--learning-rate", "3e-3", "--lr_scheduler_type=constant", "--beta=0.1", "--logging-steps", "1"),
        *("--save_strategy", "steps", "--save_steps", "2", "--no_shuffle_dataset", "--log-completions"),
        *("--num_completions_to_print", "1"),
    ]
    assert main(["train", *flags]) == 0
    entries = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in entries] == [1, 2]
    for entry in entries:
        assert entry["learning_rate"] == 3e-3
        assert entry["completions/max_length"] <= 3
        assert entry["reward"] == pytest.approx(0.5 * entry["rewards/count/mean"])
        assert "kl" in entry
    assert entries[1]["epoch"] == 0.5  # two groups of four a step, of eight prompts
    shown = capsys.readouterr().out
    assert shown.count("0+1=") + shown.count("1+1=") == 1
    assert (tmp_path / "out" / "model.safetensors").is_file()
