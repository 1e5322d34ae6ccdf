"""Names that are no setting: what each error says to do instead, in scripts and on the command line."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.cli.parsing import parse_settings
from groupgrad.config.unknown_names import TRAINER_ARGUMENTS

HINTS: list[tuple[str, Any, str]] = [
    # other libraries' names of a setting
    ("max_new_tokens", 64, "it is 'max_completion_length' here"),
    ("max_tokens", 64, "it is 'max_completion_length' here"),
    ("kl_coef", 0.1, "it is 'beta' here"),
    ("lr", 1e-6, "it is 'learning_rate' here"),
    # set elsewhere
    ("reward_funcs", [len], "pass GRPOTrainer(reward_funcs=...)"),
    (
        "vllm_sampling_params",
        object(),
        "set temperature, top_p, top_k, min_p and repetition_penalty, and generation_kwargs",
    ),
    ("max_seq_length", 2048, "set max_completion_length for completions"),
    ("load_in_4bit", True, "GRPOTrainer(quantization_config=BitsAndBytesConfig(load_in_4bit=...))"),
    ("lora_r", 8, "GRPOTrainer(peft_config=LoraConfig(...))"),
    ("torch_dtype", "bfloat16", "set model_init_kwargs={'dtype': ...}"),
    # options of sampling
    ("stop", ["#"], "set generation_kwargs={'stop_strings': ...}"),
    ("stop_strings", "#", "set generation_kwargs={'stop_strings': ...}"),
    ("max_length", 64, "set max_completion_length, which does not count the prompt"),
    ("num_return_sequences", 8, "set num_generations"),
    ("length_penalty", 2.0, "set generation_kwargs={'length_penalty': ...}"),
    ("penalty_alpha", 0.6, "take it out"),
    # misspelled
    ("learning_rat", 1e-6, "did you mean 'learning_rate'?"),
    ("qqq", 1, "take it out"),
]


@pytest.mark.parametrize(("name", "value", "hint"), HINTS, ids=[name for name, _, _ in HINTS])
def test_a_setting_that_does_not_exist_says_what_to_do(name: str, value: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"GRPOConfig has no setting '{name}'") as caught:
        GRPOConfig("out", **{name: value})
    assert hint in str(caught.value)


def test_all_unknown_settings_are_named_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        GRPOConfig("out", max_new_tokens=9, kl_coef=0.1, tools=[])
    assert all(name in str(caught.value) for name in ("'max_completion_length'", "'beta'", "GRPOTrainer(tools=...)"))


def test_the_trainers_arguments_are_known() -> None:
    parameters = {*inspect.signature(GRPOTrainer).parameters}
    assert {*TRAINER_ARGUMENTS} == parameters - {"args", "num_generations"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "it is max_completion_length here"),
        ("kl_coef", "it is beta here"),
        ("stop_strings", "set generation_kwargs={'stop_strings': ...}"),
        ("train_dataset", "it is dataset_name here"),
        ("max_promt_length", "did you mean max_prompt_length?"),
    ],
)
def test_the_command_line_and_its_files_say_the_same(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field '{name}'") as caught:
        parse_settings({name: 1})
    assert hint in str(caught.value)
