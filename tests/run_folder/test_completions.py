"""TRL's table of completions: its files, its print on a terminal, and what trackers get."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

from groupgrad import dist
from groupgrad.run_folder.completions import CompletionLog, to_table
from groupgrad.run_folder.render import plain_text, visible
from groupgrad.types import Prompt, RewardTable, Rollout

RED, BLUE = (Image.new("RGB", (2, 2), color) for color in ("red", "blue"))
FIXED = ("step", "prompt", "completion", "advantage", "finish_reason", "num_tokens")


def record(i: int, **changes: Any) -> dict[str, Any]:
    rewards = {"accuracy": 1.0, "format": None}
    row = {
        "prompt": f"question {i}",
        "completion": f"answer {i}",
        **rewards,
        "advantage": 0.25 * i,
        "num_tokens": 3 + i,
    }
    return {**row, "solution": str(i), **changes}


def add(log: CompletionLog, *records: dict[str, Any], phase: str = "train", rewards=("accuracy", "format")) -> None:
    """Adds the records as a generation batch of step 10; keys beyond those of all tables are logged by rewards."""
    rollouts = [
        Rollout(Prompt([1], {"prompt": r["prompt"]}, 0), row, [5] * r.get("num_tokens", 1), "eos", r["completion"], "")
        for row, r in enumerate(records)
    ]
    values = [[float("nan") if r[name] is None else r[name] for name in rewards] for r in records]
    extras = dict.fromkeys(key for r in records for key in r if key not in (*FIXED, *rewards))
    columns = {key: [r.get(key) for r in records] for key in extras}
    table = RewardTable(torch.tensor(values, dtype=torch.float64), list(rewards), columns)
    log.add(rollouts, table, [r["advantage"] for r in records], 10, phase=phase)


def quiet_log(folder: Path, **options: Any) -> CompletionLog:
    return CompletionLog(folder, **{"num_to_print": 0, **options})


def printed(log: CompletionLog, width: int, step: int = 10, phase: str = "train") -> str:
    log.console = Console(file=io.StringIO(), width=width, force_terminal=False)
    log.flush(step, phase)
    return log.console.file.getvalue()


def seen(image: Any, text: str = "see?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


class TestFiles:
    def test_columns_and_values_read_back(self, tmp_path):
        log = quiet_log(tmp_path)
        assert log.flush(9) is None
        add(log, record(2), record(1, format=float("nan"), accuracy=0.5), record(0, format=-1))
        path = log.flush(10)
        assert path == tmp_path / "completions" / "completions_00010.parquet" and log.flush(10) is None
        frame = pd.read_parquet(path)
        names = "step prompt completion accuracy format advantage finish_reason num_tokens solution"
        assert list(frame.columns) == names.split()
        assert frame["accuracy"].tolist() == [1.0, 0.5, 1.0] and set(frame["step"]) == {10}
        assert frame["format"].isna().tolist() == [True, True, False]
        assert frame["format"].dtype == frame["advantage"].dtype == "float64"
        assert frame["advantage"].tolist() == [0.5, 0.25, 0.0] and frame["num_tokens"].tolist() == [5, 4, 3]

    def test_each_phase_and_each_flush_of_a_step_has_a_file(self, tmp_path):
        log, found = quiet_log(tmp_path), {}
        add(log, record(1), record(2), phase="eval")
        add(log, record(3), phase="eval_math/easy")
        for phase, number in (("train", 4), ("train", 5), ("eval", None), ("eval_math/easy", None)):
            if number is not None:
                add(log, record(number))
            path = log.flush(7, phase)
            found[path.name] = [text[-1] for text in pd.read_parquet(path)["prompt"]]
        assert found == {
            "completions_00007.parquet": ["4"],
            "completions_00007_2.parquet": ["5"],
            "eval_00007.parquet": ["1", "2"],
            "eval_math_easy_00007.parquet": ["3"],
        }
        assert {path.name for path in (tmp_path / "completions").iterdir()} == set(found)

    def test_only_the_main_process_writes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dist, "is_main", lambda: False)
        log = quiet_log(tmp_path)
        add(log, record(0))
        assert log.flush(1) is None and not (tmp_path / "completions").exists()

    def test_the_main_process_has_the_rows_of_all_ranks_in_their_order(self, tmp_path, monkeypatch):
        log = quiet_log(tmp_path)
        monkeypatch.setattr(dist, "all_gather_objects", lambda own: [own, (["other"], {-1: record(7, other=0.5)})])
        add(log, record(0), record(1))
        frame = pd.read_parquet(log.flush(1))
        assert frame["prompt"].tolist() == ["question 7", "question 0", "question 1"]
        assert frame["other"].dtype == "float64" and frame["other"].isna().tolist() == [False, True, True]

    def test_messages_stay_structured_and_lose_their_images(self, tmp_path):
        log = quiet_log(tmp_path)
        completion = [{"role": "assistant", "content": "yes"}]
        add(log, *(record(i, prompt=seen(RED), completion=completion, images=[RED]) for i in range(2)))
        frame = pd.read_parquet(log.flush(10))
        blocks = frame["prompt"][0][0]["content"]
        assert blocks[0] == {"type": "image", "image": "[IMAGE]", "text": None} and blocks[1]["text"] == "see?"
        assert frame["completion"][1][0] == completion[0] and "images" not in frame

    def test_columns_of_mixed_types_become_json_and_missing_values_null(self, tmp_path):
        log = quiet_log(tmp_path)
        mixed = [1, "a", {"b": {1, 2}}, None]
        add(log, *(record(i, mixed=value, empty={}) for i, value in enumerate(mixed)))
        add(log, record(4))
        frame = pd.read_parquet(log.flush(10))
        assert frame["mixed"].tolist()[:3] == ["1", '"a"', '{"b": [1, 2]}'] and frame["mixed"][3:].isna().all()
        assert frame["empty"].tolist()[:4] == ["{}"] * 4 and pd.isna(frame["empty"][4])

    def test_half_decoded_text_and_huge_numbers_can_be_written(self):
        table = to_table([{"text": "a\ud800b", "big": 2**70}, {"text": "c", "big": 1}])
        assert table.to_pydict() == {"text": ["a?b", "c"], "big": [str(2**70), "1"]}

    def test_records_survive_a_checkpoint(self, tmp_path):
        first, second = quiet_log(tmp_path / "a"), quiet_log(tmp_path / "b")
        add(first, record(0, accuracy=0.5))
        add(first, record(5), phase="eval")
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        for log in (first, second):
            add(log, record(1))
        frames = [pd.read_parquet(log.flush(10)) for log in (first, second)]
        pd.testing.assert_frame_equal(*frames)
        assert frames[0]["accuracy"].tolist() == [0.5, 1.0]


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
TURNS = [
    {"role": "assistant", "content": "", "reasoning_content": "well", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
]
UNSAFE = {"completion": "[bold]x[/bold] [/] \x1b[2J\x07 \u202e \x9b", "solution": "[red]y", "prompt": "[/link]"}


class TestTable:
    @pytest.mark.parametrize("width", [80, 100, 140, 200])
    @pytest.mark.parametrize("num_rewards", [1, 2, 8])
    def test_every_width_holds_text_and_scores(self, tmp_path, width, num_rewards):
        rewards = {f"reward_function_number_{i}": 0.126 for i in range(num_rewards)}
        log = CompletionLog(tmp_path)
        row = {"prompt": "how much?", "completion": "seven", **rewards, "advantage": -1.0, "a": "note", "b": [1]}
        add(log, row, rewards=list(rewards))
        text = printed(log, width)
        assert max(map(cell_len, text.splitlines())) <= width and "Step 10" in text.splitlines()[0]
        assert "how much?" in text and "seven" in text and text.count("0.13") == num_rewards and "-1.00" in text
        assert "note" in text

    def test_rewards_come_first_then_the_advantage_and_what_functions_logged(self, tmp_path):
        log = CompletionLog(tmp_path)
        values = {"correctness_reward": 1.0, "format_reward": None, "advantage": -0.25, "solution": "17"}
        row = {"prompt": "p", "completion": "c", **values, "note": "note " + "x" * 60}
        add(log, row, rewards=["correctness_reward", "format_reward"])
        lines = [line.split("│") for line in printed(log, 100).splitlines() if line.startswith("│")]
        assert [part.strip() for part in lines[0]] == ["", "Prompt", "Completion", "Scores", ""]
        scores = [" ".join(line[3].split()) for line in lines[1:]]
        wanted = ["correctness_reward 1.00", "format_reward -", "advantage -0.25", "solution 17"]
        assert scores == [*wanted, "note note " + "x" * 19]

    @pytest.mark.parametrize(
        ("changes", "shown"),
        [
            (
                {"prompt": seen(None, "look"), "completion": TURNS},
                ["USER", "[IMAGE]", "look", "ASSISTANT", "well", "add(a=1, b='x')", "TOOL"],
            ),
            (UNSAFE, ["[bold]x[/bold] [/] ␛[2J␇ <202E> <009B>", "[red]y", "[/link]"]),
            ({"completion": "first" + "x" * 100_000 + "last"}, ["first", "last", "98,009 characters"]),
        ],
    )
    def test_texts_are_shown_as_they_are_and_do_nothing(self, tmp_path, changes, shown):
        """Messages by role, markup and control characters as text, of a very long text the ends."""
        log = CompletionLog(tmp_path)
        add(log, record(0, **changes))
        text = printed(log, 160)
        assert all(part in text for part in shown) and len(text.splitlines()) < 60
        assert not any(character in text for character in "\x1b\x07\u202e\x9b")

    def test_reasoning_is_dim_and_italic_on_a_terminal(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, record(0, completion=[{"role": "assistant", "content": "no", "reasoning_content": "hm"}]))
        log.console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
        log.flush(1)
        assert "\x1b[2;3mhm" in log.console.file.getvalue()

    def test_a_terminal_without_unicode_still_prints(self, tmp_path):
        log, raw = CompletionLog(tmp_path), io.BytesIO()
        add(log, record(0, completion="数学"))
        log.console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=120, force_terminal=False)
        log.flush(1)
        log.console.file.flush()
        assert b"\\u6570\\u5b66" in raw.getvalue()

    @pytest.mark.parametrize(("num_to_print", "count"), [(0, 0), (3, 3), (99, 20), (None, 20)])
    def test_a_subset_is_reproducible_and_leaves_the_global_generator_alone(self, tmp_path, num_to_print, count):
        def rows() -> list[int]:
            log = CompletionLog(tmp_path, num_to_print=num_to_print)
            add(log, *(record(i, prompt=f"Q{i:02d}") for i in range(20)), phase="eval_math")
            text = printed(log, 120, 3, "eval_math")
            assert not count or "Step 3 (eval_math)" in text.splitlines()[0]
            return [i for i in range(20) if f"Q{i:02d}" in text]

        state = random.getstate()
        first, second = rows(), rows()
        assert first == second and len(first) == count and first != [0, 1, 2]
        assert random.getstate() == state


class FakeTracker(SimpleNamespace):
    def __init__(self, **more: Any):
        super().__init__(logged=[], Table=lambda dataframe: dataframe, Image=lambda image: ("image", image), **more)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeTracker(run=object()))
    return sys.modules["wandb"]


@pytest.fixture
def trackio(monkeypatch):
    current_run = SimpleNamespace(get=lambda: "run")
    monkeypatch.setitem(sys.modules, "trackio", FakeTracker(context_vars=SimpleNamespace(current_run=current_run)))
    return sys.modules["trackio"]


class TestTrackers:
    def test_both_get_a_table_of_text(self, tmp_path, wandb, trackio):
        log = quiet_log(tmp_path, report_to=["wandb", "trackio"])
        add(log, record(0, completion=[{"role": "assistant", "content": "hi"}], extra={"a": 1}))
        log.flush(10)
        for tracker in (wandb, trackio):
            (values,) = tracker.logged
            row = values["completions"].iloc[0].to_dict()
            assert values["train/global_step"] == 10 and row["accuracy"] == 1.0
            assert row["completion"] == "ASSISTANT\nhi" and row["extra"] == "{'a': 1}"

    def test_only_those_asked_for_and_running(self, tmp_path, wandb, trackio):
        log = quiet_log(tmp_path, report_to="trackio")
        add(log, record(0))
        log.flush(1)
        assert (len(wandb.logged), len(trackio.logged)) == (0, 1)
        wandb.run, log.report_to = None, ("wandb",)
        add(log, record(0))
        log.flush(2)
        assert wandb.logged == []

    def test_a_failing_tracker_warns_and_training_goes_on(self, tmp_path, wandb, caplog):
        def fail(values: dict[str, Any]) -> None:
            raise OSError("no network")

        wandb.log = fail
        log = quiet_log(tmp_path, report_to=["wandb"])
        add(log, record(0))
        assert log.flush(4) is not None
        assert "step 4" in caplog.text and "no network" in caplog.text

    @pytest.mark.parametrize("prompts", [["q0", "q0", "q1", "q1"], [seen(RED), seen(RED), seen(BLUE), seen(RED)]])
    def test_unique_prompts_thin_the_table_but_not_the_file(self, tmp_path, wandb, prompts):
        log = quiet_log(tmp_path, report_to=["wandb"], unique_prompts=True)
        add(log, *(record(i, prompt=prompt) for i, prompt in enumerate(prompts)))
        path = log.flush(1)
        assert wandb.logged[0]["completions"]["completion"].tolist() == ["answer 0", "answer 2"]
        assert len(pd.read_parquet(path)) == 4

    @pytest.mark.parametrize("with_images", [True, False])
    def test_images_go_to_a_column(self, tmp_path, wandb, with_images):
        log = quiet_log(tmp_path, report_to=["wandb"], log_multimodal=with_images)
        add(log, record(0, prompt=seen(RED)), record(1))
        again = quiet_log(tmp_path / "resumed", report_to=["wandb"])
        again.load_state_dict(json.loads(json.dumps(log.state_dict())))
        for one in (log, again):
            one.flush(1)
        table, resumed = (values["completions"] for values in wandb.logged)
        assert (table["image"].tolist() == [("image", RED), None]) if with_images else ("image" not in table)
        assert resumed["prompt"][0] == "USER\n[IMAGE]\nsee?" and "image" not in resumed, "a checkpoint has markers"


def test_plain_text_of_odd_messages():
    assert plain_text(None) == ""
    assert plain_text([{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{bad"}]}]) == (
        "ASSISTANT\nf({bad)"
    )
    assert plain_text([{"role": "user", "content": [{"type": "audio"}, "loose"]}]) == "USER\n[AUDIO]\nloose"
    assert visible("a\tb\r\nc\x00") == "a   b\nc␀"
