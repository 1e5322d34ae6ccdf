"""The accelerator's benchmark runs on a CPU with a tiny model, and reports what ran and what did not."""

from __future__ import annotations

import json

import pytest
import torch


def test_a_tiny_model_is_measured(tmp_path):
    import gpu_bench

    file = tmp_path / "answer.json"
    threads = torch.get_num_threads()
    assert gpu_bench.main(["--tiny", "--steps", "2", "--one", "tiny", "groupgrad", str(file)]) == 0
    assert torch.get_num_threads() == threads
    found = json.loads(file.read_text())
    assert len(found["steps"]) == 2
    for step in found["steps"]:
        assert len(step["lengths"]) == 8 and 1 <= min(step["lengths"]) <= max(step["lengths"]) <= 24
        assert step["phases"]["sampling"] > 0 and step["phases"]["training"] > 0
        assert step["seconds"] >= step["phases"]["sampling"]


def test_the_report_names_what_did_not_run():
    from gpu_bench import render

    step = {"seconds": 3.0, "peak_bytes": 2**31, "held_bytes": 2**30, "lengths": [10, 30]}
    step["phases"] = {"sampling": 2.0, "training": 0.5}
    measured = {("0.6b", "groupgrad"): {"steps": [step], "version": "1"}}
    text = render("a card", measured, {"0.6b trl": "trl is not installed here"})
    assert "| 0.6b groupgrad 1 | 3.00 | 2.00 | 20 | 0.50 | 2.0 | 1.0 | 20 / 30 | - |" in text
    assert "- 0.6b trl: trl is not installed here" in text


@pytest.mark.parametrize(("name", "millions"), [("0.6b", 596), ("4b", 4022)])
def test_shapes_are_those_of_the_released_models(name, millions):
    from gpu_bench import CARDS

    assert CARDS[name].workload.model.num_parameters / 1e6 == pytest.approx(millions, rel=0.001)
    assert CARDS[name].workload.num_generations == 16 and CARDS[name].workload.limit == 2048
