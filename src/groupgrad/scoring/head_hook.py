"""Scores tokens inside a model's forward pass, at its output head.

A hook narrows the head's input to the hidden states that predict the tokens. Where the head's arithmetic is known the
tiled head scores them there, and logits never exist; otherwise the model computes their logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from groupgrad.batch import TokenScores
from groupgrad.scoring.early_gradients import PrecomputedGradient
from groupgrad.scoring.logit_transform import head_layer
from groupgrad.scoring.tiled_head import LogitTransform, tiled_scores

ENTROPY_TOKENS = 512
"""Tokens whose logits become entropies at a time, which bounds the scratch memory to tokens x vocabulary."""


@dataclass(slots=True)
class HeadHook:
    """Scores `tokens` in one forward pass."""

    tokens: torch.Tensor
    """(L,) int64."""
    rows: torch.Tensor
    """(L,) int64, the input row of the hidden state that predicts each token."""
    positions: torch.Tensor
    """(L,) int64, its place in that row."""
    shape: torch.Size
    """(B, T) of the model's input."""
    temperature: float = 1.0
    entropy_gradient: bool = False
    precomputed: PrecomputedGradient | None = None
    has_few_gradients: bool = True
    """The backward pass leaves out tokens without a gradient."""
    scales: torch.Tensor | None = None
    """(L,) what multiplies the logits of each token, where some have another temperature; None: 1 for all."""
    places: torch.Tensor | None = None
    """(L,) int64 indices of the tokens in the batch; None for all tokens."""
    is_narrowed: bool = False
    """The head got the hidden states at `rows` and `positions` alone."""
    scores: TokenScores | None = None
    """The scores, if the tiled head computed them."""

    def at(self, places: torch.Tensor) -> HeadHook:
        """A hook that scores the tokens at these places alone."""
        precomputed = self.precomputed
        if precomputed is not None:
            precomputed = PrecomputedGradient(precomputed.logprobs[places], precomputed.gradient[places])
        tokens, rows, positions = self.tokens[places], self.rows[places], self.positions[places]
        scales = None if self.scales is None else self.scales[places]
        found = replace(self, tokens=tokens, rows=rows, positions=positions, scales=scales)
        return replace(found, precomputed=precomputed, places=places)

    @contextmanager
    def on(self, head: Any, transform: LogitTransform | None = None) -> Iterator[None]:
        """Hooks into the module `head`; nothing is hooked for None. The tiled head needs a `transform`.

        With the tiled head the module itself computes one token, whose result is not used.
        """
        if head is None or not self.rows.numel():
            yield
            return
        # Compiled, the hook would take the positions of this call for constants, and compile every batch anew.
        narrow: Any = torch.compiler.disable(lambda module, inputs: self._narrow(module, inputs, transform))
        handle = head.register_forward_pre_hook(narrow)
        try:
            yield
        finally:
            handle.remove()

    def _narrow(self, head: nn.Module, inputs: tuple[Any, ...], transform: LogitTransform | None) -> Any:
        """The head's inputs without states that predict no token; with a `transform` the scores are computed here."""
        hidden = inputs[0]
        num_rows, width = self.shape
        if hidden.dim() != 3 or hidden.shape[0] != num_rows or hidden.shape[1] < width:
            return None
        self.is_narrowed = True
        hidden = self._predictors(hidden)
        if transform is None:
            return (hidden[None], *inputs[1:])
        self.scores = self.tiled_scores(head, hidden, transform)
        return (hidden[None, :1], *inputs[1:])

    def tiled_scores(self, head: Any, hidden: torch.Tensor, transform: LogitTransform) -> TokenScores:
        """The scores from the (L, H) states that predict the tokens; logits never exist."""
        if self.scales is not None:  # as if it multiplied the logits, which are linear in the states here
            hidden = (hidden * self.scales.to(hidden.device)[:, None]).to(hidden.dtype)
        layer = head_layer(head)
        assert layer is not None  # otherwise there is no transform
        scores = tiled_scores(
            hidden,
            layer.output_head(hidden),
            self.tokens,
            transform=transform,
            temperature=self.temperature,
            entropy_gradient=self.entropy_gradient,
            precomputed=self.precomputed,
            has_few_gradients=self.has_few_gradients,
        )
        device = self.tokens.device
        return TokenScores(scores.logprobs.to(device).float(), scores.entropy.to(device).float())

    def scores_of(self, logits: torch.Tensor) -> TokenScores:
        """The scores from the model's own logits."""
        logits = (logits[0] if self.is_narrowed else self._predictors(logits)).float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.scales is not None:
            logits = logits * self.scales.to(logits.device)[:, None]
        logprobs = logits.gather(-1, self.tokens[:, None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = torch.cat([_entropy(part) for part in logits.split(ENTROPY_TOKENS)])
        return TokenScores(logprobs, entropy)

    def _predictors(self, states: torch.Tensor) -> torch.Tensor:
        """(L, H) of (B, T or more, H) at the rows and positions.

        The last token of a prompt predicts the first token of many rows. Its gradient sums over them in a fixed order,
        or runs with the same seed would diverge.
        """
        # Prompt-tuning adapters prepend virtual tokens, so positions count from the right end of the input.
        positions = (self.positions + states.shape[1] - self.shape[1]).to(states.device)
        rows = self.rows.to(states.device)
        if states.device.type != "cpu":
            return states[rows, positions]  # deterministic on GPUs, where `index_select` is not
        return states.flatten(0, 1).index_select(0, rows * states.shape[1] + positions)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    logprobs = torch.log_softmax(logits, dim=-1).clamp(min=-1e4)  # a model may forbid tokens by a logit of -inf
    return -(logprobs.exp() * logprobs).sum(-1)
