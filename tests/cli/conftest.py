"""A small run as files and flags of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FILE = """\
max_steps: 2
num_generations: 4
per_device_train_batch_size: 8
max_completion_length: 3
reward_weights: [0.5]
logging_steps: 10
"""


@pytest.fixture
def run_flags(tmp_path: Path, make_model: Any, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a small run in the working folder, with `FILE` as its settings."""
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
    return [
        *("--config", "run.yaml", "--dataset_name", "rows.jsonl", "--model_name_or_path", str(tmp_path / "model")),
        *("--reward_funcs", "counts.count", "--output-dir", "out", "--report_to", "none", "--use-cpu"),
    ]
