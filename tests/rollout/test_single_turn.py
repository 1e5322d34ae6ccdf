"""Single-turn rollouts, and the seeds of rows and turns."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.engines.base import Sample, SamplingOptions
from groupgrad.rollout.requests import GenerationRequest, row_seed, turn_seed
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.types import Prompt


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ((42, "train", 0, 0), 1489272828542961862),
        ((42, "train", 3, 17), 6506622236876145529),
        ((0, "eval", 0, 1), 2394936670101711343),
    ],
)
def test_a_rows_seed_never_changes(key: Any, expected: int):
    """blake2b of "seed/phase/batch/row": pinned, because resumed runs must continue their streams."""
    assert row_seed(*key) == expected


def test_turns_have_streams_of_their_own_and_the_first_has_the_rows():
    keys = [(s, p, n, r) for s in (0, 1) for p in ("train", "eval") for n in range(5) for r in range(50)]
    seeds = [turn_seed(row_seed(*key), turn) for key in keys for turn in range(5)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(7, 0) == 7


TEXT = Prompt([5, 6], {"prompt": "ab"}, 4)
CHAT = Prompt([5, 6, 7], {"prompt": [{"role": "user", "content": "x"}]}, 5)


class FixedPrompts:
    """A prompt maker with prompts made beforehand."""

    keeps_special_tokens = False

    def __init__(self, prompts: dict[int, Prompt], tokenizer: Any, max_context: int | None):
        self.prompts, self.tokenizer, self.max_context = prompts, tokenizer, max_context

    def __call__(self, row: dict[str, Any], group: int) -> Prompt:
        return self.prompts[group]


def run(
    engine: Any, tokenizer: Any, rows: Any, prompts: Any, *, max_context: int | None = None, budget: int = 4
) -> Any:
    fixed: Any = FixedPrompts(prompts, tokenizer, max_context)
    maker = SingleTurnRollouts(fixed, engine, SamplingOptions(budget), seed=7)
    return maker(GenerationRequest({group: {} for group in prompts}, rows, 12, 2, "train", 3, 11))


def test_rows_become_requests_and_samples_become_rollouts(play, tokenizer):
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    engine = play(
        [Sample([a, b, 1], "eos", [-0.5, -0.25, -0.125], [2.0, 1.0, 0.5]), Sample([b], "length"), Sample([], "eos", [])]
    )
    rollouts = run(engine, tokenizer, [9, 10, 11], {4: TEXT, 5: CHAT})
    assert [request.prompt_ids for request in engine.asked] == [[5, 6], [5, 6, 7], [5, 6, 7]]
    assert [request.seed for request in engine.asked] == [row_seed(7, "train", 3, row) for row in (9, 10, 11)]
    assert [rollout.index for rollout in rollouts] == [9, 10, 11]
    assert [rollout.prompt for rollout in rollouts] == [TEXT, CHAT, CHAT]
    assert [rollout.completion_ids for rollout in rollouts] == [[a, b, 1], [b], []]
    assert [rollout.finish_reason for rollout in rollouts] == ["eos", "length", "eos"]
    assert [rollout.sampling_logprobs for rollout in rollouts] == [[-0.5, -0.25, -0.125], None, []]
    assert [rollout.sampling_entropy for rollout in rollouts] == [[2.0, 1.0, 0.5], None, None]
    assert {rollout.policy_version for rollout in rollouts} == {11}


def test_a_row_has_the_versions_of_its_tokens_if_these_differ(play, tokenizer):
    steps = [[11, 12, 12], [12, 12, 12], None]
    engine = play([Sample([9, 9, 1], "eos", policy_versions=versions) for versions in steps])
    rollouts = run(engine, tokenizer, [9, 10, 11], {4: TEXT, 5: CHAT})
    assert [rollout.policy_version for rollout in rollouts] == [11, 12, 11]
    assert [rollout.policy_versions for rollout in rollouts] == [[11, 12, 12], None, None]


def test_a_text_prompt_is_completed_by_text_and_a_conversation_by_a_message(play, tokenizer):
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    engine = play([Sample([a, b, 1], "eos"), Sample([b, a, 1], "eos")])
    text, chat = run(engine, tokenizer, [8, 10], {4: TEXT, 5: CHAT})
    assert (text.completion, text.text) == ("ab", "ab")
    assert (chat.completion, chat.text) == ([{"role": "assistant", "content": "ba"}], "ba")


@pytest.mark.parametrize(
    ("max_context", "expected"), [(None, [4, 4]), (100, [4, 4]), (7, [4, 4]), (6, [4, 3]), (5, [3, 2]), (4, [2, 1])]
)
def test_budgets_fit_after_the_prompt(max_context: int | None, expected: list[int], play, tokenizer):
    engine = play([Sample([9], "eos")] * 2)
    run(engine, tokenizer, [8, 10], {4: TEXT, 5: CHAT}, max_context=max_context)
    assert [request.max_new_tokens for request in engine.asked] == expected


def test_a_completion_that_fills_the_context_has_that_finish_reason(play, tokenizer):
    engine = play([Sample([9] * 4, "length"), Sample([9] * 3, "length"), Sample([9, 1], "eos")])
    rollouts = run(engine, tokenizer, [8, 10, 11], {4: TEXT, 5: CHAT}, max_context=6)
    assert [rollout.finish_reason for rollout in rollouts] == ["length", "context", "eos"]
    assert [rollout.is_truncated for rollout in rollouts] == [True, True, False]
