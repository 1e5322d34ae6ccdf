"""Names that are no setting: what each error says to do instead, in scripts and on the command line."""

from __future__ import annotations

import inspect
import re
import warnings
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
    ("reward_funcs", [len], "it is an argument of the trainer, pass GRPOTrainer(reward_funcs=...)"),
    (
        "vllm_sampling_params",
        object(),
        "set temperature, top_p, top_k, min_p and repetition_penalty, and generation_kwargs",
    ),
    ("max_seq_length", 2048, "set max_completion_length for completions"),
    ("load_in_4bit", True, "GRPOTrainer(quantization_config=BitsAndBytesConfig(load_in_4bit=True))"),
    ("lora_r", 8, "GRPOTrainer(peft_config=LoraConfig(...))"),
    ("torch_dtype", "bfloat16", "set model_init_kwargs={'dtype': 'bfloat16'}"),
    # options of sampling
    ("stop", ["#"], "set generation_kwargs={'stop_strings': ['#']}"),
    ("stop_strings", "#", "set generation_kwargs={'stop_strings': '#'}"),
    ("max_length", 64, "set max_completion_length, which does not count the prompt"),
    ("num_return_sequences", 8, "set num_generations"),
    ("length_penalty", 2.0, "without effect unless there is num_beams above 1, take it out"),
    ("penalty_alpha", 0.6, "take it out"),
    # misspelled
    ("learning_rat", 1e-6, "did you mean 'learning_rate'?"),
    ("use_liger_los", True, "did you mean 'use_liger_kernel'?"),
    ("max_promt_length", 9, "it resembles 'max_prompt_length', which has no effect (prompts are never cut"),
    ("pad_to_multiple", 9, "it resembles 'pad_to_multiple_of', which has no effect (nothing is padded); take it out"),
    ("qqq", 1, "take it out"),
]


@pytest.mark.parametrize(("name", "value", "hint"), HINTS, ids=[name for name, _, _ in HINTS])
def test_a_setting_that_does_not_exist_says_what_to_do(name: str, value: Any, hint: str) -> None:
    with pytest.raises(TypeError, match=f"GRPOConfig has no setting '{name}'") as caught:
        GRPOConfig("out", **{name: value})
    assert hint in str(caught.value)


def test_what_a_hint_says_to_set_works_without_a_warning() -> None:
    """No advice leads to a setting that is refused or without effect."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, value, hint in HINTS:
            advised: dict[str, Any] = {}
            if found := re.search(r"set (\w+)=(\{.*\})$", hint):
                advised[found[1]] = eval(found[2])
            elif found := re.search(r"(?:it is|did you mean) '(\w+)'", hint):
                advised[found[1]] = value if found[1] != "use_liger_kernel" else False
            GRPOConfig("out", use_cpu=True, report_to="none", **advised)


def test_all_unknown_settings_are_named_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        GRPOConfig("out", max_new_tokens=9, kl_coef=0.1, tools=[])
    assert all(name in str(caught.value) for name in ("'max_completion_length'", "'beta'", "GRPOTrainer(tools=...)"))


def test_vllm_has_its_own_names_of_sampling_options() -> None:
    with pytest.raises(TypeError, match=r"set generation_kwargs=\{'stop': 'a'\}"):
        GRPOConfig("out", use_vllm=True, stop="a")


def test_the_trainers_arguments_are_known() -> None:
    parameters = {*inspect.signature(GRPOTrainer).parameters}
    assert {*TRAINER_ARGUMENTS} == parameters - {"args", "num_generations"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "it is max_completion_length here"),
        ("kl_coef", "it is beta here"),
        ("stop", "set generation_kwargs={'stop_strings': ...}"),
        ("train_dataset", "it is dataset_name here"),
        ("max_promt_length", "which has no effect"),
    ],
)
def test_the_command_line_and_its_files_say_the_same(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field '{name}'") as caught:
        parse_settings({name: 1})
    assert hint in str(caught.value)
