"""Attention over ragged rows that share prompts, as plain batched matrix products; on a CPU in float32 the forward pass
is that of the kernels, which sample with it too.

The tokens lie flat, (T,). A block is a rectangle of rows that are computed together: `n` groups of `R` rows of at most
`C` tokens each, every group with at most `P` prompt tokens in front of its rows (none for the prompts themselves, which
are rows without a prompt). The scores of all R rows of a group against their prompt are one matrix product; those
against their own tokens another. Nothing of the size of the scores is kept for the backward pass, which computes them
again.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.kernels import library
from groupgrad.kernels.attend import attend, flat_spans
from groupgrad.modeling.scoring.attention import AttentionCall

QUERY_TILE = 256
"""Queries of a long row that are computed at a time; keys after them are then skipped."""


@dataclass(slots=True)
class Block:
    """Rows that are computed together. Places that pad the rectangle point at token 0 and are masked."""

    rows: torch.Tensor
    """(n, R, C) int64, the flat places of the rows' tokens."""
    row_lengths: torch.Tensor
    """(n, R) int64."""
    prompts: torch.Tensor | None
    """(n, P) int64, the flat places of the groups' prompt tokens; None without prompts."""
    prompt_lengths: torch.Tensor
    """(n,) int64, 0 without prompts."""
    start: int = 0
    """First of the C tokens that are queries here; those before it are keys only (query tiles of long rows)."""
    is_full: bool = True
    """No place pads the rows."""
    prompts_are_full: bool = True
    """No place pads the prompts."""
    _masks: dict[int | None, _Masks] = field(default_factory=dict)
    _places: _Places | None = None

    def to(self, device: torch.device) -> Block:
        """The same block with its tensors on `device`."""
        return Block(
            self.rows.to(device),
            self.row_lengths.to(device),
            None if self.prompts is None else self.prompts.to(device),
            self.prompt_lengths.to(device),
            self.start,
            self.is_full,
            self.prompts_are_full,
        )

    @property
    def num_queries(self) -> int:
        """Queries of each row, padding included."""
        return self.rows.shape[2] - self.start

    def _valid_queries(self) -> torch.Tensor:
        """(n, R, num_queries) bool, False where the row has ended."""
        place = torch.arange(self.start, self.rows.shape[2], device=self.rows.device)
        return place < self.row_lengths[..., None]

    def masks_for(self, window: int | None) -> _Masks:
        """What each query must not see; the same object for every layer of a pass."""
        if window not in self._masks:
            self._masks[window] = _make_masks(self, window)
        return self._masks[window]

    @property
    def places(self) -> _Places:
        """Where the block's queries, keys and prompts lie; the same object for every layer of a pass."""
        if self._places is None:
            queries = self.rows[:, :, self.start :].flatten()
            within = None if self.is_full else self._valid_queries().flatten().nonzero().squeeze(1)
            keys, prompts = self.rows.flatten(), None if self.prompts is None else self.prompts.flatten()
            place = torch.arange(self.rows.shape[2], device=self.rows.device)
            valid_keys = None if self.is_full else (place < self.row_lengths[..., None]).flatten()
            valid_prompts = None
            if self.prompts is not None and not self.prompts_are_full:
                place = torch.arange(self.prompts.shape[1], device=self.rows.device)
                valid_prompts = (place < self.prompt_lengths[:, None]).flatten()
            self._places = _Places(
                queries=queries,
                keys=keys,
                prompts=prompts,
                to_keys=_Target.of(keys, valid_keys),
                to_prompts=None if prompts is None else _Target.of(prompts, valid_prompts),
                valid_queries=queries if within is None else queries[within],
                valid_within=within,
            )
        return self._places


@dataclass(slots=True)
class _Places:
    """Flat places of a block's tokens."""

    queries: torch.Tensor
    """(n * R * C',)."""
    keys: torch.Tensor
    """(n * R * K,)."""
    prompts: torch.Tensor | None
    """(n * P,)."""
    to_keys: _Target
    to_prompts: _Target | None
    valid_queries: torch.Tensor
    """Those of `queries` that pad nothing."""
    valid_within: torch.Tensor | None
    """Where they are in `queries`; None if all are valid."""


@dataclass(slots=True)
class _Target:
    """Flat places that something is added to; those that pad a rectangle get nothing."""

    places: torch.Tensor
    within: torch.Tensor | None
    """Which of a rectangle's places these are; None: all."""
    is_distinct: bool
    """None of the places is there twice."""

    @classmethod
    def of(cls, places: torch.Tensor, valid: torch.Tensor | None) -> _Target:
        """Of a rectangle's places (m,), some of which are valid, or all."""
        within = None if valid is None else valid.nonzero().squeeze(1)
        places = places if within is None else places[within]
        return cls(places, within, places.unique().numel() == places.numel())

    def add(self, into: torch.Tensor, values: torch.Tensor) -> None:
        """Add the values (m, ...) of a rectangle's places to those of `into` (T, ...)."""
        values = values if self.within is None else values.index_select(0, self.within)
        if self.is_distinct:
            # Several times as fast as sums that have to reckon with the same place.
            into.index_copy_(0, self.places, into.index_select(0, self.places).add_(values))
        else:
            into.index_add_(0, self.places, values)


@dataclass(slots=True)
class _Masks:
    """True: hidden. None: everything is seen."""

    prompt: torch.Tensor | None
    """(n, 1, 1, 1, C' or 1, P)."""
    own: torch.Tensor | None
    """(1, 1, 1, 1, C', K'), over the keys from `own_from` on; those before it are all seen."""
    own_from: int


def _make_masks(block: Block, window: int | None) -> _Masks:
    device, num_keys = block.rows.device, block.rows.shape[2]
    query = torch.arange(block.start, num_keys, device=device)[:, None]
    longest = num_keys + int(block.prompt_lengths.max()) if block.prompt_lengths.numel() else num_keys
    limit = longest if window is None else window
    windowed = longest > limit
    prompt = None
    if block.prompts is not None:
        key = torch.arange(block.prompts.shape[1], device=device)
        if not block.prompts_are_full:
            prompt = (key >= block.prompt_lengths[:, None])[:, None, None, None, None, :]
        if windowed:
            distance = block.prompt_lengths[:, None, None] + query - key
            far = (distance >= limit)[:, None, None, None]
            prompt = far if prompt is None else far | prompt
    own_from = 0 if windowed else block.start
    key = torch.arange(own_from, num_keys, device=device)
    own = key > query
    if windowed:
        own = own | (query - key >= limit)
    own_mask = own[None, None, None, None] if own.shape[0] > 1 or windowed else None
    return _Masks(prompt, own_mask, own_from)


def attend_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: list[Block],
    call: AttentionCall,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """(T, Hq, D) outputs for query (Hq, T, D), key and value (Hkv, T, D); every token is a query of one block.

    Differentiable in query, key, value and the sinks. Scores and weights are float32 whatever the inputs are. `rows`
    (n, 4) are the same rows as `kernels.attend.flat_spans` wants them: outputs are then computed by the kernels, if
    these can, as they are when tokens are sampled.
    """
    if call.dropout:
        raise ValueError(f"attention dropout of {call.dropout} cannot be used in the shared-prompt layout")
    arguments = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), call.sinks)
    return _BlockAttention.apply(*arguments, blocks, rows, call)  # pyright: ignore[reportReturnType]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        blocks: list[Block],
        rows: torch.Tensor | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        output = None if rows is None else _compiled_output(query, key, value, rows, call)
        if output is None:
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            with torch.autocast(query.device.type, enabled=False):
                for block in blocks:
                    weights, _ = _weights(_scores(block, query, key, call, finely=True), block, sinks, call)
                    _put(output, block, _Keys(block, value).mix(weights))
        ctx.save_for_backward(query, key, value, sinks, output)
        ctx.blocks, ctx.call = blocks, call
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, output = ctx.saved_tensors
        grad_query = torch.empty_like(output)
        grads = _Gradients(
            grad_query,
            torch.zeros(key.shape, dtype=key.dtype, device=key.device),
            torch.zeros(value.shape, dtype=value.dtype, device=value.device),
            None if sinks is None else torch.zeros(sinks.shape, dtype=torch.float32, device=sinks.device),
        )
        with torch.autocast(query.device.type, enabled=False):
            for block in ctx.blocks:
                _backward_block(block, ctx.call, (query, key, value, sinks), (output, grad), grads)
        grad_sinks = None if sinks is None or grads.sinks is None else grads.sinks.to(sinks.dtype)
        return grads.query, grads.key, grads.value, grad_sinks, None, None, None


def _compiled_output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, call: AttentionCall
) -> torch.Tensor | None:
    """(T, Hq, D) outputs by the kernels, from tensors (T, H, D); None if these cannot."""
    kernels = kernel_for(query, key, value)
    if kernels is None:
        return None
    key, value = (x.transpose(0, 1).contiguous() for x in (key, value))
    spans = flat_spans(rows, key, value)
    return attend(kernels, query.transpose(0, 1), spans, len(key), call)


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, if they know such tensors (..., D)."""
    is_known = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (query, key, value))
    return library() if is_known and key.shape[-1] == value.shape[-1] else None


@dataclass(slots=True)
class _Gradients:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def _backward_block(
    block: Block,
    call: AttentionCall,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    outputs: tuple[torch.Tensor, torch.Tensor],
    grads: _Gradients,
) -> None:
    """Add one block's part to the gradients; `outputs` are the attention's output and the gradient of it."""
    query, key, value, sinks = inputs
    heads = key.shape[1]
    scores = _scores(block, query, key, call)
    slope = None if call.softcap is None else 1 - (scores.scores / call.softcap).square()
    weights, sink_weights = _weights(scores, block, sinks, call)
    grad_out = _take(outputs[1], block, heads)
    if block.places.valid_within is not None:
        grad_out = _zero_padding(grad_out, block)
    delta = (grad_out * _take(outputs[0], block, heads)).sum(-1, keepdim=True, dtype=torch.float32)
    values = _Keys(block, value)
    values.add_gradient(weights, grad_out, grads.value)
    grad_scores = values.products(grad_out)
    grad_scores.sub_(delta).mul_(weights)
    if grads.sinks is not None and sink_weights is not None:
        grads.sinks -= (sink_weights * delta).sum((0, 2, 4, 5)).flatten()
    if slope is not None:
        grad_scores.mul_(slope)
    scores.keys.add_gradient(grad_scores, scores.query, grads.key)
    _put(grads.query, block, scores.keys.mix(grad_scores).mul_(call.scale))


@dataclass(slots=True)
class _Scores:
    query: torch.Tensor
    """(n, Hkv, R, rep, C', D), scaled."""
    keys: _Keys
    scores: torch.Tensor
    """(n, Hkv, R, rep, C', P + K) float32, capped but not masked."""


def _scores(
    block: Block, query: torch.Tensor, key: torch.Tensor, call: AttentionCall, *, finely: bool = False
) -> _Scores:
    """`finely` sums float32 products in float64 where that costs little, on CPUs and behind few keys: what these scores
    are off by is as large a part of what a log-prob is off by as any. Gradients do not need it."""
    keys = _Keys(block, key)
    scaled = _take(query, block, key.shape[1], call.scale)
    # With no more keys than a token has numbers, scores are a small part of the products of a layer.
    is_cheap = block.rows.shape[2] + keys.num_prompt <= query.shape[1] * query.shape[2]
    is_float = key.device.type == "cpu" and key.dtype == torch.float32
    scores = keys.products(scaled, finely=finely and is_cheap and is_float)
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    return _Scores(scaled, keys, scores)


def _weights(
    scores: _Scores, block: Block, sinks: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax over what each query sees, made in place of the scores, and the sinks' share of it."""
    values, masks = scores.scores, block.masks_for(call.window)
    num_prompt = scores.keys.num_prompt
    if masks.prompt is not None:
        values[..., :num_prompt].masked_fill_(masks.prompt, float("-inf"))
    if masks.own is not None:
        values[..., num_prompt + masks.own_from :].masked_fill_(masks.own, float("-inf"))
    if sinks is None:
        return torch.softmax(values, dim=-1), None
    sink = sinks.float().view(1, values.shape[1], 1, values.shape[3], 1, 1)
    peak = torch.maximum(values.amax(-1, keepdim=True), sink)
    weights, sink_weights = (values - peak).exp_(), (sink - peak).exp()
    total = weights.sum(-1, keepdim=True) + sink_weights
    return weights.div_(total), sink_weights / total


class _Keys:
    """The keys (or values) that a block looks at, (T, Hkv, D) gathered: the prompts' and the rows' own."""

    def __init__(self, block: Block, flat: torch.Tensor):
        self._places = block.places
        n, num_rows, num_keys = block.rows.shape
        heads, width = flat.shape[1:]
        self._shape = (n, heads, num_rows)
        own = _select(flat, self._places.keys).view(n, num_rows, num_keys, heads, width)
        self._own = own.permute(0, 3, 1, 2, 4).reshape(n * heads * num_rows, num_keys, width)
        self._prompt: torch.Tensor | None = None
        self.num_prompt = 0
        if self._places.prompts is not None:
            self.num_prompt = self._places.prompts.shape[0] // n
            prompt = _select(flat, self._places.prompts).view(n, self.num_prompt, heads, width)
            self._prompt = prompt.transpose(1, 2).reshape(n * heads, self.num_prompt, width)

    def products(self, query: torch.Tensor, *, finely: bool = False) -> torch.Tensor:
        """(n, Hkv, R, rep, C', P + K) float32 products with (n, Hkv, R, rep, C', D), summed in float64 if `finely`."""
        query = query.double() if finely else query
        own = torch.bmm(query.flatten(3, 4).flatten(0, 2), self._own.to(query.dtype).transpose(1, 2))
        own = own.view(*query.shape[:5], -1).float()
        if self._prompt is None:
            return own
        prompt = torch.bmm(query.flatten(2, 4).flatten(0, 1), self._prompt.to(query.dtype).transpose(1, 2))
        return torch.cat([prompt.view(*query.shape[:5], -1).float(), own], dim=-1)

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """(n, Hkv, R, rep, C', D) sums over the keys, weighted by (n, Hkv, R, rep, C', P + K)."""
        weights = weights.to(self._own.dtype)
        own = weights[..., self.num_prompt :].flatten(3, 4).flatten(0, 2)
        mixed = torch.bmm(own, self._own).view(*weights.shape[:5], -1)
        if self._prompt is None:
            return mixed
        prompt = weights[..., : self.num_prompt].flatten(2, 4).flatten(0, 1)
        return mixed.add_(torch.bmm(prompt, self._prompt).view(mixed.shape))

    def add_gradient(self, weights: torch.Tensor, query: torch.Tensor, into: torch.Tensor) -> None:
        """Add to `into` (T, Hkv, D) each key's sum over the queries (n, Hkv, R, rep, C', D), weighted as in `mix`."""
        n, heads, num_rows = self._shape
        weights = weights.to(query.dtype)
        own = weights[..., self.num_prompt :].flatten(3, 4).flatten(0, 2)
        grad = torch.bmm(own.transpose(1, 2), query.flatten(3, 4).flatten(0, 2))
        grad = grad.view(n, heads, num_rows, -1, query.shape[-1]).permute(0, 2, 3, 1, 4)
        self._places.to_keys.add(into, grad.reshape(-1, heads, query.shape[-1]))
        if self._prompt is not None and self._places.to_prompts is not None:
            prompt = weights[..., : self.num_prompt].flatten(2, 4).flatten(0, 1)
            grad = torch.bmm(prompt.transpose(1, 2), query.flatten(2, 4).flatten(0, 1))
            grad = grad.view(n, heads, -1, query.shape[-1]).transpose(1, 2)
            self._places.to_prompts.add(into, grad.reshape(-1, heads, query.shape[-1]))


def _select(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return flat.index_select(0, places)


def _take(flat: torch.Tensor, block: Block, heads: int, scale: float = 1.0) -> torch.Tensor:
    """(n, Hkv, R, rep, C', D) of the block's queries in (T, Hq, D), times `scale`."""
    n, num_rows, _ = block.rows.shape
    taken = _select(flat, block.places.queries)
    taken = taken.view(n, num_rows, block.num_queries, heads, -1, flat.shape[-1]).permute(0, 3, 1, 4, 2, 5)
    return torch.mul(taken, scale).contiguous() if scale != 1.0 else taken.contiguous()


def _zero_padding(taken: torch.Tensor, block: Block) -> torch.Tensor:
    place = torch.arange(block.start, block.rows.shape[2], device=taken.device)
    padding = place >= block.row_lengths[..., None]  # (n, R, C')
    return taken.masked_fill_(padding[:, None, :, None, :, None], 0.0)


def _put(into: torch.Tensor, block: Block, values: torch.Tensor) -> None:
    """Write (n, Hkv, R, rep, C', D) to the block's queries in (T, Hq, D)."""
    places = block.places
    flat = values.permute(0, 2, 4, 1, 3, 5).reshape(-1, *into.shape[1:]).to(into.dtype)
    if places.valid_within is not None:
        flat = flat.index_select(0, places.valid_within)
    into.index_copy_(0, places.valid_queries, flat)
