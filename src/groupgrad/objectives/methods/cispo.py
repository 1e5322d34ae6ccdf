r"""CISPO: the weight is clipped and has no gradient, so every token keeps one. Averaged over all tokens of the step.

`epsilon_high` is the ceiling itself:

$$\ell_{i,t} = -sg\left(\min(c_{i,t}, \epsilon_{high})\right) A_i \log\pi_{i,t}$$

Worked: `ratios=[[7, 0.5, 0.5]], advantages=[1], epsilon_high=5` gives `gradient=[[-1.667, -0.167, -0.167]],
metrics={"cispo_clip_ratio": 0.333}`.

When: several steps a generation batch; rare decisive tokens keep a gradient.

Source: arXiv:2506.13585, eq. 4; the ceiling's default: arXiv:2510.13786.
"""

from __future__ import annotations

import torch

from groupgrad.batch import Batch
from groupgrad.metrics import Metric
from groupgrad.objectives.clipping import limited
from groupgrad.objectives.measure import counted, mean_where
from groupgrad.objectives.method import Method, PolicyTerms, TokenLoss
from groupgrad.objectives.options import PolicyOptions
from groupgrad.objectives.ragged import PerRow, PerToken, token_advantages


def cispo(ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, ceiling: float) -> torch.Tensor:
    """-stopgrad(min(c, ceiling)) A log pi: the weight is clipped, so every token keeps a gradient.

    Gradient flows through `logprobs` only. Source: arXiv:2506.13585, eq. 4.
    """
    return -limited(ratio.detach(), ceiling) * advantages * logprobs


def ceiling_metrics(ratio: PerToken | PerRow, batch: Batch, ceiling: float) -> dict[str, Metric]:
    """`cispo_clip_ratio`: share of loss tokens (or sequences) with a ratio above the ceiling and positive advantage."""
    signs = token_advantages(batch) if isinstance(ratio, PerToken) else batch.advantages
    above = (ratio.values > ceiling) & (signs > 0)
    return {"cispo_clip_ratio": mean_where(above.float(), counted(ratio, batch))}


def clipped_weight(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """`cispo` of each token; `epsilon_high` is the ceiling itself."""
    loss = cispo(terms.token_ratio, terms.token_advantages, terms.logprobs, options.epsilon_high)
    return TokenLoss(loss, ceiling_metrics(terms.ratio, terms.batch, options.epsilon_high))


METHOD = Method(clipped_weight, "token_mean", reads=("epsilon_high",), metrics=("cispo_clip_ratio",))
