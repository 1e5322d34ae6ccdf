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
from groupgrad.evaluation.prompt_numbers import ANSWERS, PromptResult
from groupgrad.metrics import Metric
from groupgrad.rollout.collector import Experience
from groupgrad.rollout.evaluation import Evaluator, prompt_results
from groupgrad.rollout.requests import GenerationRequest, row_seed
from groupgrad.run_folder.progress import ProgressCallback
from groupgrad.trainer.run_summary import StartLines
from groupgrad.trainer.step_log import FirstBatch


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
    ) -> tuple[Experience, dict[str, Metric], list[PromptResult]]:
        """Collective. One batch's rollouts and this rank's part of its metrics; its prompts are kept here."""
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
            self._check_answers(experience)
        options = {"by": self._by, "answers": self._answers or ANSWERS, "with_texts": True}
        self.prompts += prompt_results(experience, batch, size, **options)
        self._bar.update(len(batch.rows))
        return experience, experience.metrics, []

    def _check_answers(self, experience: Experience) -> None:
        """ValueError if no function logged the answers."""
        columns = experience.table.columns
        if self._answers is not None and self._answers not in columns and experience.rollouts:
            raise ValueError(
                f"--answer {self._answers}: the reward functions have logged no such column by log_extra, but "
                f"{', '.join(columns) or 'none'}"
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
