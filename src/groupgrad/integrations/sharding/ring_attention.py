"""Attention over tokens that are cut over the ranks of a ring, exactly.

Each rank has the queries, keys and values of its own tokens. Keys and values travel around the ring: at every hop a
rank computes the attention of its queries to the keys that are there, and passes these on. The softmax over all keys is
put together by the log-sum-exp of its parts. In the backward pass keys and values make the round again, and their
gradients travel with them, so that they come home complete. A rank holds the keys and values of two ranks at a time,
and nothing of the size of the scores is kept.

Sources: the ring, Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889; parts of a softmax and
their gradient, Dao 2023, FlashAttention-2, arXiv:2307.08691, sec. 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from groupgrad.dist import RankGroup, RingHop
from groupgrad.scoring.attention import AttentionCall
from groupgrad.scoring.block_attention import wide_products
from groupgrad.scoring.blocks import QUERY_TILE, TokenSpan
from groupgrad.scoring.recurrence import Recurrence

KEY_TILE = 512
"""Keys whose scores with a tile of queries are computed at a time."""


@dataclass(slots=True, frozen=True)
class _Tile:
    """Queries of this rank and keys of any rank whose scores are one matrix for each head."""

    queries: slice
    keys: slice
    distance: int
    """Position of the first query minus the position of the first key."""

    def hidden(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """(queries, keys) bool, True for keys that a query does not attend to; None if it attends to all."""
        num_queries, num_keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        is_before = self.distance >= num_keys - 1
        if is_before and (window is None or self.distance + num_queries <= window):
            return None
        query, key = torch.arange(num_queries, device=device)[:, None], torch.arange(num_keys, device=device)
        distance = self.distance + query - key
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


class RingLayout:
    """Attention layout of one rank's tokens (see `attention.AttentionLayout`). `attend` is a collective of the group.

    `spans[r]` holds the parts of rows and prompts on rank r of the group, which has at least one token. All parts of
    a row have its numbers of prompt and row, and those of a shared prompt the prompt's number and no row.
    """

    def __init__(self, spans: Sequence[Sequence[TokenSpan]], group: RankGroup):
        self.group = group
        self._spans = spans
        self._tiles: dict[tuple[int, int | None], list[_Tile]] = {}

    @property
    def recurrence(self) -> Recurrence:
        """Recurrent layers pass their states from token to token, so they cannot be cut over ranks."""
        raise ValueError("recurrent layers cannot run on tokens that are cut over ranks; set context_parallel_size=1")

    def num_tokens(self, rank: int) -> int:
        """Number of tokens of a rank of the group."""
        return sum(span.length for span in self._spans[rank])

    def tiles(self, rank: int, window: int | None) -> list[_Tile]:
        """The tiles of this rank's queries and the keys of `rank`, made once for all layers with the same window."""
        if (rank, window) not in self._tiles:
            queries, others = self._spans[self.group.index], self._spans[rank]
            self._tiles[rank, window] = [tile for span in queries for tile in _tiles_of(span, others, window)]
        return self._tiles[rank, window]

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, E) outputs from query (Hq, T, D), key (Hkv, T, D) and value (Hkv, T, E) of this rank's T tokens.

        Differentiable in query, key, value and the sinks. Scores and sums are at least float32.
        """
        if call.dropout:
            raise ValueError(f"attention dropout of {call.dropout} cannot be used on tokens that are cut over ranks")
        return _RingAttention.apply(query, key, value, call.sinks, self, call)  # pyright: ignore[reportReturnType]


def _tiles_of(queries: TokenSpan, keys: Sequence[TokenSpan], window: int | None) -> Iterator[_Tile]:
    """The tiles that hold all keys which the tokens of one span attend to."""
    # A row attends to itself and, unless it has the prompt's tokens too, to the shared prompt, whose row is None.
    rows = (queries.row,) if queries.shared is None else (queries.row, None)
    visible = [span for span in keys if span.prompt == queries.prompt and span.row in rows]
    for first in range(0, queries.length, QUERY_TILE):
        num_queries = min(QUERY_TILE, queries.length - first)
        start = queries.start + first
        for span in visible:
            distance = queries.position + first - span.position
            begin = 0 if window is None else max(0, distance - window + 1)
            end = min(span.length, distance + num_queries)
            if queries.shared is not None and span.row is None:
                end = min(end, queries.shared.length - span.position)
            for key in range(begin, end, KEY_TILE):
                stop = min(key + KEY_TILE, end)
                places = slice(span.start + key, span.start + stop)
                yield _Tile(slice(start, start + num_queries), places, distance - key)


class _BackwardState(NamedTuple):
    """Tensors of this rank's T queries, (Hkv, Hq / Hkv, T, ...), that each tile of the backward pass reads."""

    queries: torch.Tensor
    grads: torch.Tensor
    """Gradients of the outputs."""
    total: torch.Tensor
    """The logs of the sums of the exponentials."""
    delta: torch.Tensor
    """The products of outputs and their gradients, summed over the dimensions of a head."""
    call: AttentionCall


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        attention: RingLayout,
        call: AttentionCall,
    ) -> torch.Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        queries = _by_key_head(query * call.scale, key.shape[0])
        output = queries.new_zeros(*queries.shape[:3], value.shape[-1], dtype=exact)
        total = queries.new_full(queries.shape[:3], float("-inf"), dtype=exact)
        if sinks is not None:
            total.copy_(_of_heads(sinks, total))
        with torch.autocast(query.device.type, enabled=False):
            for rank, (keys, values) in _around(attention, [key, value]):
                for tile in attention.tiles(rank, call.window):
                    _merge(output, total, _scores(queries, keys, tile, call)[0], values[:, tile.keys], tile.queries)
        # (T, Hq, E), whose last two dimensions the model joins
        result = output.flatten(0, 1).transpose(0, 1).to(query.dtype).contiguous()
        ctx.save_for_backward(query, key, value, sinks, result, total)
        ctx.attention, ctx.call = attention, call
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, result, total = ctx.saved_tensors
        attention, call, heads, exact = ctx.attention, ctx.call, key.shape[0], total.dtype
        queries, grads, outputs = (
            _by_key_head(x, heads) for x in (query * call.scale, grad.transpose(0, 1), result.transpose(0, 1))
        )
        delta = (grads * outputs).sum(-1, dtype=exact)
        state = _BackwardState(queries, grads, total, delta, call)
        grad_query = torch.zeros_like(queries, dtype=exact)
        coming: RingHop | None = None
        with torch.autocast(query.device.type, enabled=False):
            for rank, (keys, values) in _around(attention, [key, value]):
                if coming is None:
                    grad_key, grad_value = (torch.zeros_like(x, dtype=exact) for x in (keys, values))
                else:
                    grad_key, grad_value = coming.wait()
                for tile in attention.tiles(rank, call.window):
                    # One call a tile, so that a tile's temporary tensors are freed before the next one is computed.
                    _add_gradients(state, tile, (keys, values), (grad_query, grad_key, grad_value))
                following = (rank - 1) % attention.group.size
                coming = RingHop([grad_key, grad_value], attention.num_tokens(following), attention.group, channel=1)
            assert coming is not None
            grad_key, grad_value = coming.wait()
        of_sinks = None
        if sinks is not None:
            weight = (_of_heads(sinks, total) - total).exp()
            of_sinks = -(weight * delta).sum(-1).flatten().to(sinks.dtype)
        of_query = grad_query.mul_(call.scale).flatten(0, 1).to(query.dtype)
        return of_query, grad_key.to(key.dtype), grad_value.to(value.dtype), of_sinks, None, None


def _around(attention: RingLayout, tensors: list[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields each rank's place in the group and its (H, T, ...) tensors, beginning with this rank.

    While one rank's tensors are in use, the next rank's are transferred. Collective.
    """
    rank, size = attention.group.index, attention.group.size
    tensors = [tensor.contiguous() for tensor in tensors]
    for hop in range(size):
        source = (rank - hop) % size
        coming = None
        if hop < size - 1:
            coming = RingHop(tensors, attention.num_tokens((source - 1) % size), attention.group)
        yield source, tensors
        if coming is not None:
            tensors = coming.wait()


def _by_key_head(flat: torch.Tensor, heads: int) -> torch.Tensor:
    """(Hkv, Hq / Hkv, T, D) of (Hq, T, D)."""
    return flat.unflatten(0, (heads, -1))


def _of_heads(sinks: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(Hkv, Hq / Hkv, 1) of (Hq,), in the type of `total` (Hkv, Hq / Hkv, T)."""
    return sinks.to(total.dtype).view(*total.shape[:2], 1)


def _joined(tile: torch.Tensor) -> torch.Tensor:
    """(Hkv, Hq / Hkv * T, D) of (Hkv, Hq / Hkv, T, D): one matrix for each key head."""
    return tile.flatten(1, 2)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, tile: _Tile, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(Hkv, rep, T', K') scores of a tile, capped and masked, and the slope of the cap; None without one."""
    part = queries[:, :, tile.queries]
    products = wide_products(_joined(part), keys[:, tile.keys].transpose(1, 2))
    scores = products.view(*part.shape[:3], -1).to(torch.promote_types(queries.dtype, torch.float32))
    slope = None
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_()
        slope = 1 - scores.square()
        scores.mul_(call.softcap)
    hidden = tile.hidden(call.window, queries.device)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    return scores, slope


def _add_gradients(
    state: _BackwardState,
    tile: _Tile,
    key_values: tuple[torch.Tensor, torch.Tensor],
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Adds one tile's gradients to those of the queries, keys and values, `into`."""
    queries, grads, total, delta, call = state
    keys, values = (tensor[:, tile.keys] for tensor in key_values)
    grad_query, grad_key, grad_value = into
    at, there = tile.queries, tile.keys
    scores, slope = _scores(queries, key_values[0], tile, call)
    weights = scores.sub_(total[:, :, at, None]).exp_()
    of_output = _joined(grads[:, :, at])
    grad_value[:, there] += _joined(weights).to(grads.dtype).transpose(1, 2) @ of_output
    products = wide_products(of_output, values.transpose(1, 2)).view_as(weights).to(total.dtype)
    of_scores = products.sub_(delta[:, :, at, None]).mul_(weights)
    if slope is not None:
        of_scores.mul_(slope)
    of_scores = _joined(of_scores).to(queries.dtype)
    grad_query[:, :, at] += (of_scores @ keys).view_as(grad_query[:, :, at])
    grad_key[:, there] += of_scores.transpose(1, 2) @ _joined(queries[:, :, at])


def _merge(
    output: torch.Tensor, total: torch.Tensor, scores: torch.Tensor, values: torch.Tensor, queries: slice
) -> None:
    """Adds keys with (Hkv, rep, T', K') scores and (Hkv, K', E) values to the softmax of the queries.

    `total` (Hkv, rep, T) is the log of the sum of the exponentials so far, `output` (Hkv, rep, T, E) the mean of the
    values that it weighs.
    """
    before, mean = total[:, :, queries], output[:, :, queries]
    after = torch.logaddexp(before, torch.logsumexp(scores, dim=-1))
    finite = after.masked_fill(after == float("-inf"), 0.0)  # a query that has met no visible key yet
    weights = _joined(scores.sub_(finite[..., None]).exp_())
    mean.mul_((before - finite).exp()[..., None]).add_((weights.to(values.dtype) @ values).view_as(mean))
    before.copy_(after)
