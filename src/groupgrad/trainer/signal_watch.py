"""Warns when several generation batches in a row give no gradient."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping

from groupgrad.metrics import Metric

logger = logging.getLogger(__name__)

PATIENCE = 10
"""Optimizer steps without a gradient, one after the other, after which the warning is due."""

_UNSCORED = "no completion was scored (reward functions returned None)"
_TRUNCATED = "every completion was truncated, and mask_truncated_completions=True leaves them out"
_EQUAL = "the rewards of each group were equal"
_REMEDIES = {
    _UNSCORED: "have a reward function return numbers for these rows",
    _TRUNCATED: "raise max_completion_length",
    _EQUAL: (
        "end the run if the task is learned; otherwise choose tasks that are sometimes solved, give partial credit, or "
        "raise num_generations or temperature"
    ),
}


class LearningSignalWatch:
    """Reads the metrics of each generation batch, and warns once when none of the last ones had a gradient.

    It is of use only where the advantages alone give a gradient: no KL term, no entropy bonus.
    """

    def __init__(self, *, mask_truncated: bool, steps_per_batch: float = 1.0):
        self._mask_truncated = mask_truncated
        self._patience = math.ceil(PATIENCE / steps_per_batch)
        self._reasons: list[str] = []
        self._has_warned = False

    def read(self, metrics: Mapping[str, Metric]) -> None:
        """Counts a generation batch."""
        reason = self._reason(metrics)
        self._reasons = [] if reason is None else [*self._reasons, reason]
        if len(self._reasons) < self._patience or self._has_warned:
            return
        self._has_warned = True
        counted = Counter(self._reasons).most_common()
        logger.warning(
            "the last %d generation batches gave no gradient, so nothing was learned: %s. %s",
            len(self._reasons),
            "; ".join(f"in {count} of them {reason}" for reason, count in counted),
            "; ".join(_REMEDIES[reason] for reason, _ in counted).capitalize(),
        )

    def _reason(self, metrics: Mapping[str, Metric]) -> str | None:
        """The reason why a generation batch has no gradient; None if it has one."""
        if metrics["reward"].read() is None:
            return _UNSCORED
        if self._mask_truncated and metrics["completions/clipped_ratio"].read() == 1.0:
            return _TRUNCATED
        return _EQUAL if metrics["frac_reward_zero_std"].read() == 1.0 else None
