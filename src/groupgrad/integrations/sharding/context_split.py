"""Cuts the flat tokens of a pass over the ranks of a group, so that a row may be longer than one device's memory.

In attention the keys and values of all tokens travel around the ring (`ring_attention.py`); all other computations of a
model take one token at a time. The tokens are cut into two chunks a rank, of equal length, wherever rows begin and end.
Rank r has the chunks r and 2 C - 1 - r of C ranks: a token attends to those before it, so early tokens cost less than
late ones, and these pairs cost about the same.

Each pass is a collective of the group. The ranks do not agree on an exception inside it: it ends its own rank, and
`trainer/hangs.py` ends the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from groupgrad.batch import TokenScores
from groupgrad.dist import RankGroup, sum_over_group
from groupgrad.integrations.sharding.ring_attention import RingLayout
from groupgrad.scoring.blocks import TokenSpan
from groupgrad.scoring.head_hook import HeadHook
from groupgrad.scoring.layout import ForwardInputs

_NO_PROMPT = -1
"""Number of the prompt of tokens that fill up a pass. No row has it, so no row attends to them."""


@dataclass(slots=True, frozen=True)
class ContextPart:
    """One rank's part of a pass: its tokens, and which of the predicted tokens it scores."""

    group: RankGroup
    inputs: ForwardInputs
    """This rank's tokens; at least one."""
    scored: torch.Tensor
    """(n,) int64, places of the tokens that this rank scores among all L that the pass predicts; n may be 0."""
    predictors: torch.Tensor
    """(n,) int64, the places among this rank's tokens whose outputs predict them."""
    num_predicted: int
    """L."""

    def hook(self, hook: HeadHook) -> HeadHook:
        """Narrows a hook that scores all L predicted tokens to this rank's tokens.

        The head cannot run on an empty input, so a rank without any scores token 0, which `join` leaves out.
        """
        if len(self.scored):
            part_hook = replace(hook.at(self.scored), positions=self.predictors)
        else:
            nothing = self.scored.new_zeros(1)
            part_hook = replace(hook, tokens=nothing, rows=nothing, positions=nothing, scales=None, precomputed=None)
        return replace(part_hook, shape=self.inputs.shape, places=hook.places)

    def join(self, scores: TokenScores) -> TokenScores:
        """Joins the ranks' scores; returns the (L,) scores of all predicted tokens. Collective, also backward."""
        of_rank = torch.stack([scores.logprobs, scores.entropy])[:, : len(self.scored)]
        everywhere = of_rank.new_zeros(2, self.num_predicted).index_copy(1, self.scored.to(of_rank.device), of_rank)
        logprobs, entropy = sum_over_group(everywhere, self.group).unbind()
        return replace(scores, logprobs=logprobs, entropy=entropy if scores.entropy.requires_grad else entropy.detach())


def score_over_ranks(
    score_pass: Callable[[ForwardInputs, HeadHook], TokenScores],
    inputs: ForwardInputs,
    hook: HeadHook,
    group: RankGroup,
) -> TokenScores:
    """Scores of the tokens of `hook` from a pass of which each rank computes a part by `score_pass`. Collective."""
    part = cut_over_ranks(inputs, hook.positions, group)
    return part.join(score_pass(part.inputs, part.hook(hook)))


def cut_over_ranks(inputs: ForwardInputs, predictors: torch.Tensor, group: RankGroup) -> ContextPart:
    """This rank's part of a flat pass that predicts tokens from the (L,) places `predictors`.

    A pass of fewer tokens than chunks is filled up with tokens of their own that predict nothing.
    """
    assert inputs.positions is not None
    spans, ids, positions = list(inputs.spans), inputs.ids, inputs.positions
    lacking = 2 * group.size - len(ids)
    if lacking > 0:
        spans.append(TokenSpan(len(ids), lacking, prompt=_NO_PROMPT))
        ids, positions = torch.cat([ids, ids.new_zeros(lacking)]), torch.cat([positions, torch.arange(lacking).to(ids)])
    places = _places_of_ranks(len(ids), group.size)
    places_here = torch.tensor([place for chunk in places[group.index] for place in chunk], device=ids.device)
    place_here = torch.full_like(ids, -1).index_copy_(0, places_here, torch.arange(len(places_here), device=ids.device))
    here = place_here[predictors]
    scored = (here >= 0).nonzero().flatten()
    attention = RingLayout([_cut_spans(chunks, spans) for chunks in places], group)
    return ContextPart(
        group,
        replace(inputs, ids=ids[places_here], positions=positions[places_here], attention=attention, spans=[]),
        scored,
        here[scored],
        len(predictors),
    )


def _places_of_ranks(num_tokens: int, num_ranks: int) -> list[tuple[range, range]]:
    """The flat places of the two chunks of each rank."""
    num_chunks = 2 * num_ranks
    bounds = [num_tokens * chunk // num_chunks for chunk in range(num_chunks + 1)]
    chunks = [range(start, end) for start, end in pairwise(bounds)]
    return [(chunks[rank], chunks[num_chunks - 1 - rank]) for rank in range(num_ranks)]


def _cut_spans(chunks: Sequence[range], spans: Sequence[TokenSpan]) -> list[TokenSpan]:
    """Cuts spans to the chunks of one rank. A part's `start` counts from the rank's first token."""
    parts, first = [], 0
    for chunk in chunks:
        for span in spans:
            start, end = max(span.start, chunk.start), min(span.start + span.length, chunk.stop)
            if start < end:
                position = span.position + start - span.start
                place = first + start - chunk.start
                parts.append(replace(span, start=place, length=end - start, position=position))
        first += len(chunk)
    return parts
