"""The example of a hybrid model: its template is Qwen3.5's, its task is right, a short run does what it says."""

from __future__ import annotations

import json
from random import Random

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import get_json_schema

from groupgrad.apps.demo.task import Problem
from groupgrad.chat import ChatFormat

CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n<parameter=b>\n{}\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>\n"
)
REPLY = "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def example(from_examples):
    pytest.importorskip("matplotlib")
    return from_examples("hybrid")


@pytest.fixture(scope="module")
def tokenizer(example):
    return example.make_tokenizer(example.WORDS, example.TEMPLATE, example.MARKS, example.EOS)


def test_the_template_writes_calls_as_qwen3_5(example, tokenizer) -> None:
    messages = example.demonstrate(Problem((3, 5, 7, 2)), "careful", Random(0))
    schemas = [get_json_schema(example.add)]
    assert tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False) == (
        "<|im_start|>system\n<tools>\nadd(a, b)\n</tools><|im_end|>\n"
        "<|im_start|>user\n3+5+7+2=<|im_end|>\n<|im_start|>assistant\n"
        + "".join(CALL.format(a, b) + REPLY.format(a + b) for a, b in ((3, 5), (8, 7), (15, 2)))
        + "17<|im_end|>\n"
    )


def test_the_library_reads_the_template(example, tokenizer) -> None:
    schemas = [get_json_schema(example.add)]
    chat = ChatFormat(tokenizer, schemas=schemas)
    assert chat.shows_tools and chat.end_ids == (tokenizer.eos_token_id,)
    ids = tokenizer(CALL.format(15, 2).removesuffix("\n"))["input_ids"]
    assert len(ids) == 12  # a token for each mark and word, and one for each digit
    (call,) = chat.parse(ids, schemas).calls
    assert (call.name, call.arguments, call.problem) == ("add", {"a": 15, "b": 2}, None)
    more = chat.reply_ids(ids, [{"role": "tool", "name": "add", "content": "17"}])
    assert tokenizer.decode(more) == "\n" + REPLY.format(17)


@pytest.mark.parametrize("habit", ["careful", "wrong number", "broken call", "guess"])
def test_only_careful_pupils_are_right(example, tokenizer, habit) -> None:
    rng = Random(0)
    problems = [Problem(tuple(rng.randint(1, 9) for _ in range(4))) for _ in range(100)]
    assert example.results(Problem((3, 5, 7, 2))) == [8, 15, 17]
    answers = [example.demonstrate(problem, habit, rng)[1:] for problem in problems]
    expected = [example.row(problem)["results"] for problem in problems]
    rewards = example.answer_reward(answers, expected, log_metric=lambda *_: None)
    assert rewards == [float(habit == "careful")] * 100
    if habit == "broken call":
        chat = ChatFormat(tokenizer, schemas=[get_json_schema(example.add)])
        turns = [chat.parse(tokenizer(answer[-1]["content"])["input_ids"], []) for answer in answers]
        assert all(turn.calls[0].problem for turn in turns)


@pytest.mark.slow
def test_a_short_run_fails_honestly_and_leaves_its_files(example, tmp_path, capsys) -> None:
    """Far too short to learn anything. The hybrid is sampled and scored by the fast paths."""
    arguments = ["--output_dir", str(tmp_path), "--warm_up_steps", "2", "--grpo_steps", "1"]
    assert example.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "parameters: linear_attention, full_attention" in printed
    assert "sampled by the native engine, scored in the shared layout" in printed
    assert "Missed:" in printed and "tools/call_frequency" in printed
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum("eval_reward" in event for event in events) == 2
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.model_type == "qwen3_5_text"
