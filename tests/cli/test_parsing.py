"""Parsing of flags and YAML files into the three records; unknown names are refused with the most similar one."""

from __future__ import annotations

import dataclasses
import os

import pytest

from groupgrad import GRPOConfig
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.apps.cli.parsing import parse, parse_settings, train_parser
from groupgrad.objectives import ESTIMATORS, LOSSES, MASKS

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
    flags = {option for action in train_parser()._actions for option in action.option_strings}
    for record in (TaskArguments, ModelArguments, GRPOConfig):
        for field in dataclasses.fields(record):
            assert f"--{field.name}" in flags
            assert f"--{field.name.replace('_', '-')}" in flags


@pytest.mark.parametrize("urls", [["http://a:1"], ["http://a:1", "http://b:2"]])
def test_servers_are_one_flag_or_a_list_in_a_file(urls, tmp_path):
    vllm = ["--use_vllm", "--vllm_mode", "server"]
    assert parse([*CPU, *vllm, "--vllm_server_base_url", *urls]).config.vllm_server_base_url == urls
    path = write(tmp_path, f"vllm_server_base_url: {urls}")
    assert parse([*CPU, *vllm, "--config", path]).config.vllm_server_base_url == urls


def test_flags_become_values():
    parsed = parse(
        [
            *CPU,
            *("--learning-rate=3e-5", "--max_steps", "-1", "--min_p", "none", "--top_k", "null", "--bf16"),
            *("--reward_weights", "1", "0.5", "--scale_rewards", "False", "--no_shuffle_dataset"),
            *("--gradient_checkpointing", "false", "--chat_template_kwargs", '{"enable_thinking": false}'),
            *("--report_to", "none", "--reward_funcs", "accuracy_reward", "mine.reward"),
            *("--lora_r", "4", "--use_peft"),
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


@pytest.mark.parametrize(
    ("words", "text", "value"),
    [
        (["all"], "all", "all"),
        (["non_padding"], "non_padding", "non_padding"),
        (["true"], "true", "all"),
        ([], "True", "all"),
        (["no"], "no", "no"),
        (["false"], "false", "no"),
    ],
)
def test_a_name_or_a_switch(words, text, value, tmp_path):
    """A flag, or a key of a YAML file, that takes a name, and a switch for one of the names."""
    name = "include_num_input_tokens_seen"
    assert getattr(parse([*CPU, f"--{name}", *words]).config, name) == value
    (tmp_path / "run.yaml").write_text(f"{name}: {text}")
    assert getattr(parse([*CPU, "--config", str(tmp_path / "run.yaml")]).config, name) == value


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


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--learning_rat", "1"], "unknown flag '--learning_rat'; did you mean --learning_rate?"),
        (["--num-generation=4"], "unknown flag '--num-generation'; did you mean --num_generations?"),
        (["--seed", "1", "stray"], "unknown argument 'stray'"),
        (["--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["--temperature", "0"], "temperature=0.0 cannot work"),
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
        ("max_steps: 2.5", "max_steps=2.5 cannot be read: invalid literal for int()"),
        ("max_steps: few", "max_steps='few' cannot be read"),
        ("reward_weights: [a]", "reward_weights=['a'] cannot be read: could not convert"),
        ("learning_rate: fast", "learning_rate='fast' cannot be read: could not convert"),
        ("gradient_checkpointing: maybe", "gradient_checkpointing='maybe' cannot be read: Truthy value"),
        ("dataset_name: {a: 1}", "dataset_name={'a': 1} has a dict, and dataset_name takes one value"),
        ("model_name_or_path: [a]", "model_name_or_path=['a'] has a list, and model_name_or_path takes one value"),
        ("reward_funcs: {a: 1}", "reward_funcs={'a': 1} has a dict, and reward_funcs takes a list of values"),
        ("beta: 0.1\nseed: 1\nbeta: 0.2", "is not YAML: the key 'beta' is there twice; remove one in"),
        ("max-steps: 1\nmax_steps: 2", "the key 'max_steps' is there twice"),
        ("generation_kwargs: {top_k: 1, top_k: 2}", "the key 'top_k' is there twice"),
        ("generation_kwargs:\n\ttop_k: 3", "cannot start any token"),
        ("beta 0.1\nseed: 3", "mapping values are not allowed here"),
        ("just text", "holds a str, not keys with values"),
        ("a: [", "is not YAML"),
        ("env: 5", "env=5 is not a mapping"),
    ],
)
def test_bad_config_files(text, problem, tmp_path, capsys):
    message = refused([*CPU, "--config", write(tmp_path, text)], capsys)
    assert problem in message
    assert len(message.splitlines()) == 2, "the problem, and where the fields are listed"


def test_a_config_file_that_is_not_text(tmp_path, capsys):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not YAML: 'utf-8' codec" in refused([*CPU, "--config", str(tmp_path / "run.yaml")], capsys)
    assert f"--config {tmp_path}: Is a directory" in refused([*CPU, "--config", str(tmp_path)], capsys)


def test_what_yaml_reads_in_place_of_text(tmp_path):
    text = "eval_strategy: no\nsave_strategy: no\nmodel_name_or_path: 17\ntrain_sampling_strategy: random\n"
    parsed = parse([*CPU, "--config", write(tmp_path, text + "project: 2024-01-01\ngradient_checkpointing: 0\n")])
    assert (parsed.config.eval_strategy, parsed.config.save_strategy) == ("no", "no")
    assert (parsed.model.model_name_or_path, parsed.config.project) == ("17", "2024-01-01")
    assert parsed.config.gradient_checkpointing is False


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-2 as text, since it has no point."""
    text = "generation_kwargs: {min_p: 1e-2, stop_strings: ['1e-2'], eos_token_id: [1]}\nrun_name: '1e5'\nbeta: 1e-3\n"
    argv = ["--config", write(tmp_path, text), "--set", "model_init_kwargs.dropout=1e-1"]
    parsed = parse([*CPU, *argv, "--set", "reward_model_init_kwargs={classifier_dropout: 1e-1}"])
    config = parsed.config
    assert config.generation_kwargs == {"min_p": 0.01, "stop_strings": ["1e-2"], "eos_token_id": [1]}
    assert (config.model_init_kwargs, config.reward_model_init_kwargs) == (
        {"dropout": 0.1},
        {"classifier_dropout": 0.1},
    )
    assert (config.beta, config.run_name) == (1e-3, "1e5")
    assert parsed.command["yaml"]["generation_kwargs"]["min_p"] == 0.01, "what `replay` reads again"


def test_a_mapping_may_take_the_keys_of_another(tmp_path):
    text = "model_init_kwargs: &base {dtype: float32}\nreward_model_init_kwargs: {<<: *base, num_labels: 1}\n"
    config = parse([*CPU, "--config", write(tmp_path, text)]).config
    assert config.reward_model_init_kwargs == {"dtype": "float32", "num_labels": 1}


def test_set_reaches_into_mappings_and_wins_over_the_file(tmp_path):
    path = write(tmp_path, "generation_kwargs: {top_k: 5, stop_strings: [a]}\nmax_steps: 1")
    argv = ["--set", "generation_kwargs.top_k=7", "--set", "chat_template_kwargs.a.b=1.5", "--set", "max-steps=3"]
    config = parse([*CPU, "--config", path, *argv, "--set", "reward_weights=[1, 0.5]"]).config
    assert config.generation_kwargs == {"top_k": 7, "stop_strings": ["a"]}
    assert config.chat_template_kwargs == {"a": {"b": 1.5}}
    assert (config.max_steps, config.reward_weights) == (3, [1.0, 0.5])
    assert parse(CPU).config == GRPOConfig(use_cpu=True), "a later command line has defaults of its own"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--set", "max_step=1"], "--set max_step=1: unknown field 'max_step'; did you mean max_steps?"),
        (["--set", "max_steps"], "--set max_steps: it has no value; write it as KEY=VALUE"),
        (["--set", "beta.a=1"], "--set beta.a=1: beta has no keys; write --set beta=VALUE"),
        (["--set", "beta=1", "--beta", "2"], "--set beta=1: --beta is given too; set it in one place"),
        (["--set", "beta=[1"], "--set beta=[1: the value is not YAML"),
        (["--set", "beta=much"], "--set beta='much' cannot be read"),
        (
            ["--set", "generation_kwargs.a=1", "--set", "generation_kwargs.a.b=1"],
            "{'a': 1} is not a mapping with keys",
        ),
    ],
)
def test_bad_settings(argv, text, capsys):
    assert text in refused([*CPU, *argv], capsys)


def test_an_arm_has_no_variables(monkeypatch):
    """They would be those of the arms beside it too."""
    monkeypatch.delenv("OF_AN_ARM", raising=False)
    with pytest.raises(ValueError, match="env is of the whole process"):
        parse_settings({"env": {"OF_AN_ARM": "1"}})
    assert "OF_AN_ARM" not in os.environ


def test_help_lists_the_settings_of_each_loss_estimator_and_mask():
    text = " ".join(train_parser().format_help().split())
    for option, known in {"loss": LOSSES, "advantage": ESTIMATORS, "off_policy_mask": MASKS}.items():
        shown = text.partition(f"--{option}_settings VALUE ")[2].partition(" --")[0]
        for name, definition in known.items():
            for setting in () if definition.settings is None else dataclasses.fields(definition.settings):
                assert name in shown and f"{setting.name}={setting.default}" in shown
    assert "gmpo: clip=0.4 (more than 0); kl_cov: share=0.0002 (more than 0, less than 1), coef=1.0" in text
