"""Names that are no setting: what each error of the command line and its files says to do instead."""

from __future__ import annotations

import inspect
import os

import pytest

from groupgrad import GRPOTrainer
from groupgrad.apps.cli.parsing import parse_settings
from groupgrad.config.unknown_names import TRAINER_ARGUMENTS

HINTS = {
    # other libraries' names of a setting
    "max_new_tokens": "it is max_completion_length here",
    "max_tokens": "it is max_completion_length here",
    "kl_coef": "it is beta here",
    "lr": "it is learning_rate here",
    # set elsewhere
    "train_dataset": "it is dataset_name here",
    "callbacks": "pass GRPOTrainer(callbacks=...)",
    "vllm_sampling_params": "set temperature, top_p, top_k, min_p and repetition_penalty, and generation_kwargs",
    "max_seq_length": "set max_completion_length for completions",
    # options of sampling
    "stop": "set generation_kwargs={'stop_strings': ...}",
    "stop_strings": "set generation_kwargs={'stop_strings': ...}",
    "max_length": "set max_completion_length, which does not count the prompt",
    "num_return_sequences": "set num_generations",
    "length_penalty": "set generation_kwargs={'length_penalty': ...}",
    # misspelled
    "learning_rat": "did you mean learning_rate?",
    "max_promt_length": "did you mean max_prompt_length?",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_setting_that_does_not_exist_says_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field '{name}'") as caught:
        parse_settings({name: 1})
    assert HINTS[name] in str(caught.value)


def test_an_arm_has_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be those of the arms beside it too."""
    monkeypatch.delenv("OF_AN_ARM", raising=False)
    with pytest.raises(ValueError, match="env is of the whole process"):
        parse_settings({"env": {"OF_AN_ARM": "1"}})
    assert "OF_AN_ARM" not in os.environ


def test_the_trainers_arguments_are_known() -> None:
    parameters = {*inspect.signature(GRPOTrainer).parameters}
    assert {*TRAINER_ARGUMENTS} == parameters - {"args", "num_generations"}
