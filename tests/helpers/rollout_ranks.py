"""One rank: generation batches and an evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from collectors import make_collector

from groupgrad import dist
from groupgrad.batching.eval_loader import EvalBatch
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.metrics import merge_all
from groupgrad.models.reference import Reference
from groupgrad.objectives import PolicyOptions
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import ExperienceCollector, ScoringOptions
from groupgrad.rollout.evaluation import Evaluator
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer
from groupgrad.types import Rollout, Trace

ROWS = [{"prompt": text, "broken": False} for text in ("ab", "c", "1+1=", "d")]


class Failing:
    """A source whose rollouts with these row numbers fail."""

    def __init__(self, rollouts: SingleTurnRollouts, *failed: int):
        self._rollouts, self._failed = rollouts, failed
        self.is_exact, self.metrics, self.close = False, rollouts.metrics, rollouts.close

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        rollouts = self._rollouts(request)
        problem = Trace(0, problem="no such level")
        return [replace(r, finish_reason="error", trace=problem) if r.index in self._failed else r for r in rollouts]


def reward(completion_ids: list[list[int]], broken: list[bool], **kwargs: Any) -> list[float]:
    if any(broken):
        raise ValueError("one of these rows is broken")
    return [float(len(ids)) + ids[0] / 10 for ids in completion_ids]


def main(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Returns what this rank found, by name."""
    world_size = dist.world_size()
    sampling = SamplingOptions(max_new_tokens=5, eos_ids=(1, *range(40, 60)))
    rollouts = SingleTurnRollouts(PromptMaker(tokenizer), TransformersEngine(model), sampling, seed=0)
    scoring = ScoringOptions((1.0,))
    maker = make_collector(rollouts, RewardRunner(reward), scoring)

    def failing(*rows: int) -> ExperienceCollector:
        return make_collector(Failing(rollouts, *rows), RewardRunner(reward), scoring)

    plan = GenerationPlan(4 // world_size, world_size, 1, 2, 1, 2)
    return {
        "batch": one_batch(maker, plan, ROWS),
        "by length": one_batch(
            make_collector(rollouts, RewardRunner(reward), ScoringOptions((1.0,), estimator="opo")), plan, ROWS
        ),
        # Only the last rank has group 3.
        "broken": one_batch(maker, plan, [*ROWS[:3], {**ROWS[3], "broken": True}]),
        # Three of the four rows of the second rank failed.
        "failed": one_batch(failing(5, 6, 7), plan, ROWS),
        "mostly failed": one_batch(failing(*range(5)), plan, ROWS),
        "evaluation": evaluation(model, maker),
    }


def one_batch(maker: ExperienceCollector, plan: GenerationPlan, dataset: list[dict[str, Any]]) -> Any:
    rows = plan.rank_rows(dist.rank())
    request = GenerationRequest(
        {row // 2: dataset[row // 2] for row in rows}, rows, plan.generation_batch_size, 2, "train", 0, 0
    )
    try:
        scored = maker(request, trainer_state=None)
    except Exception as error:
        return [type(error).__name__, str(error)]
    metrics = merge_all(dist.all_gather_objects(scored.metrics))
    return {
        "rows": {
            rollout.index: [rollout.completion_ids, a]
            for rollout, a in zip(scored.rollouts, scored.advantages.tolist())
        },
        "metrics": {key: metric.read() for key, metric in metrics.items()},
        "num_tokens": scored.num_tokens,
        "mean_reward": scored.mean_reward,
    }


def evaluation(model: Any, maker: ExperienceCollector) -> dict[str, float | None]:
    """Batches of five single completions, then of one, for which not every rank has a row."""
    reference = Reference(model, adapter_is_fresh=False, is_synced=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    scorer = OldAndRefScorer(model, reference, ForwardOptions(), "cpu")
    evaluate = Evaluator(model, maker, scorer, PolicyOptions(beta=0.5), ForwardOptions(), 1, 0.0, "cpu")
    parts: list[Any] = []
    for number, rows in enumerate([[*ROWS, ROWS[1]], [ROWS[2]]]):
        metrics = evaluate(EvalBatch(number, rows, 5), phase="eval", step=0, trainer_state=None)[1]
        parts += dist.all_gather_objects(metrics)
    return {key: metric.read() for key, metric in merge_all(parts).items()}
