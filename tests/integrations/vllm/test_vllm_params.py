"""Translation of options and requests into vLLM's `SamplingParams`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.integrations.vllm.vllm_params import (
    is_plain,
    logprobs_mode,
    row_fields,
    sampled_logprobs,
    sampling_fields,
)


def test_options_have_vllms_names_and_only_our_ids_end_a_completion() -> None:
    options = SamplingOptions(max_new_tokens=9, temperature=0.5, top_p=0.9, top_k=4, eos_ids=(1, 7))
    assert sampling_fields(options) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [1, 7],
        "ignore_eos": True,
    }


def test_further_options_win_and_the_regex_wins_over_them() -> None:
    options = SamplingOptions(max_new_tokens=9, extra={"top_k": 2, "structured_outputs": {"json": {}}})
    fields = sampling_fields(options, regex="a+")
    assert fields["top_k"] == 2 and fields["structured_outputs"] == {"regex": "a+"}


@pytest.mark.parametrize("name", ["n", "seed", "max_tokens", "logprobs"])
def test_what_makes_a_row_cannot_be_set(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}', which groupgrad sets for each row; remove it"):
        sampling_fields(SamplingOptions(max_new_tokens=9, extra={name: 3}))


def test_a_row_has_its_own_seed_and_budget() -> None:
    assert row_fields(Request([1], seed=2**63 + 5, max_new_tokens=3)) == {"seed": 5, "max_tokens": 3}


@pytest.mark.parametrize(
    ("changes", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.3}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5}, "raw_logprobs"),
        ({"min_p": 0.1}, "raw_logprobs"),
        ({"repetition_penalty": 1.1}, "raw_logprobs"),
        ({"extra": {"bad_words": ["x"]}}, "raw_logprobs"),
        ({"extra": {"min_tokens": 3}}, "raw_logprobs"),
        ({"extra": {"min_tokens": 0}}, "processed_logprobs"),
        # vLLM ends thinking by inserting tokens.
        ({"extra": {"thinking_token_budget": 0}}, "raw_logprobs"),
        ({"top_p": 0.9, "temperature": 0.7}, None),
    ],
)
def test_the_mode_is_chosen_whose_log_probs_are_trainings(changes: dict[str, Any], mode: str | None) -> None:
    fields = sampling_fields(SamplingOptions(max_new_tokens=9, **changes))
    assert logprobs_mode(fields) == mode
    assert is_plain(fields, "raw_logprobs") is (changes.get("temperature", 1.0) == 1.0)
    assert not is_plain(fields, "raw_logits")


def test_no_mode_has_trainings_log_probs_under_a_regex() -> None:
    fields = sampling_fields(SamplingOptions(max_new_tokens=9), regex="a")
    assert not is_plain(fields) and not is_plain(fields, "raw_logprobs") and logprobs_mode(fields) is None
    choice = sampling_fields(SamplingOptions(max_new_tokens=9, extra={"structured_outputs": {"choice": ["a"]}}))
    assert logprobs_mode(choice) is None


def test_log_probs_are_those_of_the_sampled_tokens() -> None:
    table = [{3: SimpleNamespace(logprob=-1.0), 9: SimpleNamespace(logprob=-0.1)}, {4: SimpleNamespace(logprob=-2.0)}]
    assert sampled_logprobs([3, 4], table) == [-1.0, -2.0]
    with pytest.raises(RuntimeError, match="2 tokens and 0 log-probs"):
        sampled_logprobs([3, 4], None)
