"""A run folder as it is read: rows by conditions, and files that change under the reader."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from synthetic_run import HOSTILE, change_columns, write_run

from groupgrad.apps.cli.main import main
from groupgrad.apps.runs.run_folder import NoRun, RunFolder, steps_made
from groupgrad.apps.runs.selection import Selection
from groupgrad.run_folder.run_files import LineFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", steps=12, rows=32, hostile=True)


@pytest.fixture
def run(folder: Path) -> RunFolder:
    run = RunFolder(folder)
    run.refresh()
    return run


def test_conversations_are_listed_by_what_was_said(tmp_path):
    """The list shows the question and the answer, not the system prompt or JSON."""
    folder = write_run(tmp_path / "chat", steps=1, rows=2)
    (path,) = (folder / "rollouts").glob("*.parquet")
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
    ]
    call = {"type": "function", "function": {"name": "count", "arguments": {"what": 'red "dots"'}}}
    as_text = {"type": "function", "function": {"name": "count", "arguments": '{"how": "twice"}'}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [call, as_text]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three.\nOr \\(3\\)."},
    ]
    texts = {"prompt": {0: json.dumps(prompt)}, "completion": {0: json.dumps(completion)}}
    change_columns(path, {**texts, "is_messages": {0: True}})
    run = RunFolder(folder)
    run.refresh()
    first, second = run.find(Selection(), limit=2)[1]
    assert (first["prompt"], first["completion"]) == ("[image] How many?", "→ count → count Three.\nOr \\(3\\).")
    assert second["prompt"].startswith("What is")
    # A search reads what was said and called, not the JSON that holds it.
    for text in ("be BRIEF", "three.\nor", "\\(3\\)", '{"what"', '{"how": "twice"}', 'red "dots"', "how many"):
        assert [row["row"] for row in run.find(Selection(text=text), limit=2)[1]] == [first["row"]], text
    for text in ("assistant", '"role"', "tool_calls"):
        assert run.find(Selection(text=text), limit=2)[0] == 0, text


def test_rows_are_found_by_each_condition(run):
    total, rows = run.find(Selection(), limit=5)
    assert total == 12 * 32 and [(row["step"], row["row"]) for row in rows] == [(12, number) for number in range(5)]
    everything = run.find(Selection(), limit=1000)[1]
    cases = [
        (Selection(first_step=3, last_step=4), lambda row: row["step"] in (3, 4)),
        (Selection(min_reward=0.5, max_reward=1.1), lambda row: 0.5 <= row["reward"] <= 1.1),
        (Selection(reward="correct", min_reward=1.0), lambda row: row["reward/correct"] == 1.0),
        (Selection(finish_reason="length"), lambda row: row["finish_reason"] == "length"),
        (Selection(tool="calculator"), lambda row: row["tools"] == "calculator"),
        (Selection(tool="calc"), lambda row: False),
        (Selection(group=2, first_step=5), lambda row: row["group"] == 2 and row["step"] >= 5),
        (Selection(text="<SCRIPT"), lambda row: row["row"] == 0),
        (Selection(text="what is 3"), lambda row: row["group"] == 3),
        (Selection(prompt_id=rows[0]["prompt_id"]), lambda row: row["prompt"] == rows[0]["prompt"]),
    ]
    for selection, wanted in cases:
        count, found = run.find(selection, limit=1000)
        assert count == len(found) == sum(map(wanted, everything)), selection
        assert all(map(wanted, found)), selection
    best = run.find(Selection(), sort="reward", limit=3)[1]
    assert [row["reward"] for row in best] == sorted((row["reward"] for row in everything), reverse=True)[:3]
    assert run.facets() == {
        "finish_reasons": ["eos", "length"], "tools": ["calculator"], "rewards": ["correct", "short"],
        "seconds": ["correct", "short"], "steps": [1, 12], "phases": ["train"],
    }  # fmt: skip


def test_whole_rows_have_their_tokens(run):
    (row,) = run.rows(7, row=0)
    assert row["tokens"][0] == HOSTILE and len(row["tokens"]) == len(row["logprobs"])
    assert [other["row"] for other in run.rows(7, group=1)] == list(range(8, 16))
    assert run.rows(99) == []


def test_a_run_that_is_being_written_is_read_as_far_as_it_is_whole(tmp_path):
    folder = write_run(tmp_path / "live", steps=4, rows=8, ended=False)
    run = RunFolder(folder)
    assert not run.refresh(limit=1)  # the newest first
    assert run.facets()["steps"] == [4, 4] and run.state() == "running"
    assert run.refresh() and run.facets()["steps"] == [1, 4]
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "resumed", "step": 4, "host": socket.gethostname(), "pid": 2**22 + 1}) + "\n")
    assert run.state() == "killed"
    own = {"event": "resumed", "step": 4, "host": socket.gethostname(), "pid": os.getpid()}
    for started, state in ((psutil.Process().create_time(), "running"), (1.7e9, "killed")):  # another with its number
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({**own, "process_started": started}) + "\n")
        assert run.state() == state
    (folder / "rollouts" / "step_000005.0.parquet").write_bytes(b"PAR1 half a file")
    os.unlink(folder / "rollouts" / "step_000004.0.parquet")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert run.refresh() and run.facets()["steps"] == [1, 3]
    lines, end = run.metrics_from("0")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ard": 1}\n')
    assert run.metrics_from(end)[0] == [{"step": 5, "reward": 1}]
    assert run.metrics_from(f"{10**6}-00000000") is None
    with pytest.raises(NoRun, match="output_dir of a run"):
        RunFolder(tmp_path)


def test_the_steps_of_a_run_are_counted_between_log_events(tmp_path):
    """With `logging_steps=50` a run of 12 steps has no metrics yet."""
    folder = write_run(tmp_path / "first", steps=12, rows=8, tokens=8, ended=False)
    (folder / "metrics.jsonl").unlink()
    events, weights = LineFile(folder / "events.jsonl"), LineFile(folder / "weights.jsonl")
    assert steps_made(folder) == RunFolder(folder).steps_made() == 12  # the step of the last file of rollouts
    weights.append({"step": 13, "digest": "0" * 16})
    with weights.path.open("a") as file:
        file.write('{"step": 14, "dig')  # a line that is being written
    assert steps_made(folder) == 13
    for path in (folder / "rollouts").iterdir():
        path.unlink()
    weights.path.unlink()
    assert steps_made(folder) == 2  # the last event's
    events.append({"time": 1.7e9, "step": 15, "event": "paused"})
    assert steps_made(folder) == 15
    events.append({"time": 1.7e9, "step": 5, "event": "resumed", "host": "elsewhere", "pid": 1})
    assert steps_made(folder) == 5  # the steps after the checkpoint are no longer part of the run
    assert steps_made(tmp_path / "none") == 0


def test_images_are_found_by_name_alone(run, folder):
    (folder / "rollout_images").mkdir(exist_ok=True)
    (folder / "rollout_images" / "ab_0.jpg").write_bytes(b"x")
    assert run.image("ab_0") is not None
    assert run.image("../config") is None and run.image("..") is None and run.image("none") is None


def run_rows(folder, step):
    """The rows of a step as they are stored."""
    run = RunFolder(folder)
    run.refresh()
    return run.rows(step)


def test_the_command_prints_rollouts(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["rollouts", str(folder), "--step", "7", "--search", "onerror"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 rollouts" in printed and "<script>" in printed and "7·0" in printed
    assert main(["rollouts", str(folder), "--step", "3:4", "--min-reward", "0.9", "--limit", "3", "--json"]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert len(rows) == 3 and all(row["reward"] >= 0.9 and row["step"] in (3, 4) and row["tokens"] for row in rows)
    (left_out,) = re.findall(r"3 of (\d+) rollouts; --limit \1 has all", printed.err)
    assert main(["rollouts", str(folder), "--step", "3:4", "--min-reward", "0.9", "--limit", left_out, "--json"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == int(left_out) > 3 and not printed.err
    assert main(["rollouts", str(folder), "--min-reward", "9"]) == 1
    assert "steps 1 to 12" in capsys.readouterr().err
    assert main(["rollouts", str(folder), "--step", "x"]) == main(["rollouts", str(folder / "none")]) == 2


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--finish-reason", "lenght"], 1, "is like that; its rollouts are of steps 1 to 12, finish reasons "),
        (["--tool", "serch"], 1, "its rollouts are of steps 1 to 12, tools "),
        (["--phase", "evall"], 1, "its rollouts are of steps 1 to 12, phases train"),
        (["--sort", "rewrd"], 2, "did you mean 'reward'?"),
        (["--reward", "corect"], 2, "which has correct, short; did you mean 'correct'?"),
        (["--reward", "short"], 2, "--reward short is for --min-reward and --max-reward, and neither is given"),
    ],
)
def test_conditions_that_select_nothing_or_nothing_more_are_said(folder, capsys, flags, status, text):
    assert main(["rollouts", str(folder), *flags]) == status
    assert text in capsys.readouterr().err


def test_a_prompt_is_followed_over_steps_in_the_terminal(folder, capsys):
    rows = run_rows(folder, 7)
    prompt_id = next(row["prompt_id"] for row in rows if row["group"] == 2)
    assert main(["rollouts", str(folder), "--prompt-id", prompt_id, "--limit", "999", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["step"] for row in found} == set(range(1, 13)) and {row["group"] for row in found} == {2}
    assert main(["rollouts", str(folder), "--prompt-id", "none"]) == 1


def test_held_out_rollouts_are_found(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "run", steps=3, rows=16, evaluated=[3])
    run = RunFolder(folder)
    run.refresh()
    assert run.facets()["phases"] == ["train", "eval"]
    total, rows = run.find(Selection(phase="eval"))
    assert total == 8 and {row["step"] for row in rows} == {3}
    assert [row["phase"] for row in run.rows(3, row=0)] == ["train"]
    assert [row["phase"] for row in run.rows(3, row=0, phase="eval")] == ["eval"]
    held_out = folder / "eval_rollouts"
    (held_out / "eval_all").mkdir()
    for path in (held_out / "eval").iterdir():
        copy = Path(shutil.copy(path, held_out / "eval_all"))
        change_columns(copy, {"phase": ["eval_all"] * 8})
    run.refresh()
    rows = run.find(Selection())[1]  # of a step those of training come first, then one evaluation after the other
    expected = [(3, "train", row) for row in range(16)]
    expected += [(3, phase, row) for phase in ("eval", "eval_all") for row in range(8)]
    expected += [(step, "train", row) for step in (2, 1) for row in range(16)]
    assert [(row["step"], row["phase"], row["row"]) for row in rows] == expected

    monkeypatch.setenv("COLUMNS", "80")
    assert main(["rollouts", str(folder), "--step", "3", "--sort", "seconds/correct", "--limit", "24"]) == 0
    printed = capsys.readouterr().out
    assert "3·0 " in printed and "3·0 eval" in printed and "3·15" in printed
    assert main(["rollouts", str(folder), "--phase", "eval", "--json"]) == 0
    assert {json.loads(line)["phase"] for line in capsys.readouterr().out.splitlines()} == {"eval"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ms"), (2e-5, "<0.1 ms"), (2.1e-4, "0.2 ms"), (0.00996, "10 ms"), (0.25, "250 ms"), (0.9996, "1 s")],
)
def test_rollouts_in_order_of_seconds_show_them(tmp_path, capsys, monkeypatch, seconds, text):
    folder = write_run(tmp_path / "run", steps=1, rows=8)
    change_columns(folder / "rollouts" / "step_000001.0.parquet", {"seconds/correct": [seconds] * 8})
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["rollouts", str(folder), "--sort", "seconds/correct"]) == 0
    printed = capsys.readouterr().out
    assert "seconds/" in printed and len(re.findall(rf"seconds/correct +{text} +│", printed)) == 8
    assert main(["rollouts", str(folder)]) == 0
    assert "seconds/" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_every_number_of_a_rollout_is_printed_at_each_width(tmp_path, capsys, monkeypatch, width):
    folder = write_run(tmp_path / "run", steps=1, rows=8)
    path = folder / "rollouts" / "step_000001.0.parquet"
    table = pq.read_table(path)
    names = {"reward/correct": "reward/correctness_reward", "reward/short": "reward/group"}
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), path)
    (row,) = [row for row in run_rows(folder, 1) if row["row"] == 3]
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["rollouts", str(folder), "--search", row["completion"]]) == 0
    printed = capsys.readouterr().out
    assert "too narrow" not in printed and max(map(len, printed.splitlines())) <= width
    numbers = [row["reward"], row["reward/correctness_reward"], row["reward/group"], row["advantage"]]
    shown = [f"{number:.2f}" for number in numbers] + [str(row["group"])]
    shown += [row["finish_reason"], str(row["num_tokens"])]
    words = printed.replace("│", " ").split()
    assert all(words.count(value) >= shown.count(value) for value in shown)
    assert "correctness_reward" in words and "finish_reason" in words


def test_files_without_phases_are_read(tmp_path):
    """As an earlier release has written them."""
    folder = write_run(tmp_path / "run", steps=1, rows=8)
    path = folder / "rollouts" / "step_000001.0.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["phase"]), path)
    run = RunFolder(folder)
    run.refresh()
    assert run.facets()["phases"] == ["train"]
    assert run.find(Selection(phase="train"))[0] == 8 and len(run.rows(1, group=0)) == 8


def test_the_page_on_curves_has_the_bounds_of_the_advice() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "reading-a-run.md").read_text()
    code = (root / "src" / "groupgrad" / "run_folder" / "advice.py").read_text()
    bounds = dict(re.findall(r'_above\(\s*"([^"]+)",\s*(0[.]\d+),', code))
    assert bounds.pop("tools/failure_frequency") and len(bounds) == 3  # tools have no row there
    bounds["frac_reward_zero_std"] = re.findall(r"share < (0[.]\d+)", code)[0]
    for name, bound in bounds.items():
        (line,) = [line for line in page.splitlines() if line.startswith("|") and f"{name}" in line and "above" in line]
        assert f"above {bound}:" in line, name


def test_a_reader_that_waits_for_the_first_rows_does_not_wait_for_all(folder):
    """Another thread reads the first files and goes on with the others at once."""
    known, run = RunFolder(folder), RunFolder(folder)
    known.refresh(limit=1)
    answered = threading.Event()
    with run._reading:
        threading.Thread(target=lambda: (run.refresh(wait=False), answered.set()), daemon=True).start()
        assert not answered.wait(0.1)
        run._parts = known._parts
        assert answered.wait(5)
