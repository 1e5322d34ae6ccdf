"""A small run as files and flags of the command line."""

from __future__ import annotations

import json
import sys
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
def work(tmp_path: Path, make_model: Any, make_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, data and a reward function, which is the working folder."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "counts.py").write_text(
        "def count(completions, answer, **kwargs):\n    return [float(len(text)) for text in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counts", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture
def run_flags(work: Path) -> list[str]:
    """Flags of a small run in the working folder, with `FILE` as its settings."""
    (work / "run.yaml").write_text(FILE)
    return [
        *("--config", "run.yaml", "--dataset_name", "rows.jsonl", "--model_name_or_path", str(work / "model")),
        *("--reward_funcs", "counts.count", "--output-dir", "out", "--report_to", "none", "--use-cpu"),
    ]
