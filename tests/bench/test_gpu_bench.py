"""The accelerator's benchmark runs on a CPU with a tiny model, and reports what ran and what did not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import gpu_bench
import gpu_check
import gpu_decode
import gpu_kernels
import gpu_worker
import pytest
import torch
from floor import Machine
from gpu_bench import CARDS, gpu_tests
from materials import make_model, make_words
from simulated_cuda import to_cuda, trainers_on_simulated_cuda
from triton_twins import triton_twins

BENCH = Path(__file__).parents[2] / "bench"
TINY = ["--model", "tiny", "--trainer", "groupgrad"]


def trained() -> dict[str, object]:
    """What a worker leaves after one step: 40 tokens, of which sampling took 2 s."""
    step = {"seconds": 3.0, "peak_bytes": 2**31, "held_bytes": 2**30, "lengths": [10, 30]}
    step["phases"] = {"sampling": 2.0, "training": 0.5}
    step["floors"] = {"sampling": 0.5, "training": 0.3}
    machine = {"gflops": 640e3, "gigabytes_per_second": 3000.0}
    found = {"model": "0.6b", "trainer": "groupgrad", "version": "1", "device": "a card", "steps": [step]}
    return {**found, "versions": {"torch": "9"}, "machine": machine}


def test_decode_steps_of_a_tiny_model_are_timed(tmp_path, capsys):
    file = tmp_path / "answer.json"
    sizes = ["--rows", "3", "20", "--tokens", "12", "--prompt", "8", "--steps", "3"]
    gpu_decode.main(["--tiny", *sizes, "--answer", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", compiled")[0] for line in lines] == ["tiny, 3 rows", "tiny, 20 rows"]
    steps = json.loads(file.read_text())["steps"]
    assert [step["rows"] for step in steps] == [3, 20]
    assert all(step["milliseconds"] > 0 and step["path"] == "compiled" for step in steps)


def test_kernels_are_checked_in_a_rehearsal(tmp_path, capsys):
    file = tmp_path / "answer.json"
    assert gpu_kernels.main(["--tiny", "--answer", str(file)]) == 0
    assert [check["name"] for check in json.loads(file.read_text())["checks"]] == [
        *("decode attention, 3 rows", "decode attention, 20 rows"),
        *("head of 16 by 500, groupgrad", "training attention"),
    ]


def test_a_check_that_fails_is_counted(tmp_path, capsys):
    report = gpu_kernels.Report(tmp_path / "answer.json", torch.device("cpu"))
    report.add("one", False, "differs")
    report.run("two", lambda: 1 / 0)
    report.add("three", True, "right")
    assert report.num_failed == 2
    found = json.loads((tmp_path / "answer.json").read_text())["checks"]
    assert [check["ok"] for check in found] == [False, False, True]
    assert found[1]["text"] == "ZeroDivisionError: division by zero"


def test_a_tiny_model_is_measured(tmp_path):
    file = tmp_path / "answer.json"
    threads = torch.get_num_threads()
    assert gpu_worker.main([*TINY, "--seconds", "1e6", "--answer", str(file)]) == 0
    assert torch.get_num_threads() == threads
    found = json.loads(file.read_text())
    assert len(found["steps"]) == gpu_worker.STEPS - 1 and "failure" not in found
    assert [(check["name"], check["ok"]) for check in found["checks"]] == [
        ("numbers", True),
        ("path", True),
        ("fallbacks", True),
    ]
    for step in found["steps"]:
        assert len(step["lengths"]) == 8 and 1 <= min(step["lengths"]) <= max(step["lengths"]) <= 24
        assert step["phases"]["training"] > step["floors"]["training"] > 0
        assert step["seconds"] >= step["phases"]["sampling"] > step["floors"]["sampling"] > 0
        assert sum(step["phases"][part] for part in ("sampling", "training")) == pytest.approx(step["seconds"])


@pytest.mark.slow
def test_the_fast_path_is_checked_on_a_simulated_card(tmp_path, monkeypatch):
    """In half precision on the simulated device, with and without the kernels that the fast path needs."""

    def build(workload, words):
        return make_model(workload.model, words, dtype=torch.bfloat16).eval()

    monkeypatch.setattr(gpu_worker, "STEPS", 2)
    monkeypatch.setitem(gpu_worker.CARDS, "smoke", gpu_worker.CARDS["tiny"])
    monkeypatch.setattr(gpu_worker, "describe_device", lambda on_gpu: "simulated")
    monkeypatch.setattr(gpu_worker, "measure_device", lambda on_gpu: Machine(100.0, None, 10.0, 2))
    monkeypatch.setattr(gpu_worker, "build_model", lambda workload, words, on_gpu: to_cuda(build(workload, words)))
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    file, failed = tmp_path / "answer.json", []
    with trainers_on_simulated_cuda():
        for kernels in (triton_twins(), nullcontext()):
            with kernels:
                gpu_worker.measure("smoke", "groupgrad", file, seconds=1e6)
            found = json.loads(file.read_text())
            assert len(found["checks"]) == 6 and "failure" not in found, found
            failed.append([check["name"] for check in found["checks"] if not check["ok"]])
    assert failed[0] == [] and "path" in failed[1]


def test_no_step_is_begun_that_would_not_fit(tmp_path):
    file = tmp_path / "answer.json"
    assert gpu_worker.main([*TINY, "--seconds", "0", "--answer", str(file)]) == 0
    assert json.loads(file.read_text())["steps"] == []  # the one that warms up, and no other


def test_a_model_in_half_precision_keeps_its_rotary_frequencies():
    shape = CARDS["tiny"].workload.model
    half, full = (make_model(shape, make_words(shape.vocab_size), dtype=x) for x in (torch.bfloat16, torch.float32))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    expected = dict(full.named_buffers())
    assert expected.keys() >= {"model.rotary_emb.inv_freq"}
    for name, buffer in half.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_what_was_measured_before_memory_ran_out_is_kept(tmp_path, monkeypatch):
    def train(card, trainer_name, measuring, *, on_gpu):
        measuring.save([{"seconds": 1.0}])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nand what else torch says")

    monkeypatch.setattr(gpu_worker, "train", train)
    assert gpu_worker.measure("tiny", "groupgrad", tmp_path / "answer.json", seconds=3) == 1
    found = json.loads((tmp_path / "answer.json").read_text())
    assert found["steps"] == [{"seconds": 1.0}]
    assert found["failure"] == "out of memory: CUDA out of memory. Tried to allocate 20 GiB."


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Makes the body of a script a stage, which finds the path of its answer in `answer`."""

    def make(name: str, body: str, limit: int = 60) -> None:
        script = tmp_path / f"{name}.py"
        script.write_text(f"import sys, json, time, pathlib\nanswer = pathlib.Path(sys.argv[-1])\n{body}\n")
        monkeypatch.setitem(gpu_bench.STAGES, name, gpu_bench.Stage(limit, (str(script), "ANSWER"), ()))

    return make


@pytest.mark.slow
def test_stages_that_fail_stop_nothing_and_are_counted(stage, tmp_path, capsys):
    stage("smoke", "print('on the way', flush=True); sys.exit(3)")
    stage("decode", "answer.write_text('{\"steps\": []}'); print('waits', flush=True); time.sleep(60)", limit=3)
    stage("steps", f"answer.write_text({json.dumps(trained())!r})")
    output = tmp_path / "out"
    assert gpu_bench.main(["smoke", "decode", "steps", "--output", str(output)]) == 2
    text = (output / "RESULTS-gpu.md").read_text()
    assert " of 60 | ended with status 3 |" in text and " of 3 | ended after its 3 s |" in text
    assert "| 0.6b groupgrad 1 | 1 | 3.00 | 2.00 | 25% | 20 | 0.50 | 60% | 384 | 2.0 | 1.00 / 1.00 | 20 / 30 |" in text
    assert "on the way" in (output / "gpu.log").read_text() and "on the way" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_runs_where_groupgrad_cannot(stage, tmp_path):
    """Unless the check was merely too slow."""
    stage("check", "sys.exit(1)")
    stage("smoke", "pathlib.Path(answer.parent, 'ran').touch()")
    assert gpu_bench.main(["check", "smoke", "--output", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out" / "ran").exists()
    stage("check", "time.sleep(60)", limit=1)  # which says nothing of groupgrad
    assert gpu_bench.main(["check", "smoke", "--output", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "ran").exists()


def test_a_failed_check_is_a_failure_of_its_stage(stage, tmp_path):
    checks = {"checks": [{"name": "path", "ok": False, "text": "eager"}, {"name": "memory", "ok": True, "text": "0"}]}
    stage("smoke", f"answer.write_text({json.dumps(checks)!r}); sys.exit(1)")
    assert gpu_bench.main(["smoke", "--output", str(tmp_path / "out")]) == 1
    assert "| path | **no** | eager |" in (tmp_path / "out" / "RESULTS-gpu.md").read_text()


def test_the_second_call_runs_every_file_with_tests_for_a_card():
    tests = BENCH.parent / "tests"
    marked = [path for path in tests.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text(encoding="utf-8")]
    assert gpu_tests() == sorted(str(path) for path in marked if path != Path(__file__))


def test_the_process_that_starts_the_others_leaves_the_card_alone():
    code = "import sys, gpu_bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=BENCH, check=False).returncode == 0


def test_what_is_missing_or_too_old_is_said(monkeypatch, capsys):
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
    monkeypatch.setitem(sys.modules, "datasets", None)
    (found,) = gpu_check.problems(("torch", "datasets"))
    assert found.startswith("datasets does not load: ")


def test_what_a_library_needs_itself_is_said(monkeypatch):
    needs = ["pyarrow>=24.0.0", "dill<0.4.2,>=0.3.0", "fsspec<=2026.9.0", "torch>=99; extra == 'torch'", "tqdm>=4.66"]
    versions = {"pyarrow": "22.0.0", "fsspec": "2026.11.0", "tqdm": "4.70.1"}
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    monkeypatch.setattr(gpu_check, "installed_version", versions.get)
    assert gpu_check.unmet("datasets") == [
        "datasets needs pyarrow>=24.0.0, which is 22.0.0 here",
        "datasets needs dill>=0.3.0, which is not installed here",
    ]


def test_a_word_that_the_script_does_not_know(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(BENCH / "gpu.sh"), "everything"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 2
    assert "unknown: everything; say first, second, or some of check, smoke" in found.stderr


@pytest.mark.parametrize(("name", "millions"), [("0.6b", 596), ("8b", 8190)])
def test_shapes_are_those_of_the_released_models(name, millions):
    assert CARDS[name].workload.model.num_parameters / 1e6 == pytest.approx(millions, rel=0.001)
