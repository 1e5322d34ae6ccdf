"""What a loss is made of: the tensors that it gets, what it returns, and how its tokens are averaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import PerRow, PerToken
from groupgrad.objectives.reduce import Reduction


@dataclass(slots=True, frozen=True)
class PolicyTerms:
    """Inputs of every surrogate."""

    batch: Batch
    logprobs: torch.Tensor
    """(L,) log-probs of the policy; 0 outside the loss tokens."""
    log_ratio: torch.Tensor
    """(L,) log of the token ratio; 0 outside the loss tokens."""
    log_level_ratio: PerToken | PerRow
    """Log of the policy ratio at the level asked for."""
    ratio: PerToken | PerRow
    """That ratio, held at e^80 where the loss does not grow with it."""
    kept: torch.Tensor
    """(L,) bool, loss tokens whose policy term no mask takes out."""
    gap: torch.Tensor | None
    """(L,) log-prob of the reference less that of the policy; None without a KL term."""
    correction: PerToken | PerRow | None
    """The mismatch ratio, or None."""
    token_ratio: torch.Tensor
    """(L,) the policy ratio that holds for each token."""
    token_advantages: torch.Tensor
    """(L,) the advantage that holds for each token."""


@dataclass(slots=True, frozen=True)
class TokenLoss:
    """Output of a surrogate."""

    per_token: torch.Tensor
    """(L,) with gradient."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])


@dataclass(slots=True, frozen=True)
class Method:
    """Definition of a `loss_type`."""

    surrogate: Callable[[PolicyTerms, PolicyOptions], TokenLoss]
    reduction: Reduction
    folds_mismatch: bool = False
    """The surrogate has the mismatch ratio in its own weight already."""
    clips_ratio: bool = False
    """The ratio is clipped on both sides, so that `epsilon`, `epsilon_high` and `delta` apply."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the surrogate measures."""

    @property
    def sums_over_tokens(self) -> bool:
        """True if long completions count more than short ones."""
        return not self.reduction.startswith("sequence_")

    @property
    def divides_by_tokens(self) -> bool:
        """True if the loss is a mean over loss tokens."""
        return self.reduction in ("token_mean", "local_token_mean")
