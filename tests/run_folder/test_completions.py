from __future__ import annotations

import io
import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from PIL import Image
from rich.cells import cell_len
from rich.console import Console

from groupgrad import dist
from groupgrad.run_folder.completions import CompletionLog
from groupgrad.run_folder.parquet import to_table
from groupgrad.run_folder.render import plain_text, visible, without_images


def record(i: int, **changes):
    base = {
        "step": 10,
        "prompt": f"question {i}",
        "completion": f"answer {i}",
        "accuracy": 1.0,
        "format": None,
        "advantage": 0.25 * i,
        "finish_reason": "eos",
        "num_tokens": 3 + i,
        "solution": str(i),
    }
    return {**base, **changes}


def add(log: CompletionLog, records: list[dict[str, Any]], phase: str = "train", reward_names=("accuracy", "format")):
    log.add(records, phase=phase, reward_names=reward_names)


def quiet_log(tmp_path, **options) -> CompletionLog:
    return CompletionLog(tmp_path, **{"num_to_print": 0, **options})


def printed(log: CompletionLog, width: int, step: int = 10, phase: str = "train") -> str:
    log.console = Console(file=io.StringIO(), width=width, force_terminal=False)
    log.flush(step, phase)
    return log.console.file.getvalue()


class TestParquet:
    def test_columns_and_values_read_back(self, tmp_path):
        log = quiet_log(tmp_path)
        add(log, [record(0), record(1, format=float("nan"), accuracy=torch.tensor(0.5)), record(2, format=-1)])
        path = log.flush(10)
        assert path == tmp_path / "completions" / "completions_00010.parquet"
        frame = pd.read_parquet(path)
        assert list(frame.columns) == [
            "step",
            "prompt",
            "completion",
            "accuracy",
            "format",
            "advantage",
            "finish_reason",
            "num_tokens",
            "solution",
        ]
        assert frame["accuracy"].tolist() == [1.0, 0.5, 1.0]
        assert frame["format"].isna().tolist() == [True, True, False]
        assert frame["format"].dtype == frame["advantage"].dtype == "float64"
        assert frame["advantage"].tolist() == [0.0, 0.25, 0.5]
        assert frame["num_tokens"].tolist() == [3, 4, 5]

    def test_phases_have_their_own_rows_and_files(self, tmp_path):
        log = quiet_log(tmp_path)
        add(log, [record(0)])
        add(log, [record(1), record(2)], phase="eval")
        add(log, [record(3)], phase="eval_math/easy")
        names = [log.flush(7, phase).name for phase in ("eval", "eval_math/easy", "train")]
        assert names == ["eval_00007.parquet", "eval_math_easy_00007.parquet", "completions_00007.parquet"]
        frames = [pd.read_parquet(tmp_path / "completions" / name) for name in names]
        assert [frame["prompt"].tolist() for frame in frames] == [
            ["question 1", "question 2"],
            ["question 3"],
            ["question 0"],
        ]

    def test_two_flushes_at_one_step_make_two_files(self, tmp_path):
        log = quiet_log(tmp_path)
        for i in range(3):
            add(log, [record(i)])
            log.flush(10)
        files = {path.name: pd.read_parquet(path)["prompt"].tolist() for path in (tmp_path / "completions").iterdir()}
        assert files == {
            "completions_00010.parquet": ["question 0"],
            "completions_00010_2.parquet": ["question 1"],
            "completions_00010_3.parquet": ["question 2"],
        }

    def test_nothing_to_flush_writes_nothing(self, tmp_path):
        log = quiet_log(tmp_path)
        assert log.flush(1) is None
        add(log, [record(0)])
        log.flush(1)
        assert log.flush(2) is None
        assert len(list((tmp_path / "completions").iterdir())) == 1

    def test_only_the_main_process_writes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(dist, "is_main", lambda: False)
        log = quiet_log(tmp_path)
        add(log, [record(0)])
        assert log.flush(1) is None
        assert not (tmp_path / "completions").exists()

    def test_messages_stay_structured_and_lose_their_images(self, tmp_path):
        photo = SimpleNamespace(size=(1, 1), mode="RGB", save=None)
        prompt = [{"role": "user", "content": [{"type": "image", "image": photo}, {"type": "text", "text": "see?"}]}]
        completion = [{"role": "assistant", "content": "yes"}]
        log = quiet_log(tmp_path)
        add(log, [record(i, prompt=prompt, completion=completion, images=[photo]) for i in range(2)])
        frame = pd.read_parquet(log.flush(10))
        blocks = frame["prompt"][0][0]["content"]
        assert blocks[0] == {"type": "image", "image": "[IMAGE]", "text": None}
        assert blocks[1]["text"] == "see?"
        assert frame["completion"][1][0] == {"role": "assistant", "content": "yes"}
        assert "images" not in frame

    def test_columns_of_mixed_types_become_json(self, tmp_path):
        log = quiet_log(tmp_path)
        mixed = [1, "a", {"b": {1, 2}}, None]
        add(log, [record(i, mixed=value, empty={}) for i, value in enumerate(mixed)])
        frame = pd.read_parquet(log.flush(10))
        assert frame["mixed"].tolist()[:3] == ["1", '"a"', '{"b": [1, 2]}']
        assert pd.isna(frame["mixed"][3])
        assert frame["empty"].tolist() == ["{}"] * 4

    def test_a_missing_column_is_null(self, tmp_path):
        log = quiet_log(tmp_path)
        short = record(1)
        del short["solution"]
        add(log, [record(0, late="x"), short])
        frame = pd.read_parquet(log.flush(12))
        assert pd.isna(frame["solution"][1])
        assert pd.isna(frame["late"][1])

    def test_half_decoded_text_and_huge_numbers_can_be_written(self):
        table = to_table([{"text": "a\ud800b", "big": 2**70}, {"text": "c", "big": 1}])
        assert table["text"].to_pylist() == ["a?b", "c"]
        assert table["big"].to_pylist() == [str(2**70), "1"]


class TestTable:
    @pytest.mark.parametrize("width", [80, 100, 140, 200])
    @pytest.mark.parametrize("num_rewards", [1, 2, 8])
    def test_every_width_holds_text_and_scores(self, tmp_path, width, num_rewards):
        rewards = {f"reward_function_number_{i}": 0.126 for i in range(num_rewards)}
        log = CompletionLog(tmp_path)
        add(
            log,
            [{"prompt": "how much?", "completion": "seven", **rewards, "advantage": -1.0, "a": "note", "b": [1]}],
            reward_names=list(rewards),
        )
        text = printed(log, width)
        lines = text.splitlines()
        assert max(cell_len(line) for line in lines) <= width
        assert "Step 10" in lines[0]
        assert "how much?" in text
        assert "seven" in text
        assert text.count("0.13") == num_rewards
        assert "-1.00" in text
        assert ("note" in text) or ("too narrow for: a" in text) or ("too narrow for: b" in text)

    @pytest.mark.parametrize("width", [80, 100, 120])
    def test_a_narrow_terminal_stacks_numbers_and_short_values_and_leaves_out_long_ones(self, tmp_path, width):
        log = CompletionLog(tmp_path)
        long = {name: f"{name} " + "x" * 60 for name in ("note", "proof", "source", "theme")}
        names = ["correctness_reward", "format_reward"]
        values = {"correctness_reward": 1.0, "format_reward": 0.5, "advantage": -0.25, "solution": "17"}
        add(log, [{"prompt": "p", "completion": "c", **values, **long}], reward_names=names)
        lines = printed(log, width).splitlines()
        stacked = [" ".join(line.split("│")[3].split()) for line in lines if line.startswith("│")]
        wanted = ["Scores", "correctness_reward 1.00", "format_reward 0.50", "Advantage -0.25", "solution 17"]
        assert [line for line in stacked if line] == wanted
        header = next(line for line in lines if "Prompt" in line)
        shown = {80: [], 100: ["note"], 120: ["note", "proof"]}[width]  # 27 each beside 66 of borders, texts and scores
        assert header.replace("│", " ").split()[3:] == shown
        hidden = [name for name in long if name not in shown]
        assert f"too narrow for: {', '.join(hidden)} (" in " ".join("\n".join(lines).split())

    @pytest.mark.parametrize(("width", "lines"), [(60, ["format_reward_of_t", "he_answer", "1.00"]), (75, [])])
    def test_a_name_that_is_longer_than_its_column_stands_above_its_value(self, tmp_path, width, lines):
        name = "format_reward_of_the_answer"
        log = CompletionLog(tmp_path)
        add(log, [{"prompt": "p", "completion": "c", name: 1.0, "advantage": 0.0, "a": "b" * 9}], reward_names=[name])
        text = printed(log, width)
        stacked = [line.split("│")[3].strip() for line in text.splitlines() if line.startswith("│")]
        assert stacked[1 : 1 + len(lines)] == lines
        assert lines or f"{name} 1.00" in text

    def test_columns_have_the_documented_order(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [record(1)])
        lines = printed(log, 140).splitlines()
        header = next(line for line in lines if "Prompt" in line)
        assert header.replace("│", " ").split() == [
            "Prompt",
            "Completion",
            "accuracy",
            "format",
            "Advantage",
            "solution",
        ]
        row = next(line for line in lines if "question 1" in line)
        assert row.replace("│", " ").split() == ["question", "1", "answer", "1", "1.00", "-", "0.25", "1"]

    def test_reward_names_define_the_reward_columns(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [{"prompt": "p", "completion": "c", "advantage": 0.0, "acc": 0.123, "note": 5}], reward_names=["acc"])
        header = next(line for line in printed(log, 140).splitlines() if "Prompt" in line)
        assert header.replace("│", " ").split() == ["Prompt", "Completion", "acc", "Advantage", "note"]

    def test_messages_show_roles_images_reasoning_and_tool_calls(self, tmp_path):
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "look"}]}]
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
        completion = [
            {"role": "assistant", "content": "", "reasoning_content": "well", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "3"},
        ]
        log = CompletionLog(tmp_path)
        add(log, [record(0, prompt=prompt, completion=completion)])
        text = printed(log, 120)
        for part in ("USER", "[IMAGE]", "look", "ASSISTANT", "well", "add(a=1, b='x')", "TOOL"):
            assert part in text

    def test_markup_and_control_characters_are_not_interpreted(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(
            log,
            [record(0, completion="[bold]x[/bold] [/] \x1b[2J\x07 \u202e \x9b", solution="[red]y", prompt="[/link]")],
        )
        text = printed(log, 160)
        assert "[bold]x[/bold] [/] ␛[2J␇ <202E> <009B>" in text
        assert "[red]y" in text
        assert "[/link]" in text
        assert not any(character in text for character in "\x1b\x07\u202e\x9b")

    def test_reasoning_is_dim_and_italic_on_a_terminal(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [record(0, completion=[{"role": "assistant", "content": "no", "reasoning_content": "hm"}])])
        log.console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
        log.flush(1)
        assert "\x1b[2;3mhm" in log.console.file.getvalue()

    def test_a_terminal_without_unicode_still_prints(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [record(0, completion="数学")])
        raw = io.BytesIO()
        log.console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=120, force_terminal=False)
        log.flush(1)
        log.console.file.flush()
        assert b"\\u6570\\u5b66" in raw.getvalue()

    def test_a_very_long_text_loses_its_middle(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [record(0, completion="first" + "x" * 100_000 + "last")])
        text = printed(log, 200)
        assert "first" in text
        assert "last" in text
        assert "98,009 characters" in text
        assert len(text.splitlines()) < 60

    def test_a_subset_is_reproducible_and_leaves_the_global_generator_alone(self, tmp_path):
        def printed_prompts() -> list[str]:
            log = CompletionLog(tmp_path, num_to_print=3)
            add(log, [record(i, prompt=f"Q{i:02d}") for i in range(20)])
            text = printed(log, 120)
            return [f"Q{i:02d}" for i in range(20) if f"Q{i:02d}" in text]

        state = random.getstate()
        first, second = printed_prompts(), printed_prompts()
        assert first == second
        assert len(first) == 3
        assert first != ["Q00", "Q01", "Q02"]
        assert random.getstate() == state

    def test_zero_prints_nothing_and_more_than_there_are_prints_all(self, tmp_path):
        log = CompletionLog(tmp_path, num_to_print=0)
        add(log, [record(0)])
        assert printed(log, 120) == ""
        log = CompletionLog(tmp_path, num_to_print=99)
        add(log, [record(0), record(1)])
        assert printed(log, 120).count("question") == 2

    def test_the_title_names_an_evaluation(self, tmp_path):
        log = CompletionLog(tmp_path)
        add(log, [record(0)], phase="eval_math")
        assert "Step 3 (eval_math)" in printed(log, 120, 3, "eval_math").splitlines()[0]


class FakeTracker(SimpleNamespace):
    def __init__(self, **more):
        super().__init__(logged=[], Table=lambda dataframe: dataframe, Image=lambda image: ("image", image), **more)

    def log(self, values):
        self.logged.append(values)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeTracker(run=object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def trackio(monkeypatch):
    fake = FakeTracker(context_vars=SimpleNamespace(current_run=SimpleNamespace(get=lambda: "run")))
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


class TestTrackers:
    def test_both_get_a_table_of_text(self, tmp_path, wandb, trackio):
        log = quiet_log(tmp_path, report_to=["wandb", "trackio"])
        add(log, [record(0, completion=[{"role": "assistant", "content": "hi"}], extra={"a": 1})])
        log.flush(10)
        for tracker in (wandb, trackio):
            (values,) = tracker.logged
            assert values["train/global_step"] == 10
            row = values["completions"].iloc[0].to_dict()
            assert row["completion"] == "ASSISTANT\nhi"
            assert row["accuracy"] == 1.0
            assert row["extra"] == "{'a': 1}"

    def test_only_those_asked_for_and_running(self, tmp_path, wandb, trackio):
        log = quiet_log(tmp_path, report_to="trackio")
        add(log, [record(0)])
        log.flush(1)
        assert (len(wandb.logged), len(trackio.logged)) == (0, 1)
        wandb.run = None
        log.report_to = ("wandb",)
        add(log, [record(0)])
        log.flush(2)
        assert wandb.logged == []

    def test_unique_prompts_thin_the_table_but_not_the_file(self, tmp_path, wandb):
        log = quiet_log(tmp_path, report_to=["wandb"], unique_prompts=True)
        add(log, [record(i, prompt=f"q{i // 2}") for i in range(4)])
        path = log.flush(1)
        assert wandb.logged[0]["completions"]["completion"].tolist() == ["answer 0", "answer 2"]
        assert len(pd.read_parquet(path)) == 4

    @pytest.mark.parametrize("with_images", [True, False])
    def test_images_go_to_a_column(self, tmp_path, wandb, with_images):
        photo = SimpleNamespace(size=(1, 1), mode="RGB", save=None)
        prompt = [{"role": "user", "content": [{"type": "image", "image": photo}]}]
        log = quiet_log(tmp_path, report_to=["wandb"], log_multimodal=with_images)
        add(log, [record(0, prompt=prompt), record(1)])
        log.flush(1)
        table = wandb.logged[0]["completions"]
        if with_images:
            assert table["image"].tolist() == [("image", photo), None]
        else:
            assert "image" not in table

    def test_a_failing_tracker_warns_and_training_goes_on(self, tmp_path, wandb, caplog):
        def fail(values):
            raise OSError("no network")

        wandb.log = fail
        log = quiet_log(tmp_path, report_to=["wandb"])
        add(log, [record(0)])
        assert log.flush(4) is not None
        assert "step 4" in caplog.text
        assert "no network" in caplog.text


def test_records_survive_a_checkpoint(tmp_path):
    first = quiet_log(tmp_path / "a")
    add(first, [record(0, accuracy=torch.tensor(0.5))])
    add(first, [record(5)], phase="eval")
    state = json.loads(json.dumps(first.state_dict()))
    second = quiet_log(tmp_path / "b")
    second.load_state_dict(state)
    for log in (first, second):
        add(log, [record(1)])
    frames = [pd.read_parquet(log.flush(10)) for log in (first, second)]
    pd.testing.assert_frame_equal(*frames)
    assert frames[0]["accuracy"].tolist() == [0.5, 1.0]


def test_plain_text_of_odd_messages():
    assert plain_text(None) == ""
    assert plain_text([{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{bad"}]}]) == (
        "ASSISTANT\nf({bad)"
    )
    assert plain_text([{"role": "user", "content": [{"type": "audio"}, "loose"]}]) == "USER\n[AUDIO]\nloose"
    assert visible("a\tb\r\nc\x00") == "a   b\nc␀"


def test_prompts_with_different_images_are_distinct(tmp_path, wandb):
    def question(color: str) -> list[dict[str, Any]]:
        photo = Image.new("RGB", (2, 2), color)
        return [{"role": "user", "content": [{"type": "image", "image": photo}, {"type": "text", "text": "which?"}]}]

    log = quiet_log(tmp_path, report_to=["wandb"], unique_prompts=True)
    add(log, [record(0, prompt=question("red")), record(1, prompt=question("blue")), record(2, prompt=question("red"))])
    log.flush(1)
    assert wandb.logged[0]["completions"]["completion"].tolist() == ["answer 0", "answer 1"]


def test_image_markers_of_a_checkpoint_are_not_logged_as_images(tmp_path, wandb):
    photo = Image.new("RGB", (2, 2))
    first = quiet_log(tmp_path / "a")
    add(first, [record(0, prompt=[{"role": "user", "content": [{"type": "image", "image": photo}]}])])
    second = quiet_log(tmp_path / "b", report_to=["wandb"])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.flush(1)
    table = wandb.logged[0]["completions"]
    assert table["prompt"].tolist() == ["USER\n[IMAGE]"]
    assert "image" not in table


def test_records_without_images_keep_their_text():
    photo = Image.new("RGB", (2, 2))
    content = [{"type": "image", "image": photo}, {"type": "text", "text": "a"}]
    kept = without_images(record(0, prompt=[{"role": "user", "content": content}], completion="b"))
    marked = [{"type": "image", "image": "[IMAGE]"}, {"type": "text", "text": "a"}]
    assert kept == record(0, prompt=[{"role": "user", "content": marked}], completion="b")
    assert content[0]["image"] is photo
