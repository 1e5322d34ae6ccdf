"""Measuring the policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from collectors import make_collector

from groupgrad.batching.eval_loader import EvalBatch
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import BatchEngine, SamplingOptions
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.models.reference import Reference
from groupgrad.objectives import PolicyOptions
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout import evaluation
from groupgrad.rollout.collector import ScoringOptions
from groupgrad.rollout.evaluation import Evaluator
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer

BATCH = EvalBatch(3, [{"prompt": "ab"}, {"prompt": "c"}, {"prompt": "1+1="}], 3)


def length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) + ids[0] / 10 for ids in completion_ids]


def evaluator(model: Any, tokenizer: Any, **options: Any) -> Evaluator:
    sampling = SamplingOptions(max_new_tokens=5, eos_ids=(1, *range(40, 60)))
    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), TransformersEngine(model), sampling, seed=0)
    maker = make_collector(rollouts, RewardRunner(length), ScoringOptions((1.0,)))
    reference = Reference(model, adapter_is_fresh=False, is_synced=False) if options.get("beta") else None
    frozen = OldAndRefScorer(model, reference, ForwardOptions(), "cpu")
    return Evaluator(model, maker, frozen, PolicyOptions(**options), ForwardOptions(), 2, 0.0, "cpu")


def run(evaluate: Evaluator, batch: EvalBatch = BATCH) -> Any:
    return evaluate(batch, phase="eval", step=1, trainer_state=None)


def test_the_loss_is_that_of_the_present_policy(model, tokenizer):
    """At ratio 1 the token mean of -A is -sum(length * A) / sum(length), the row mean -mean(A) = 0."""
    scored, metrics, _ = run(evaluator(model, tokenizer))
    lengths = torch.tensor([len(rollout.completion_ids) for rollout in scored.rollouts], dtype=torch.float64)
    advantages = scored.advantages
    assert len(set(lengths.tolist())) > 1
    expected = -float((lengths * advantages).sum() / lengths.sum())
    assert abs(expected) > 1e-3
    assert metrics["loss"].read() == pytest.approx(expected, rel=1e-5)
    assert float(metrics["loss"].weight) == float(lengths.sum())
    _, by_rows, _ = run(evaluator(model, tokenizer, loss_type="grpo"))
    assert by_rows["loss"].read() == pytest.approx(0.0, abs=1e-6)
    assert float(by_rows["loss"].weight) == 6.0


def test_the_same_rows_give_the_same_numbers_another_batch_others_and_training_is_not_touched(model, tokenizer):
    model.train()
    evaluate = evaluator(model, tokenizer)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = run(evaluate), run(evaluate), run(evaluate, EvalBatch(4, BATCH.rows, 3))
    texts, again, others = ([r.completion_ids for r in found[0].rollouts] for found in (first, second, other))
    assert texts == again != others
    assert first[1]["loss"].read() == second[1]["loss"].read()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Reporting(BatchEngine):
    """Reports the entropies 1.25 and 1.75 in turn, so that a test recognises them."""

    is_exact = True

    def __init__(self, engine: Any):
        self.inner = engine

    def sample(self, requests: Any, options: Any) -> Any:
        samples = self.inner.sample(requests, options)
        return [replace(s, entropies=[1.25 + 0.5 * (i % 2) for i in range(len(s.ids))]) for s in samples]


@pytest.mark.parametrize("options", [{}, {"top_entropy_quantile": 0.5}, {"beta": 0.5}])
def test_what_sampling_knows_is_not_computed_again(model, tokenizer, monkeypatch, options):
    evaluate = evaluator(model, tokenizer, **options)
    plain = run(evaluate)[1]
    rollouts: Any = evaluate.collector.rollouts
    rollouts.engine = Reporting(rollouts.engine)
    monkeypatch.setattr(evaluation, "score_without_gradient", lambda *args, **_: pytest.fail("the policy was run"))
    scored, metrics, _ = run(evaluate)
    numbers = [1.25 + 0.5 * (i % 2) for rollout in scored.rollouts for i in range(len(rollout.completion_ids))]
    assert metrics["entropy"].read() == pytest.approx(sum(numbers) / len(numbers))
    if not options.get("top_entropy_quantile"):
        assert metrics["loss"].read() == pytest.approx(plain["loss"].read(), abs=1e-6)
