"""The accelerator's benchmark runs on a CPU with a tiny model, and reports what ran and what did not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"


def answer(trainer: str = "groupgrad", *, model: str = "0.6b", date: str = "1", seconds: float = 3.0, **more: object):
    """The worker's answer after one step: 40 tokens, of which sampling took 2 s."""
    step = {"seconds": seconds, "peak_bytes": 2**31, "held_bytes": 2**30, "lengths": [10, 30]}
    step["phases"] = {"sampling": 2.0, "training": 0.5}
    step["floors"] = {"sampling": 0.5, "training": 0.3}
    found = {"model": model, "trainer": trainer, "date": date, "version": "1", "device": "a card", "steps": [step]}
    machine = {"gflops": 640e3, "gigabytes_per_second": 3000.0}
    return {**found, "versions": {"torch": "9"}, "machine": machine, **more}


def write(folder: Path, *answers: Mapping[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    for found in answers:
        (folder / f"gpu-{found['model']}-{found['trainer']}.json").write_text(json.dumps(found))
    return folder


def test_decode_steps_of_a_tiny_model_are_timed(capsys):
    import gpu_decode

    gpu_decode.main(["--tiny", "--rows", "3", "20", "--tokens", "12", "--prompt", "8", "--steps", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "3 rows of 8 and 6 to 10 tokens, matrix products",
        "20 rows of 8 and 6 to 11 tokens, matrix products",
    ]
    assert all(" ms a step, floor " in line for line in lines)


def test_a_tiny_model_is_measured(tmp_path):
    import gpu_worker

    file = tmp_path / "answer.json"
    threads = torch.get_num_threads()
    arguments = ["--model", "tiny", "--trainer", "groupgrad", "--steps", "2", "--answer", str(file)]
    assert gpu_worker.main(arguments) == 0
    assert torch.get_num_threads() == threads
    found = json.loads(file.read_text())
    assert len(found["steps"]) == 2 and "failure" not in found
    for step in found["steps"]:
        assert len(step["lengths"]) == 8 and 1 <= min(step["lengths"]) <= max(step["lengths"]) <= 24
        assert step["phases"]["training"] > step["floors"]["training"] > 0
        assert step["seconds"] >= step["phases"]["sampling"] > step["floors"]["sampling"] > 0
        assert sum(step["phases"][part] for part in ("sampling", "training")) == pytest.approx(step["seconds"])


def test_a_model_in_half_precision_keeps_its_rotary_frequencies():
    from gpu_bench import TINY
    from materials import make_model, make_words

    tokenizer = make_words(TINY.workload.model.vocab_size)
    half, full = (make_model(TINY.workload.model, tokenizer, dtype=kind) for kind in (torch.bfloat16, torch.float32))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    expected = dict(full.named_buffers())
    assert expected.keys() >= {"model.rotary_emb.inv_freq"}
    for name, buffer in half.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_what_was_measured_before_memory_ran_out_is_kept(tmp_path, monkeypatch):
    import gpu_worker

    def train(card, trainer_name, measuring, *, steps, on_gpu):
        measuring.save([{"seconds": 1.0}])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nand what else torch says")

    monkeypatch.setattr(gpu_worker, "train", train)
    assert not gpu_worker.measure("tiny", "groupgrad", tmp_path / "answer.json", steps=3)
    found = json.loads((tmp_path / "answer.json").read_text())
    assert found["steps"] == [{"seconds": 1.0}]
    assert found["failure"] == "out of memory: CUDA out of memory. Tried to allocate 20 GiB."


@pytest.mark.parametrize(
    ("script", "failure", "steps"),
    [
        ("import sys; sys.exit(3)", "ended with status 3; its output is above", None),
        pytest.param("import time; save([1]); time.sleep(60)", "took more than 5 s", [1], marks=pytest.mark.slow),
        ("import sys; save([], failure='out of memory'); sys.exit(1)", "out of memory", []),
    ],
)
def test_a_process_that_fails_is_named(script, failure, steps, tmp_path, monkeypatch):
    import gpu_bench

    worker, file = tmp_path / "worker.py", tmp_path / "gpu-tiny-groupgrad.json"
    save = f"def save(steps, **more): open({str(file)!r}, 'w').write(json.dumps({{'steps': steps, **more}}))"
    worker.write_text(f"import json\n{save}\n{script}\n")
    file.write_text(json.dumps({"failure": "of an earlier run"}))
    monkeypatch.setattr(gpu_bench, "WORKER", worker)
    found = gpu_bench.run_one("tiny", "groupgrad", file, steps=1, timeout_s=5 if steps else 60)
    assert found["failure"] == failure
    assert found.get("steps") == steps
    assert json.loads(file.read_text()) == found


def test_a_trainer_that_is_missing_stops_nothing(tmp_path, monkeypatch):
    import gpu_bench

    worker = tmp_path / "worker.py"
    worker.write_text(f"import sys\nopen(sys.argv[-1], 'w').write({json.dumps(answer(model='tiny'))!r})\n")
    monkeypatch.setattr(gpu_bench, "WORKER", worker)
    monkeypatch.setattr(gpu_bench.importlib.util, "find_spec", lambda name: None if name == "trl" else name)
    arguments = ["--tiny", "--trainers", "trl,groupgrad", "--output", str(tmp_path / "out")]
    assert gpu_bench.main(arguments) == 0
    text = (tmp_path / "out" / "RESULTS-gpu.md").read_text()
    assert "| tiny groupgrad 1 | 1 | 3.00 |" in text
    assert "- tiny trl: trl is not installed here" in text


def test_the_report_of_several_commands(tmp_path, capsys):
    import gpu_bench

    failed = {"model": "4b", "trainer": "trl", "failure": "out of memory"}
    folders = [
        write(tmp_path / "a", answer(seconds=9.0, date="1"), failed),
        write(tmp_path / "b", answer(seconds=3.0, date="2")),
        write(tmp_path / "c", {"model": "0.6b", "trainer": "groupgrad", "failure": "ended early", "date": "3"}),
    ]
    for order in (folders, folders[::-1]):
        assert gpu_bench.main(["--merge", *map(str, order), "--output", str(tmp_path / "out")]) == 0
        text = (tmp_path / "out" / "RESULTS-gpu.md").read_text()
        assert "| 0.6b groupgrad 1 | 1 | 3.00 | 2.00 | 25% | 20 | 0.50 | 60% | 2.0 | 1.0 | 20 / 30 | - |" in text
        assert "9.00" not in text and "ended early" not in text
        assert "- 4b trl: out of memory" in text
        assert "products at 640 TFLOP/s, memory read at 3,000 GB/s" in text
    assert "0.6b groupgrad 1" in capsys.readouterr().out
    assert gpu_bench.main(["--merge", str(tmp_path / "nothing"), "--output", str(tmp_path / "out")]) == 1


def test_machines_are_not_mixed():
    from gpu_bench import render

    text = render([answer(), answer("trl", device="another card")])
    first, second = text.index("## a card, torch 9"), text.index("## another card, torch 9")
    assert first < text.index("| 0.6b groupgrad 1 |") < second < text.index("| 0.6b trl 1 |")


def test_the_process_that_starts_the_others_leaves_the_card_alone():
    code = "import sys, gpu_bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=False).returncode == 0


def test_what_is_missing_or_too_old_is_said(monkeypatch, capsys):
    import gpu_check

    versions = {"torch": "2.11.0", "transformers": "5.12.0"}
    monkeypatch.setattr(gpu_check, "installed_version", versions.get)
    monkeypatch.setattr("groupgrad.compat.installed_version", versions.get)
    found = gpu_check.problems(("torch", "transformers", "datasets"))
    assert found == [
        "datasets is not installed",
        "transformers 5.12.0 is older than 5.13, the first release that works",
    ]
    assert gpu_check.main() == 1
    assert "head of bench/gpu.sh" in capsys.readouterr().err


def test_what_does_not_load_is_said(monkeypatch):
    import gpu_check

    monkeypatch.setitem(sys.modules, "datasets", None)
    (found,) = gpu_check.problems(("torch", "datasets"))
    assert found.startswith("datasets does not load: ")


def test_what_a_library_needs_itself_is_said(monkeypatch):
    import gpu_check

    needs = ["pyarrow>=24.0.0", "dill<0.4.2,>=0.3.0", "fsspec<=2026.9.0", "torch>=99; extra == 'torch'", "tqdm>=4.66"]
    versions = {"pyarrow": "22.0.0", "fsspec": "2026.11.0", "tqdm": "4.70.1"}
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    monkeypatch.setattr(gpu_check, "installed_version", versions.get)
    assert gpu_check.unmet("datasets") == [
        "datasets needs pyarrow>=24.0.0, which is 22.0.0 here",
        "datasets needs dill>=0.3.0, which is not installed here",
    ]


def test_a_word_that_the_script_does_not_know():
    found = subprocess.run(["bash", str(BENCH / "gpu.sh"), "--models"], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "'--models' is none of tests, bench, all" in found.stderr


@pytest.mark.parametrize(("name", "millions"), [("0.6b", 596), ("4b", 4022)])
def test_shapes_are_those_of_the_released_models(name, millions):
    from gpu_bench import CARDS

    assert CARDS[name].workload.model.num_parameters / 1e6 == pytest.approx(millions, rel=0.001)
    assert CARDS[name].workload.num_generations == 16 and CARDS[name].workload.limit == 2048
