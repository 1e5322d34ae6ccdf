"""Rollouts produced by a user's function."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from groupgrad.data.prompts import PromptMaker
from groupgrad.errors import RolloutError
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.requests import GenerationRequest

ROWS = {0: {"prompt": "ab", "n": 1}, 1: {"prompt": "c", "n": 2}}
TRAINER = SimpleNamespace(name="the trainer")


def request(rows: Any = range(4), size: int = 2) -> GenerationRequest:
    return GenerationRequest(ROWS, rows, 4, size, "train", 0, 7)


def answer(prompts: list[Any], **changes: Any) -> dict[str, Any]:
    """Row i gets the i + 1 tokens 10 * (i + 1), 10 * (i + 1) + 1, ..., of which the last is EOS."""
    count = len(prompts)
    defaults = {
        "prompt_ids": [[5, 6]] * count,
        "completion_ids": [[10 * (i + 1) + j for j in range(i)] + [1] for i in range(count)],
        "logprobs": [[-0.5 * (j + 1) for j in range(i + 1)] for i in range(count)],
    }
    return {**defaults, **changes}


def run(function: Any, tokenizer: Any, batch: GenerationRequest | None = None) -> Any:
    return CustomRollouts(function, TRAINER, PromptMaker(tokenizer), [1])(batch or request())


def test_the_function_gets_each_prompt_once_for_each_completion_and_the_trainer(tokenizer):
    seen: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append((prompts, trainer))
        return answer(prompts)

    rollouts = run(function, tokenizer)
    assert seen == [(["ab", "ab", "c", "c"], TRAINER)]
    assert [r.index for r in rollouts] == [0, 1, 2, 3]
    assert [r.completion_ids for r in rollouts] == [[1], [20, 1], [30, 31, 1], [40, 41, 42, 1]]
    assert [r.prompt.row["n"] for r in rollouts] == [1, 1, 2, 2]
    assert [r.sampling_logprobs for r in rollouts][2] == [-0.5, -1.0, -1.5]
    assert {r.finish_reason for r in rollouts} == {"eos"}
    assert {r.policy_version for r in rollouts} == {7}
    assert all(r.sampling_entropy is None for r in rollouts)


def test_a_function_that_makes_the_groups_itself_gets_each_prompt_once_from_then_on(tokenizer):
    """It returns twice as many rows as prompts, for groups of two: the second reading of TRL's documents."""
    seen: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.append(prompts)
        return answer([prompt for prompt in prompts for _ in range(2)])

    maker = CustomRollouts(function, TRAINER, PromptMaker(tokenizer), [1])
    first = maker(request())
    second = maker(request())
    assert seen == [["ab", "ab", "c", "c"], ["ab", "c"]]
    # Rows 0 and 1 of the first call belong to the first copy of "ab", rows 4 and 5 to the first copy of "c".
    assert [r.completion_ids[0] for r in first] == [1, 20, 50, 60]
    assert [len(r.completion_ids) for r in first] == [1, 2, 5, 6]
    assert [len(r.completion_ids) for r in second] == [1, 2, 3, 4]


def test_a_function_that_makes_groups_must_return_whole_ones(tokenizer):
    maker = CustomRollouts(lambda prompts, trainer: answer(list(prompts) * 2), TRAINER, PromptMaker(tokenizer), [1])
    maker(request())
    with pytest.raises(RolloutError, match=r"returned 4 rows for 2 prompts; return num_generations=3 .* each, 6 rows"):
        maker(request(rows=range(6), size=3))


def test_env_mask_marks_the_tokens_of_the_model(tokenizer):
    masks = [[1], [0, 1], [1, 0, 1], [1, 0, 0, 1]]
    rollouts = run(lambda prompts, trainer: answer(prompts, env_mask=masks), tokenizer)
    assert [r.sampled for r in rollouts] == [[bool(x) for x in mask] for mask in masks]
    assert [r.num_sampled for r in rollouts] == [1, 1, 2, 2]


def test_further_fields_are_values_of_the_rows_or_of_all(tokenizer):
    rollouts = run(lambda prompts, trainer: answer(prompts, steps=[3, 1, 4, 1], game="go"), tokenizer)
    assert [r.extra for r in rollouts] == [{"steps": n, "game": "go"} for n in (3, 1, 4, 1)]
    rollouts = run(lambda prompts, trainer: answer(prompts, mean=torch.tensor(0.5)), tokenizer)
    assert [float(r.extra["mean"]) for r in rollouts] == [0.5] * 4


def test_logprobs_may_name_their_tokens(tokenizer):
    """Of several log-probs at a position, the sampled token's counts; without one it is NaN."""
    logprobs = [[[-1.0, -2.0]], [[-3.0, -4.0], [-5.0, -6.0]]]
    names = [[[9, 1]], [[20, 8], [7, 6]]]
    batch = request(rows=[0, 1])
    (first, second) = run(
        lambda prompts, trainer: answer(prompts, logprobs=logprobs, logprob_token_ids=names), tokenizer, batch
    )
    assert first.sampling_logprobs == [-2.0]
    assert second.sampling_logprobs[0] == -3.0
    assert np.isnan(second.sampling_logprobs[1])


def test_a_row_may_lack_the_names_of_its_logprobs(tokenizer):
    given = {"logprobs": [[-0.5], [[-1.0], [-2.0]]], "logprob_token_ids": [None, [[20], [1]]]}
    first, second = run(lambda prompts, trainer: answer(prompts, **given), tokenizer, request(rows=[0, 1]))
    assert first.sampling_logprobs == [-0.5]
    assert second.sampling_logprobs[1] == -2.0


def test_logprobs_that_are_none_are_refused(tokenizer):
    for value in (0.5, float("nan"), -float("inf")):
        with pytest.raises(RolloutError, match=r"log-prob (0\.5|nan|-inf) in row 0; log-probs are finite"):
            run(lambda prompts, trainer: answer(prompts, logprobs=[[value]]), tokenizer, request(rows=[0]))  # noqa: B023


def test_arrays_and_tensors_are_taken_too(tokenizer):
    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        plain = answer(prompts)
        return {
            "prompt_ids": torch.tensor(plain["prompt_ids"]),
            "completion_ids": [np.array(ids) for ids in plain["completion_ids"]],
            "logprobs": None,
        }

    rollouts = run(function, tokenizer)
    assert [r.completion_ids for r in rollouts][1] == [20, 1]
    assert rollouts[0].sampling_logprobs is None


def test_a_completion_without_eos_is_truncated(tokenizer):
    ids = [[1], [3], [4, 1], [1, 5]]
    rollouts = run(lambda p, t: answer(p, completion_ids=ids, logprobs=[[0.0] * len(i) for i in ids]), tokenizer)
    assert [r.finish_reason for r in rollouts] == ["eos", "length", "eos", "length"]


def test_empty_completions_are_failed_rollouts(tokenizer):
    ids: list[list[int]] = [[1], [], [4, 1], [1]]
    rollouts = run(lambda p, t: answer(p, completion_ids=ids, logprobs=None), tokenizer)
    assert [r.finish_reason for r in rollouts] == ["eos", "error", "eos", "eos"]
    assert rollouts[1].trace.problem == "rollout_func returned an empty completion"


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([[1, 2]], r"returned \[\[1, 2\]\] \(list\); return a dict with prompt_ids, completion_ids, logprobs"),
        ({"completion_ids": []}, r"{'completion_ids': \[\]} \(dict\); return a dict with prompt_ids"),
        (answer([0] * 3), "returned 3 rows for 4 prompts; return one for each prompt given, which are 4 here"),
        (answer([0] * 4, logprobs=[[0.0]]), "lists of different lengths.*'logprobs': 1"),
        (answer([0] * 4, logprobs=[[0.0]] * 4), "1 logprobs for 2 completion_ids in row 1"),
        (answer([0] * 4, env_mask=[[1]] * 4), "1 env_mask for 2 completion_ids in row 1"),
        (answer([0] * 4, env_mask=[[2]] * 4), "return 1 for each token that the model produced"),
        (answer([0] * 4, prompt_ids=[[]] * 4), "no prompt_ids for row 0"),
        (answer([0] * 4, prompt_ids=None), "prompt_ids=None"),
        (answer([0] * 4, completion_ids=["abc"] * 4), "the token id 'a' in row 0"),
        (answer([0] * 4, score=[1.0, 2.0]), "2 values of 'score' for 4 rows"),
        (
            answer([0] * 4, completion_ids=[None] * 4),
            "completion_ids=.*not one list a row: 'NoneType' object",
        ),
        (answer([0] * 4, logprobs=[["x"]] * 4), "the log-prob 'x' in row 0"),
        (answer([0] * 4, logprob_token_ids=[[1]] * 4), "1 logprob_token_ids for 2 completion_ids in row 1"),
    ],
)
def test_return_values_that_cannot_be_used(returned: Any, expected: str, tokenizer):
    with pytest.raises(RolloutError, match=expected):
        run(lambda prompts, trainer: returned, tokenizer)


def test_ids_and_lengths_beyond_the_models_are_refused(tokenizer):
    with pytest.raises(RolloutError, match="the token id 5000 in row 2, but the model has the ids 0 to 91; return"):
        run(lambda p, t: answer(p, completion_ids=[[1], [1], [5000], [1]], logprobs=None), tokenizer)
    maker = CustomRollouts(lambda p, t: answer(p), TRAINER, PromptMaker(tokenizer, None, 5), [1])
    with pytest.raises(RolloutError, match="2 prompt_ids and 4 completion_ids in row 3, but the model has 5 positions"):
        maker(request())


def test_a_rank_without_rows_does_not_call_the_function(tokenizer):
    assert run(lambda prompts, trainer: pytest.fail("called"), tokenizer, request(rows=[])) == []
