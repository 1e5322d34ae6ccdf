"""Measures how far each token's gradient agrees with the whole step's, for an imagined layer before the output head.

The layer is linear, `h -> W h` with W the identity. With `d_t` the gradient of the loss with respect to the head's
input `h_t` of token t, the gradient of W is G, the (H, H) sum of `d_t h_t^T` over all tokens. Inner products of tokens
and rows with G need no further pass, and no tensor of the size of the vocabulary.
"""

from __future__ import annotations

import torch


def layer_gradient(errors: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """(H, H) gradient of the layer from some tokens: sum of `d_t h_t^T`. Both arguments are (L, H)."""
    return errors.T @ states


def gradient_shares(errors: torch.Tensor, states: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(L,) `d_t^T G h_t / |G|^2`: the inner product of each token's gradient with the step's (H, H), over its square.

    The shares of all tokens of a step sum to 1; one below 0 is of a token that the step went against. All are NaN where
    the step has no gradient.
    """
    return ((errors @ gradient) * states).sum(-1) / gradient.square().sum()


def signal_and_noise(square: float, squares_of_groups: float, num_groups: int) -> tuple[float, float]:
    """Unbiased estimates of the squared norm of the true gradient, and of the step gradient's variance around it.

    arXiv:1812.06162, appendix A.1, with one group as the small batch and the Q groups of a step as the large one:
    `square` is |G|^2, and `squares_of_groups` the sum of |G_q|^2 over the groups' parts of G. The variance is the
    paper's tr(Sigma) / Q.
    ValueError for fewer than two groups.
    """
    if num_groups < 2:
        raise ValueError(f"{num_groups} groups have no variance; give 2 or more")
    signal = num_groups / (num_groups - 1) * (square - squares_of_groups)
    return signal, square - signal
