"""The example with a judge: its stub answers as an OpenAI-compatible server, and a run learns from the ratings."""

from __future__ import annotations

import asyncio
import re
import sqlite3

import pytest

pytest.importorskip("openai", reason="the judge asks through openai")


@pytest.fixture
def example(from_examples):
    return from_examples("judge_reward")


def test_the_stub_rates_as_it_is_asked_to(example) -> None:
    with example.stub_server() as url:
        reward = example.judge(model="stub", base_url=url, prompt=example.QUESTION)
        asked = reward(prompts=["1+1="] * 3, completions=["2012", "29", "9"])
        assert asyncio.run(asked) == [1.0, 0.5, 0.0]


@pytest.mark.slow
def test_the_rating_doubles(example, tmp_path, capsys) -> None:
    assert example.main(["--output_dir", str(tmp_path), "--steps", "12"]) == 0
    shown = capsys.readouterr().out
    assert "stands in for a judge" in shown and "Met: the rating at least doubles" in shown
    (sent,) = re.findall(r"([\d,]+) requests were sent", shown)
    with sqlite3.connect(tmp_path / "replies.db") as replies:
        (rows,) = replies.execute("SELECT count(*) FROM replies").fetchone()
    assert rows == int(sent.replace(",", ""))


@pytest.mark.slow
def test_a_judge_with_an_address_is_asked_and_a_short_run_says_that_it_was(example, tmp_path, capsys) -> None:
    with example.stub_server() as url:
        assert example.main(["--output_dir", str(tmp_path), "--steps", "1", "--base_url", url]) == 1
    shown = capsys.readouterr().out
    assert "Missed:" in shown and "stands in" not in shown and " 0 requests" not in shown
