"""The agents' benchmark: its tool, its conversations, its report."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest


def step(seconds: float, **changes: Any) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "cpu_s": 5.0,
        "generate_s": 0.0,
        "slept_s": 19.0,
        "num_calls": 6,
        "turns": [4, 4],
        "tokens": [100, 300],
        "finished": [True, True],
        "logged": {"tools/wait_hidden": 0.9, "time/sampling": 1.0, "time/training": 2.0},
        **changes,
    }


def test_a_tool_sleeps_by_its_arguments_for_half_of_them():
    import agents_task

    slept = [agents_task.sleep_of(n, word) for n in (1, 2, 3) for word in agents_task.SPOKEN]
    assert set(slept) == {0.0, 0.2}
    assert 0.4 < slept.count(0.2) / len(slept) < 0.6
    assert agents_task.sleep_of(3, "bako") == agents_task.sleep_of(3, "bako")


def test_the_tool_counts_down_and_is_counted():
    import agents_task

    tools = agents_task.Tools()
    (look,) = tools.functions()
    assert [look(n=3, about="x"), look(n=1, about="y")] == [2, 0]
    assert (tools.num_calls, tools.slept_s) == (2, 0.0)
    tools.clear()
    assert tools.num_calls == 0


def test_a_demonstration_calls_in_each_turn_but_the_last():
    import agents_task

    turns = agents_task.demonstrate(random.Random(0))
    assert [turn.count("<tool_call>") for turn in turns] == [1, 1, 1, 0]
    assert [f'"n": {left}' in turn for left, turn in zip((3, 2, 1), turns)] == [True] * 3


@pytest.mark.skipif(
    not (Path(__file__).parents[3] / "shared" / "data" / "qwen3-tokenizer").is_dir(),
    reason="the task has the real Qwen3's chat template",
)
def test_a_demonstration_is_what_the_template_and_the_call_reader_make_of_it():
    import agents_task

    from groupgrad.chat import ChatFormat
    from groupgrad.envs.tools import make_tools

    tokenizer = agents_task.make_tokenizer()
    assert len(tokenizer) == agents_task.SHAPE.vocab_size
    schemas = [tool.schema for tool in make_tools(agents_task.Tools().functions())]
    chat = ChatFormat(tokenizer, schemas=schemas)
    ids, said = agents_task.conversation(tokenizer, random.Random(0))
    assert chat.prompt_ids(agents_task.question(random.Random(0)), schemas) == ids[: said.index(True)]
    runs: list[list[int]] = []
    for number, (token, own) in enumerate(zip(ids, said)):
        if number and own == said[number - 1]:
            runs[-1].append(token)
        else:
            runs.append([token])
    turns, replies = runs[1::2], runs[2::2]
    assert (len(turns), len(replies)) == (4, 3)
    for left, turn, reply in zip((3, 2, 1), turns, replies):
        read = chat.parse(turn, schemas)
        assert [(call.name, call.arguments["n"], call.problem) for call in read.calls] == [("look", left, None)]
        answer = {"role": "tool", "name": "look", "content": str(left - 1)}
        assert chat.reply_ids(turn, [answer]) == reply
    assert chat.parse(turns[3], schemas).calls == []


def test_the_report_has_ratios_and_marks_missed_targets():
    import agents

    ours, theirs = (step(4.0), step(2.0), step(3.0)), (step(9.0), step(10.0), step(9.0))
    measured = {kind: {"groupgrad": agents.Steps(ours), "trl": agents.Steps(theirs)} for kind in ("free", "sleeping")}
    report = agents.render(measured, {"groupgrad": {"groupgrad": "0"}, "trl": {"trl": "1"}}, "a machine", warm_up=1)
    free, sleeping = (line for line in report.splitlines() if "tools" in line and "(2.00-4.00)" in line)
    assert "| 3.00 (2.00-4.00) | 9.00 (9.00-10.00) | 3.00× | 3.11× | 2× | 90% | 1.00 + 2.00 |" in free
    assert "| 3.00× (missed) | 3.11× | 4× | 90% |" in sleeping
    assert "| free, trl | 4.00 | 3.00 | 100% | 200 |" in report


def test_a_step_without_a_logged_number_has_none():
    import agents

    steps = agents.Steps((step(1.0, logged={}), step(2.0, finished=[True, False])))
    assert steps.logged("time/sampling") == 1.0
    assert steps.logged("tools/timeouts") is None
    assert steps.finished == 0.75
