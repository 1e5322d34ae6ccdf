"""Every trained token was sampled after the context that it is scored in, and tool tokens have no weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_agents import EOS, SEED, ask, call, make_agents, user, with_tools

from groupgrad.batch import StepTotals, TokenScores
from groupgrad.batching.collate import collate
from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.objectives import LOSSES, PolicyOptions, policy_loss
from groupgrad.rollout.requests import row_seed, turn_seed
from groupgrad.rollout.statistics import num_tokens
from groupgrad.types import Rollout

ANY_IDS = st.lists(st.integers(2, 91), max_size=6)
"""Ids that decoding and encoding would change, `<unk>` and `<bos>` among them."""


def echo(text: str) -> str:
    """Gives the text back.

    Args:
        text: Any text.
    """
    return text


class RandomEngine(BatchEngine):
    """Samples given turns for each row: ids without EOS and, except in the last turn, a call with a text."""

    is_exact = True

    def __init__(self, tokenizer: Any, rows: Sequence[Sequence[tuple[list[int], str]]]):
        self._turns = {}
        for row, turns in enumerate(rows):
            for number, (ids, text) in enumerate(turns):
                called = tokenizer(call("echo", text=text), add_special_tokens=False)["input_ids"]
                last = number == len(turns) - 1
                self._turns[turn_seed(row_seed(SEED, "train", 0, row), number)] = ids if last else [*ids, *called]
        self.samples: dict[int, list[tuple[Request, list[int]]]] = {}

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        return [self._sample(request) for request in requests]

    def _sample(self, request: Request) -> Sample:
        ids = [*self._turns[request.seed], EOS]
        reason = "eos" if len(ids) <= request.max_new_tokens else "length"
        ids = ids[: request.max_new_tokens]
        self.samples[request.seed] = [(request, ids)]
        values = [(request.seed % 97 + i) / -100 for i in range(len(ids))]
        return Sample(ids, reason, values, [-v for v in values])


def turns_of(engine: RandomEngine, rollout: Rollout) -> list[tuple[Request, list[int]]]:
    seed, turns = row_seed(SEED, "train", 0, rollout.index), []
    while sample := engine.samples.get(turn_seed(seed, len(turns))):
        turns += sample
    return turns


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.lists(st.tuples(ANY_IDS, st.text("ab {}<>", max_size=5)), min_size=1, max_size=4), max_size=4),
    budget=st.integers(1, 400),
)
def test_every_trained_token_was_sampled_where_it_stands(make_tokenizer: Any, rows: Any, budget: int):
    tokenizer = with_tools(make_tokenizer())
    engine = RandomEngine(tokenizer, rows)
    agents = make_agents(engine, tokenizer, [echo], budget=budget)
    rollouts = agents(ask({row: user("go") for row in range(len(rows))}))
    agents.close()
    for rollout in rollouts:
        turns = turns_of(engine, rollout)
        assert rollout.sampled is not None
        assert rollout.sampling_logprobs is not None
        sampled = [token for token, flag in zip(rollout.completion_ids, rollout.sampled) if flag]
        assert sampled == [token for _, ids in turns for token in ids]
        at = 0
        for request, ids in turns:
            at = rollout.sampled.index(True, at)
            assert request.prompt_ids == rollout.prompt.ids + rollout.completion_ids[:at]
            assert rollout.completion_ids[at : at + len(ids)] == ids
            expected = [(request.seed % 97 + i) / -100 for i in range(len(ids))]
            assert rollout.sampling_logprobs[at : at + len(ids)] == expected
            at += len(ids)
        assert len(rollout.completion_ids) <= budget
        assert num_tokens([rollout]) == len(rollout.prompt.ids) + len(sampled)
    batch = collate(rollouts, [1.0] * len(rollouts), mask_truncated=False)
    assert batch.trained.tolist() == [flag for rollout in rollouts for flag in rollout.sampled or ()]
    masked = collate(rollouts, [1.0] * len(rollouts), mask_truncated=True)
    kept = [flag and not rollout.is_truncated for rollout in rollouts for flag in rollout.sampled or ()]
    assert masked.trained.tolist() == kept


@pytest.mark.parametrize("loss", LOSSES)
def test_tool_tokens_carry_no_loss_and_no_entropy(make_tokenizer: Any, loss: Any):
    """Their log-probs and entropies change neither loss, nor gradient, nor metric."""
    tokenizer = with_tools(make_tokenizer())
    rows = [[([10, 11], "x"), ([12], "yy"), ([13, 14], "")], [([15], "z"), ([16, 17, 18], "")], [([19], "")]]
    agents = make_agents(RandomEngine(tokenizer, rows), tokenizer, [echo])
    rollouts = agents(ask({row: user("go") for row in range(3)}))
    agents.close()
    totals = StepTotals(rows=3.0, tokens=float(sum(r.num_sampled for r in rollouts)))
    batch = collate(rollouts, [1.0, -0.5, 0.25], mask_truncated=False, totals=totals)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(4, batch.num_tokens, generator=generator)
    batch.old_logprobs, batch.ref_logprobs = -numbers[0], -numbers[1]
    options = PolicyOptions(loss_type=loss, beta=0.1)
    results = []
    for noise in (0.0, 3.0):
        off = noise * ~batch.trained
        batch.old_logprobs = -numbers[0] + off
        logprobs = (-numbers[2] - off).requires_grad_()
        entropy = (numbers[3] + off).requires_grad_()
        result = policy_loss(TokenScores(logprobs, entropy), batch, options, entropy_coef=0.1)
        gradients = torch.autograd.grad(result.loss, [logprobs, entropy])
        assert not any(bool(gradient[~batch.trained].any()) for gradient in gradients)
        assert all(bool(gradient[batch.trained].any()) for gradient in gradients)
        results.append((float(result.loss.detach()), {key: m.read() for key, m in result.metrics.items()}))
    assert results[0] == results[1]
