r"""SAPO: a smooth gate in place of the clip, averaged over each completion and then over completions.

With the temperature `sapo_temperature_pos` where A > 0, else `sapo_temperature_neg`:

$$\ell_{i,t} = -\frac{4}{\tau} \sigma\left(\tau (c_{i,t} - 1)\right) A_i$$

Worked: `ratios=[[1]], advantages=[1]` gives `loss=-2, gradient=[[-1]]`;
`ratios=[[3]], advantages=[1]` gives `loss=-3.523, gradient=[[-1.26]]`.

When: stale samples, without a hard edge.

Source: arXiv:2511.20347, eq. 5 and 6.
"""

from __future__ import annotations

import torch

from groupgrad.objectives.method import Method, PolicyTerms, TokenLoss
from groupgrad.objectives.options import PolicyOptions


def sapo(ratio: torch.Tensor, advantages: torch.Tensor, temperature_pos: float, temperature_neg: float) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (c - 1)) A with tau by the sign of A: a smooth gate in place of the clip.

    Its gradient at c = 1 is that of -c A. Source: arXiv:2511.20347, eq. 5 and 6.
    """
    positive = torch.full_like(ratio, temperature_pos)
    tau = torch.where(advantages > 0, positive, torch.full_like(ratio, temperature_neg))
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def soft_gate(terms: PolicyTerms, options: PolicyOptions) -> TokenLoss:
    """`sapo` of each token."""
    positive, negative = options.sapo_temperature_pos, options.sapo_temperature_neg
    return TokenLoss(sapo(terms.token_ratio, terms.token_advantages, positive, negative))


METHOD = Method(soft_gate, "sequence_mean", reads=("sapo_temperature_neg", "sapo_temperature_pos"))
