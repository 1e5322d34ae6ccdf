"""Counts the prompts that a run has used, so that it can go on behind them with other sizes."""

from __future__ import annotations

from groupgrad.batching.generation_plan import GenerationPlan


def prompts_used(
    plan: GenerationPlan, step: int, num_rows: int | None, *, drop_last: bool, is_shifted: bool = False
) -> int:
    """Prompts that `step` optimizer steps have trained on, over all ranks and epochs, rounded up.

    A data set of `num_rows` rows counts its rows once an epoch, although its last generation batch may be filled up or
    left out; a stream (None) has no epochs. If the run `is_shifted` by an offset, an epoch counts what it takes.
    """
    size, per_generation = plan.prompts_per_generation, plan.micro_batches_per_generation
    if num_rows is None:
        return -(-step * plan.accumulation * size // per_generation)
    generations = max(1, num_rows // size if drop_last else -(-num_rows // size))
    per_epoch = generations * size if is_shifted else num_rows
    epoch, rest = divmod(step, -(-generations * per_generation // plan.accumulation))
    return epoch * per_epoch + min(per_epoch, -(-rest * plan.accumulation * size // per_generation))
