"""The agent examples: tasks, template, demonstrations and environment are right, and a short run does what it says."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import get_json_schema

from groupgrad.chat import ChatFormat


@pytest.fixture(scope="module")
def shared_part(from_examples):
    pytest.importorskip("matplotlib")
    return from_examples("tiny_agent")


@pytest.fixture(scope="module")
def calculator(shared_part, from_examples):
    return from_examples("agent_calculator")


@pytest.fixture(scope="module")
def hunting(shared_part, from_examples):
    return from_examples("agent_environment")


@pytest.fixture(scope="module")
def tokenizer(shared_part, calculator):
    return shared_part.make_tokenizer(calculator.WORDS)


# ------------------------------------------------------------------------------------------------ what both share


def test_template_writes_a_conversation_with_tools(shared_part, calculator, tokenizer) -> None:
    question = calculator.Question(37, 58, "*", 16)
    messages = calculator.demonstrate(question, "careful", Random(0))
    schemas = [get_json_schema(tool) for tool in calculator.TOOLS]
    assert tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False) == (
        "multiply(a, b) async_add(a, b) <end><user>37*58+16=<end>"
        '<assistant><tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 58}}</tool_call><end><tool>2146<end>'
        '<assistant><tool_call>{"name": "async_add", "arguments": {"a": 2146, "b": 16}}</tool_call><end><tool>2162<end>'
        "<assistant>2162<end>"
    )


def test_only_the_turns_of_the_assistant_are_labelled(shared_part, calculator, tokenizer) -> None:
    question = calculator.Question(37, 58, "*")
    conversations = [calculator.demonstrate(question, habit, Random(0)) for habit in ("careful", "guess")]
    batch = shared_part.make_batch(tokenizer, conversations, [get_json_schema(calculator.multiply)])
    said = [tokenizer.decode(row[row != -100]) for row in batch["labels"]]
    assert said[0] == '<tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 58}}</tool_call><end>2146<end>'
    assert said[1] == conversations[1][-1]["content"] + "<end>"
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert tokenizer.decode(batch["input_ids"][1][batch["attention_mask"][1].bool()]).endswith(said[1])


def test_the_library_reads_the_template(calculator, tokenizer) -> None:
    schemas = [get_json_schema(tool) for tool in calculator.TOOLS]
    chat = ChatFormat(tokenizer, schemas=schemas)
    assert chat.shows_tools
    assert chat.end_ids == (tokenizer.eos_token_id,)
    text = '<tool_call>{"name": "multiply", "arguments": {"a": 37, "b": 58}}</tool_call><end>'
    ids = tokenizer(text)["input_ids"]
    (call,) = chat.parse(ids, schemas).calls
    assert (call.name, call.arguments) == ("multiply", {"a": 37, "b": 58})
    reply = {"role": "tool", "name": "multiply", "content": "2146"}
    more = chat.reply_ids(ids, [reply])
    assert tokenizer.decode(more) == "<tool>2146<end><assistant>"
    user, turn = {"role": "user", "content": "37*58="}, chat.parse(ids, schemas).message
    rendered = chat.prompt_ids([user, turn, reply], schemas)
    assert chat.prompt_ids([user], schemas) + ids + more == rendered, "the template rewrites earlier turns"


def test_whatever_a_tool_says_can_be_written(tokenizer) -> None:
    text = "there is no tool 'multiple'; the tools are: multiply, async_add\n\tError: [{\"x\": 1.5e-3}] ~ @"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_warm_up_learns_the_format_first(shared_part, calculator, tokenizer) -> None:
    model = shared_part.make_model(tokenizer, seed=0)
    question = calculator.Question(37, 58, "*")
    losses = shared_part.warm_up(
        model,
        tokenizer,
        lambda rng: calculator.demonstrate(question, "careful", rng),
        [get_json_schema(calculator.multiply)],
        num_steps=15,
        seed=0,
        batch_size=2,
    )
    assert len(losses) == 15
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize(
    ("before", "after", "calls", "status"), [(0.2, 0.4, 0.91, 0), (0.2, 0.39, 0.95, 1), (0.2, 0.9, 0.90, 1)]
)
def test_a_missed_claim_is_a_failure(shared_part, tmp_path, before, after, calls, status) -> None:
    first = shared_part.Measured(before, 0.5, {}, [])
    assert shared_part.report(first, shared_part.Measured(after, calls, {}, []), tmp_path, 1.0) == status


# ------------------------------------------------------------------------------------------------- the calculator


def test_questions_by_hand_and_held_out_ones_are_nowhere_else(calculator) -> None:
    question = calculator.Question(37, 58, "*", 16)
    assert (question.text, question.results) == ("37*58+16=", [2146, 2162])
    assert calculator.Question(37, 58, "+").results == [95]
    grpo, held_out = calculator.make_splits(1)
    assert (len(set(grpo)), len(set(held_out))) == (1024, 256)
    assert set(grpo).isdisjoint(held_out)
    assert calculator.make_splits(1) == (grpo, held_out)
    assert calculator.make_splits(2)[1] != held_out


@pytest.mark.parametrize("habit", ["careful", "wrong tool", "broken call", "guess"])
def test_only_careful_users_are_right(calculator, habit) -> None:
    rng = Random(0)
    questions = [calculator.make_question(rng) for _ in range(200)]
    answers = [calculator.demonstrate(question, habit, rng)[1:] for question in questions]
    rewards = calculator.answer_reward(answers, [q.results for q in questions], log_metric=lambda *_: None)
    assert rewards == [float(habit == "careful")] * 200
    assert sum(calculator.HABITS.values()) == pytest.approx(1.0)
    assert calculator.HABITS["careful"] < 0.4


def test_reward_looks_at_the_answer_and_calls_are_counted_one_by_one(shared_part, calculator) -> None:
    call, say = shared_part.call, shared_part.say
    right = [call("multiply", a=2, b=3), say("6", "tool"), call("async_add", a=6, b=4), say("10", "tool"), say("10")]
    late = [call("async_add", a=2, b=3), say("5", "tool"), call("multiply", a=2, b=5), say("10", "tool"), say("10")]
    cut = [call("multiply", a=2, b=3), say("6", "tool")]
    noted = Counter()
    rewards = calculator.answer_reward(
        [right, late, cut, [say("about 10")]],
        [[6, 10]] * 4,
        log_metric=lambda name, value: noted.update([(name, value)]),
    )
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    assert noted == {("calls/wrong", 0.0): 4, ("calls/wrong", 1.0): 1}


# ------------------------------------------------------------------------------------------------ the environment


def test_a_hunt_by_hand(hunting) -> None:
    hunt = hunting.TreasureHunt()
    assert hunt.reset(start=[0, 1], treasure=[1, 2], prompt=[]) == "treasure: 1 east, 1 north"
    assert hunt.move("east") == "treasure: 1 north"
    assert hunt.move("north") == "treasure: here"
    assert hunt.get_reward() == 0.0
    assert hunt.dig() == "gold"
    assert hunt.get_reward() == 1.0
    hunt.reset(start=[4, 4], treasure=[4, 3])
    assert hunt.get_reward() == 0.0
    with pytest.raises(ValueError, match="the field ends here"):
        hunt.move("east")
    hunt.move("south")
    hunt.dig()
    assert hunt.get_reward() == 0.9, "a slip costs a tenth"


def test_mistakes_are_told_and_cost_calls(hunting) -> None:
    hunt = hunting.TreasureHunt()
    hunt.reset(start=[0, 4], treasure=[0, 3])
    with pytest.raises(ValueError, match="nothing here"):
        hunt.dig()
    with pytest.raises(ValueError, match="the field ends here"):
        hunt.move("north")
    with pytest.raises(ValueError, match="no such direction"):
        hunt.move("up")
    # Two calls were needed and two could be wasted, so the fourth was the last.
    assert hunt.move("south") == "treasure: here"
    with pytest.raises(ValueError, match="it is dark"):
        hunt.dig()
    assert hunt.get_reward() == 0.0


def test_held_out_distances_are_nowhere_else(hunting) -> None:
    grpo, held_out = hunting.make_splits(1)
    assert len(grpo) + len(held_out) == 25 * 24
    distances = [
        {tuple(hunting.ways_to(row["start"], row["treasure"]).items()) for row in part} for part in (grpo, held_out)
    ]
    assert [len(part) for part in distances] == [60, 20]
    assert not distances[0] & distances[1]
    assert hunting.make_splits(1) == (grpo, held_out)
    assert hunting.make_splits(2)[1] != held_out
    assert hunting.ways_to([2, 1], [0, 4]) == {"west": 2, "north": 3} and hunting.ways_to([2, 2], [2, 2]) == {}


def test_wanderers_seldom_find_anything(hunting) -> None:
    rng = Random(0)
    grpo, _ = hunting.make_splits(0)
    walks = [hunting.demonstrate(rng.choice(grpo), rng) for _ in range(500)]
    found = [walk for walk in walks if walk[-2]["content"] == "gold"]
    assert 0.1 < len(found) / 500 < 0.4
    assert {walk[-1]["content"] for walk in found} == {"done"}


# ---------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "hunting"])
def test_a_short_run_fails_honestly_and_leaves_its_files(request, name, tmp_path, capsys) -> None:
    """Far too short to learn anything: it says so, fails, and writes all that it promises."""
    example = request.getfixturevalue(name)
    arguments = ["--output_dir", str(tmp_path), "--warm_up_steps", "2", "--grpo_steps", "1"]
    assert example.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "Missed:" in printed
    assert "tools/call_frequency" in printed
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_reward" in event for event in events) == 2
    assert all("time" in event for event in events)  # as the run folder has them
    assert (tmp_path / "rewards.png").stat().st_size > 10_000
    assert len(list((tmp_path / "completions").glob("*.parquet"))) == 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
