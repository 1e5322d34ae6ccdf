"""Measures the policy on a data set: sampling and scoring as in training, without gradients or state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch, TokenScores
from groupgrad.batching.eval_loader import EvalBatch
from groupgrad.batching.totals import step_totals, with_entropy_threshold
from groupgrad.evaluation.prompt_numbers import ANSWERS, PromptResult
from groupgrad.metrics import Metric, mean_of
from groupgrad.models.shards import is_sharded
from groupgrad.objectives import OnPolicyInfo, PolicyOptions, find_method, known_rows, policy_loss, sampler_scores
from groupgrad.rollout.collector import Experience, ExperienceCollector
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.run_folder.render import plain_value
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer, errors_of_passes, score_without_gradient


@dataclass(slots=True, frozen=True)
class Evaluator:
    """Samples, scores and measures evaluation batches.

    The same rows get the same random streams in every evaluation, so that only the policy changes the results.
    """

    model: nn.Module
    collector: ExperienceCollector
    scorer: OldAndRefScorer
    policy_options: PolicyOptions
    forward_options: ForwardOptions
    num_generations: int
    aux_loss_coef: float
    device: torch.device | str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SamplingOptions` that differ from training's. `scorer` and `forward_options` have its temperature."""
    by: str | None = None
    """The column of the data set by whose values results are split."""

    def __call__(
        self, batch: EvalBatch, *, phase: str, step: int, trainer_state: Any
    ) -> tuple[Experience, dict[str, Metric], list[PromptResult]]:
        """Collective. One batch's rollouts, this rank's part of its metrics, and what all ranks' prompts scored."""
        rows = batch.rank_rows(dist.rank(), dist.world_size(), self.num_generations)
        experience = self.collector(
            GenerationRequest(
                rows_by_group={row // self.num_generations: batch.rows[row // self.num_generations] for row in rows},
                rows=rows,
                num_rows=len(batch.rows) * self.num_generations,
                num_generations=self.num_generations,
                phase=phase,
                number=batch.number,
                step=step,
                sampling=self.sampling,
            ),
            trainer_state=trainer_state,
        )
        sampled_scores = self._sampler_scores(experience.batch, step)
        totals, keep = step_totals(experience.batch, 1), self.policy_options.top_entropy_quantile
        if keep < 1.0:
            with errors_of_passes(self.model):
                entropy = (self.scorer.policy(experience.batch) if sampled_scores is None else sampled_scores).entropy
            totals = with_entropy_threshold(totals, experience.batch, entropy, keep)
        with errors_of_passes(self.model):
            loss = self._loss(replace(experience.batch, totals=totals), sampled_scores)
        prompts = prompt_results(experience, batch, self.num_generations, by=self.by)
        return experience, {**experience.metrics, **loss}, prompts

    def _sampler_scores(self, batch: Batch, step: int) -> TokenScores | None:
        """The sampler's log-probs and entropies, if a forward pass would give the same; else None."""
        is_exact = self.collector.rollouts.is_exact and not self.forward_options.aux_loss
        if is_sharded(self.model):
            return None  # ranks must agree on whether there is a pass
        if not bool(known_rows(batch, OnPolicyInfo(step, is_exact)).all()):
            return None
        return sampler_scores(batch)

    @torch.no_grad()
    def _loss(self, batch: Batch, sampled_scores: TokenScores | None) -> dict[str, Metric]:
        """Loss and objective metrics; the loss is weighted by its denominator, on ranks without rows too."""
        totals = batch.totals
        weight = totals.tokens if find_method(self.policy_options.loss_type).divides_by_tokens else totals.rows
        part = weight / totals.world_size
        if not batch.num_rows and not is_sharded(self.model):
            return {"loss": mean_of(0.0, part)}
        batch = replace(batch, ref_logprobs=self.scorer.reference_logprobs(batch))
        scores = sampled_scores
        if scores is None:
            batch = batch.to(self.device)
            scores = score_without_gradient(self.model, batch, self.forward_options, aux_loss=True)
        if not batch.num_rows:
            return {"loss": mean_of(0.0, part)}
        result = policy_loss(scores, batch, self.policy_options, aux_loss_coef=self.aux_loss_coef)
        return {"loss": mean_of(result.loss * part, part), **result.metrics}


def prompt_results(
    experience: Experience,
    batch: EvalBatch,
    num_generations: int,
    *,
    by: str | None,
    answers: str = ANSWERS,
    with_texts: bool = False,
) -> list[PromptResult]:
    """Collective. What the completions of a batch's prompts scored, the same on all ranks.

    `answers` is the column, logged by reward functions, whose values vote; `by` one of the data set. Prompts and
    completions are left out unless `with_texts`.
    """
    with dist.errors_on_all_ranks():
        here = _completions(experience, answers, with_texts)
    scored = {row: record for part in dist.all_gather_objects(here) for row, record in part.items()}
    results = []
    for group, row in enumerate(batch.rows):
        records = [scored[group * num_generations + place] for place in range(num_generations)]
        has_answers = all(record["has_answers"] for record in records)
        results.append(
            PromptResult(
                prompt=plain_value(row.get("prompt")) if with_texts else None,
                column=None if by is None else plain_value(row[by]),
                rewards=[record["reward"] for record in records],
                functions={name: [record["functions"][name] for record in records] for name in records[0]["functions"]},
                answers=[record["answer"] for record in records] if has_answers else None,
                completions=[record["text"] for record in records] if with_texts else [],
                lengths=[record["length"] for record in records],
                finish_reasons=[record["finish_reason"] for record in records],
            )
        )
    return results


def _completions(experience: Experience, answers: str, with_texts: bool) -> dict[int, dict[str, Any]]:
    """The rewards and answers of this rank's rows, by row."""
    table, found = experience.table, {}
    logged = table.columns.get(answers)
    for place, rollout in enumerate(experience.rollouts):
        answer = None if logged is None else logged[place]
        found[rollout.index] = {
            "reward": experience.combined_rewards[place],
            "functions": dict(zip(table.names, table.rewards[place].tolist())),
            "has_answers": logged is not None,
            "answer": None if answer is None else str(answer),
            "text": rollout.text if with_texts else None,
            "length": rollout.num_sampled,
            "finish_reason": rollout.finish_reason,
        }
    return found
