"""The parts of a loss: the tensors that it gets, its result, and how its tokens are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric
from groupgrad.objectives.options import PolicyOptions, RatioLevel
from groupgrad.objectives.ragged import PerRow, PerToken, where_trained
from groupgrad.objectives.reduce import Reduction
from groupgrad.objectives.registry import make_settings

Growth = Literal["never", "negative", "always"]


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
class StepTokens:
    """All loss tokens of an optimizer step, of all ranks."""

    logprobs: torch.Tensor
    """(N,) float64, log-probs of the present policy, nats."""
    advantages: torch.Tensor
    """(N,) float64."""


@dataclass(slots=True, frozen=True)
class Method:
    """Definition of a `loss_type`."""

    surrogate: Callable[[PolicyTerms, PolicyOptions], TokenLoss]
    reduction: Reduction
    reads: tuple[str, ...] = ()
    """Fields of the configuration that the surrogate reads; losses that do not name them leave them without effect."""
    settings: type[Any] | None = None
    """A frozen dataclass of settings of its own, which `loss_settings` fills and `PolicyOptions.settings` holds.
    `registry.setting` gives one its range; a `__post_init__` raises ValueError, with what to set, for values that do
    not go together."""
    level: RatioLevel | None = None
    """The level of the ratio that the paper defines the loss for; None: either."""
    folds_mismatch: bool = False
    """The surrogate has the mismatch in its own weight already."""
    needs_token_correction: bool = False
    """The surrogate reads `PolicyTerms.correction`, and needs a ratio for each token."""
    select: Callable[[StepTokens, PolicyOptions, torch.Generator], torch.Tensor] | None = None
    """The tokens of the whole step -> (N,) bool, those that `Batch.selected` marks before the step. Its choice depends
    on the order of tokens in nothing. Needs a forward pass wherever the sampler's log-probs are not those of the
    present policy."""
    leaves_out_selected: bool = False
    """The tokens that it selects train nothing, as if a mask took them out."""
    grows_with_ratio: Growth = "never"
    """Advantages under which the loss grows with `PolicyTerms.ratio` without a bound; `delta` bounds it for losses that
    read it."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the surrogate measures."""

    def make_settings(self, values: Mapping[str, Any]) -> Any:
        """The settings with these values; None for a method without any. ValueError for others than it has."""
        return make_settings(self.settings, values, option="loss_settings", owner="loss_type")

    @property
    def divides_by_tokens(self) -> bool:
        """True if the loss is a mean over loss tokens."""
        return self.reduction in ("token_mean", "local_token_mean")


def sampler_logprobs(terms: PolicyTerms) -> torch.Tensor:
    """(L,) log-probs under which the tokens were sampled, without gradient.

    The engine's where it reports them, else the old ones. 0 outside the loss tokens.
    """
    batch, known = terms.batch, terms.batch.sampling_logprobs
    old = terms.logprobs.detach() if batch.old_logprobs is None else where_trained(batch.old_logprobs, batch)
    return old if known is None else torch.where(batch.trained & known.isfinite(), known.to(old.dtype), old)


def covariances(tokens: StepTokens) -> torch.Tensor:
    """(N,) (log pi - mean)(A - mean) of each token, the means over all tokens. Source: arXiv:2505.22617."""
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def num_of(share: float, count: int) -> int:
    """The tokens that a share of them are, rounded down, at least one."""
    return max(1, int(share * count)) if share > 0 and count else 0
