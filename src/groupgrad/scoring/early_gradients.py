"""Gradients of the output head in the forward pass already, from a gradient of the log-probs that is known before it.

`tiled_head.py` is complete without. With the log-probs and their gradient that the sampler's weights gave, one pass
over the tiles gives scores and gradients: three products of size L x V x H instead of four. The scores are exact
whatever was precomputed, and tokens whose gradient turns out to be another are computed again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from groupgrad.scoring.head_tiles import (
    NATS,
    Gradients,
    HeadGradRequest,
    HeadTask,
    OutputHead,
    Scores,
    empty_gradients,
    rows_to_all,
    score_pass,
    scored_gradient_pass,
    token_logits,
)

_CLOSE = 5e-6
"""Relative difference up to which a token's precomputed gradient replaces its true one."""


@dataclass(slots=True, frozen=True)
class PrecomputedGradient:
    """Log-probs and their gradient, computed before the forward pass with the weights that sampled."""

    logprobs: torch.Tensor
    """(L,) the sampler's log-probs (nats, same temperature); NaN where unknown."""
    gradient: torch.Tensor
    """(L,) d loss / d log-prob up to a common factor, 0 where there is none."""


@dataclass(slots=True)
class EarlyGradients:
    """Gradients computed in the forward pass, from a precomputed log-prob gradient."""

    scores: Scores
    gradients: Gradients
    """For the precomputed d loss / d log-prob; hidden's is (L, H)."""
    gradient: torch.Tensor
    """(L,) the precomputed d loss / d log-prob, 0 for tokens left out."""
    excess: torch.Tensor
    """(L,) sum of the probabilities in use. All of them but the token's are too large by this factor."""


def early_gradients(
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    precomputed: PrecomputedGradient,
    task: HeadTask,
    needed: tuple[bool, bool, bool],
) -> EarlyGradients | None:
    """Scores and gradients in one pass, or None if the precomputed log-probs are far off."""
    logits, cap_slopes = token_logits(hidden, head, tokens, task)
    normaliser = logits - precomputed.logprobs / NATS
    is_usable = (precomputed.gradient != 0) & normaliser.isfinite()
    rows, others = (mask.nonzero().squeeze(1) for mask in (is_usable, ~is_usable))
    if not len(rows):
        return None
    gradient = precomputed.gradient[rows]
    grads = empty_gradients(len(rows), head, task, needed)
    request = HeadGradRequest(tokens[rows], normaliser[rows], gradient, gradient)
    scores, excess = scored_gradient_pass(hidden[rows], head, request, task, grads)
    # Far from 1 the sums, and with them the gradients, may be infinite or zero.
    if not bool(((excess - 1).abs() < 0.5).all()):
        return None
    token_gradient = -gradient * torch.expm1(scores.logprobs) * task.slope
    if cap_slopes is not None:
        token_gradient *= cap_slopes[rows]
    _add_tokens(grads, hidden[rows], head, tokens[rows], token_gradient, task)
    if not len(others):
        return EarlyGradients(scores, grads, gradient, excess)
    rest = score_pass(hidden[others], head, tokens[others], task)
    grads.hidden = rows_to_all(grads.hidden, rows, len(hidden))
    order = torch.cat([rows, others]).argsort()
    all_scores = Scores(
        *(
            torch.cat([getattr(scores, name), getattr(rest, name)])[order]
            for name in ("logprobs", "entropy", "normaliser")
        )
    )
    excess = torch.cat([excess, torch.ones_like(rest.entropy)])[order]
    return EarlyGradients(all_scores, grads, precomputed.gradient.masked_fill(~is_usable, 0.0), excess)


def _add_tokens(
    grads: Gradients,
    hidden: torch.Tensor,
    head: OutputHead,
    tokens: torch.Tensor,
    token_gradient: torch.Tensor,
    task: HeadTask,
) -> None:
    """Adds the gradient of each token's logit (L,): d loss / d log-prob * (1 - p), from its exact log-prob.

    For a nearly certain token even a tiny error of p would be a large one of 1 - p.
    """
    if grads.hidden is not None:
        grads.hidden.addcmul_(head[tokens], token_gradient[:, None])
    if grads.weight is not None:
        grads.weight.index_add_(0, tokens, hidden[:, task.frozen_columns :] * token_gradient[:, None])
    if grads.bias is not None:
        grads.bias.index_add_(0, tokens, token_gradient)


def take_early(early: EarlyGradients, request: HeadGradRequest) -> Gradients:
    """The early gradients times the factor between them and the true ones; `request` keeps what they lack."""
    grads, true = early.gradients, request.token_grad
    largest = early.gradient.abs().argmax()
    factor = float(true[largest] / early.gradient[largest])
    for x in (grads.hidden, grads.weight, grads.bias):
        if x is not None and factor != 1.0:
            x *= factor
    done = early.gradient * factor
    token_rest, prob_rest = true - done, true - done * early.excess
    is_close = torch.maximum(token_rest.abs(), prob_rest.abs()) <= _CLOSE * true.abs()
    # The early gradients of a token's logit have the exact p, those of all others the p in use.
    prob = early.scores.logprobs.exp()
    token_rest = token_rest * (1 - prob) + prob_rest * prob
    request.token_grad, request.prob_grad = token_rest.masked_fill(is_close, 0.0), prob_rest.masked_fill(is_close, 0.0)
    return grads
