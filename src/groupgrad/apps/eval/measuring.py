"""Samples and scores a data set with a trainer's engine and rewards, without a loss."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from groupgrad import dist
from groupgrad.apps.eval.results import Evaluation
from groupgrad.batching.eval_loader import EvalBatch
from groupgrad.evaluation.prompt_numbers import PromptResult
from groupgrad.metrics import Metric
from groupgrad.rollout.collector import Experience
from groupgrad.rollout.evaluation import Evaluator
from groupgrad.rollout.requests import GenerationRequest, row_seed
from groupgrad.run_folder.progress import ProgressCallback
from groupgrad.run_folder.render import plain_value
from groupgrad.trainer.run_summary import StartLines
from groupgrad.trainer.step_log import FirstBatch

ANSWERS = "answer_parsed"
"""Column that `accuracy_reward`, `reasoning_accuracy_reward` and `reasoning_gym_reward` log by `log_extra`."""


@dataclass(slots=True, frozen=True)
class NumberedRequest(GenerationRequest):
    """A request whose streams belong to a prompt of the data set and to one of its completions.

    So neither the size of batches nor the number of completions changes what a completion is sampled from.
    """

    first_prompt: int = 0
    """Number in the data set of the first group's prompt."""

    def seed_of(self, row: int, run_seed: int) -> int:
        """The seed of a row's random stream."""
        group, place = divmod(row, self.num_generations)
        return row_seed(run_seed, self.phase, self.first_prompt + group, place)


class Sampler:
    """Takes the place of a trainer's `Evaluator`: samples and scores each batch, and keeps what it scored."""

    def __init__(self, evaluator: Evaluator, answers: str | None, by: str | None, bar: tqdm):
        self._evaluator, self._answers, self._by, self._bar = evaluator, answers, by, bar
        self.prompts: list[PromptResult] = []

    def __call__(
        self, batch: EvalBatch, *, phase: str, step: int, trainer_state: Any
    ) -> tuple[Experience, dict[str, Metric]]:
        """Collective. One batch's rollouts and this rank's part of its metrics."""
        size = self._evaluator.num_generations
        rows = batch.rank_rows(dist.rank(), dist.world_size(), size)
        request = NumberedRequest(
            rows_by_group={row // size: batch.rows[row // size] for row in rows},
            rows=rows,
            num_rows=len(batch.rows) * size,
            num_generations=size,
            phase=phase,
            number=batch.number,
            step=step,
            sampling=self._evaluator.sampling,
            first_prompt=batch.number * batch.prompts_per_batch,
        )
        experience = self._evaluator.collector(request, trainer_state=trainer_state)
        with dist.errors_on_all_ranks():
            here = self._scored(experience)
        scored = {row: record for part in dist.all_gather_objects(here) for row, record in part.items()}
        for group, row in enumerate(batch.rows):
            self.prompts.append(self._result(row, [scored[group * size + place] for place in range(size)]))
        self._bar.update(len(batch.rows))
        return experience, experience.metrics

    def _scored(self, experience: Experience) -> dict[int, dict[str, Any]]:
        """The rewards and answers of this rank's rows, by row. ValueError if no function logged the answers."""
        table, found = experience.table, {}
        answers = table.columns.get(self._answers or ANSWERS)
        if self._answers is not None and answers is None and experience.rollouts:
            logged = ", ".join(table.columns) or "none"
            raise ValueError(
                f"--answer {self._answers}: the reward functions have logged no such column by log_extra, but {logged}"
            )
        for place, rollout in enumerate(experience.rollouts):
            answer = None if answers is None else answers[place]
            found[rollout.index] = {
                "reward": experience.combined_rewards[place],
                "functions": dict(zip(table.names, table.rewards[place].tolist())),
                "has_answers": answers is not None,
                "answer": None if answer is None else str(answer),
                "text": rollout.text,
                "length": rollout.num_sampled,
                "finish_reason": rollout.finish_reason,
            }
        return found

    def _result(self, row: Mapping[str, Any], scored: list[dict[str, Any]]) -> PromptResult:
        has_answers = all(record["has_answers"] for record in scored)
        return PromptResult(
            prompt=plain_value(row.get("prompt")),
            column=None if self._by is None else plain_value(row[self._by]),
            rewards=[record["reward"] for record in scored],
            functions={name: [record["functions"][name] for record in scored] for name in scored[0]["functions"]},
            answers=[record["answer"] for record in scored] if has_answers else None,
            completions=[record["text"] for record in scored],
            lengths=[record["length"] for record in scored],
            finish_reasons=[record["finish_reason"] for record in scored],
        )


def evaluate(
    trainer: Any, dataset: Any, model: str, settings: Mapping[str, Any], *, answers: str | None, by: str | None
) -> Evaluation:
    """Collective. Samples `num_generations_eval` completions of each row with a trainer, and scores them.

    `answers` is a column that reward functions log, whose values vote (None: `ANSWERS`, if there is one); `by` a column
    of the data set. Weights and training state stay as they are. ValueError for a column that was not logged.
    """
    for callback in (ProgressCallback, StartLines, FirstBatch):
        trainer.remove_callback(callback)
    components, began = trainer.components, time.monotonic()
    with tqdm(total=len(dataset), desc=f"prompts of {model}", file=sys.stderr, disable=None, leave=False) as bar:
        sampler = Sampler(components.evaluator, answers, by, bar)
        trainer.components = replace(components, evaluator=sampler)
        try:
            trainer.evaluate(dataset)
        finally:
            trainer.components = components
    return Evaluation(model, dict(settings), sampler.prompts, time.monotonic() - began)
