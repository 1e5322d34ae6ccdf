"""Parsing of flags and YAML files into the three records; unknown names are refused with the most similar one."""

from __future__ import annotations

import dataclasses
import os

import pytest

from groupgrad import GRPOConfig
from groupgrad.cli.arguments import ModelArguments, ScriptArguments
from groupgrad.cli.parsing import TrainParser, parse

CPU = ["--use_cpu"]


def write(tmp_path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def refused(argv, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_every_field_of_every_record_is_a_flag_in_two_spellings():
    flags = {option for action in TrainParser()._actions for option in action.option_strings}
    for record in (ScriptArguments, ModelArguments, GRPOConfig):
        for field in dataclasses.fields(record):
            assert f"--{field.name}" in flags
            assert f"--{field.name.replace('_', '-')}" in flags


def test_no_field_name_is_in_two_records():
    names = [f.name for r in (ScriptArguments, ModelArguments, GRPOConfig) for f in dataclasses.fields(r)]
    assert len(names) == len(set(names))


def test_flags_become_values():
    parsed = parse(
        [
            *CPU,
            "--learning-rate=3e-5",
            "--max_steps",
            "-1",
            "--min_p",
            "none",
            "--top_k",
            "null",
            "--reward_weights",
            "1",
            "0.5",
            "--scale_rewards",
            "False",
            "--no_shuffle_dataset",
            "--gradient_checkpointing",
            "false",
            "--chat_template_kwargs",
            '{"enable_thinking": false}',
            "--report_to",
            "none",
            "--bf16",
            "--reward_funcs",
            "accuracy_reward",
            "mine.reward",
            "--lora_r",
            "4",
            "--use_peft",
        ]
    )
    config = parsed.config
    assert (config.learning_rate, config.max_steps, config.min_p, config.top_k) == (3e-5, -1, None, None)
    assert config.reward_weights == [1.0, 0.5]
    assert config.scale_rewards == "none"
    assert config.shuffle_dataset is False
    assert config.gradient_checkpointing is False
    assert config.chat_template_kwargs == {"enable_thinking": False}
    assert config.report_to == []
    assert config.bf16 is True
    assert parsed.script.reward_funcs == ["accuracy_reward", "mine.reward"]
    assert (parsed.model.lora_r, parsed.model.use_peft) == (4, True)


def test_without_flags_the_config_is_the_default_one():
    assert parse(CPU).config == GRPOConfig(use_cpu=True)


YAML = """
use_cpu: true
learning_rate: 1e-5        # YAML reads this as text
num-generations: 4
max_steps: 20
warmup_steps: 0.1
beta: 1
scale_rewards: false
reward_funcs: accuracy_reward
reward_weights: [2]
generation_kwargs: {suppress_tokens: [1, 2]}
top_k: null
min_p: "none"
run_name: "17"
eval_strategy: "no"
bf16: false
shuffle_dataset: "false"
gradient_checkpointing: false
"""


def test_yaml_keys_are_defaults(tmp_path):
    parsed = parse(["--config", write(tmp_path, YAML)])
    config = parsed.config
    assert (config.learning_rate, config.num_generations, config.max_steps) == (1e-5, 4, 20)
    assert (config.warmup_steps, config.beta) == (0.1, 1.0)
    assert isinstance(config.beta, float)
    assert config.scale_rewards == "none"
    assert parsed.script.reward_funcs == ["accuracy_reward"]
    assert config.reward_weights == [2.0]
    assert config.generation_kwargs == {"suppress_tokens": [1, 2]}
    assert (config.top_k, config.min_p, config.run_name) == (None, None, "17")
    assert (config.bf16, config.shuffle_dataset, config.gradient_checkpointing) == (False, False, False)


def test_the_command_line_wins(tmp_path):
    path = write(tmp_path, YAML)
    config = parse(["--max-steps", "3", "--config", path, "--num_generations", "2", "--gradient_checkpointing"]).config
    assert (config.max_steps, config.num_generations, config.learning_rate) == (3, 2, 1e-5)
    assert config.gradient_checkpointing is True


def test_env_is_exported(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPGRAD_TEST_A", "before")
    monkeypatch.setenv("GROUPGRAD_TEST_B", "")
    parse(["--config", write(tmp_path, "use_cpu: true\nenv: {GROUPGRAD_TEST_A: 1, GROUPGRAD_TEST_B: two}")])
    assert (os.environ["GROUPGRAD_TEST_A"], os.environ["GROUPGRAD_TEST_B"]) == ("1", "two")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--learning_rat", "1"], "unknown flag '--learning_rat'; did you mean --learning_rate?"),
        (["--num-generation=4"], "unknown flag '--num-generation'; did you mean --num_generations?"),
        (["--datset_name", "x"], "did you mean --dataset_name?"),
        (["--model", "x"], "unknown flag '--model'"),
        (["--max_step", "5"], "did you mean --max_steps?"),
        (["--seed", "1", "stray"], "unknown argument 'stray'"),
        (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["--temperature", "0"], "temperature=0.0 cannot work"),
        (["--temperature", "0", "--loss_type", "dappo"], "2 settings cannot work"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: No such file"),
    ],
)
def test_bad_command_lines(argv, text, capsys):
    assert text in refused([*CPU, *argv], capsys)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_step: 5", "unknown key 'max_step'; did you mean max_steps?"),
        ("lern-rate: 5", "unknown key 'lern-rate'"),
        ("max_steps: 2.5", "max_steps=2.5 is not a whole number"),
        ("max_steps: [1]", "max_steps=[1] is not a whole number"),
        ("max_steps: few", "max_steps='few' cannot be read"),
        ("max_steps: true", "max_steps=True is not a whole number"),
        ("reward_weights: [a]", "reward_weights=['a'] cannot be read"),
        ("beta: {a: 1}", "beta={'a': 1} is not a number"),
        ("- a\n- b", "holds a list, not keys with values"),
        ("a: [", "is not YAML"),
        ("env: 5", "env=5 is not a mapping"),
    ],
)
def test_bad_config_files(text, problem, tmp_path, capsys):
    assert problem in refused([*CPU, "--config", write(tmp_path, text)], capsys)


def test_help_has_sections_and_one_line_a_spelling():
    text = TrainParser().format_help()
    titles = ["Data:", "Rewards:", "Generation:", "Objective:", "Training (transformers", "Accepted for older scripts:"]
    places = [text.index(f"\n{title}") for title in titles]
    assert places == sorted(places)
    assert "--max_completion_length VALUE" in text
    assert "--no_shuffle_dataset" not in text
    assert "--max-completion-length" not in text
    section = text[text.index("\nObjective:") : text.index("\nAdvantages:")]
    assert "--loss_type" in section and "--beta" not in section
