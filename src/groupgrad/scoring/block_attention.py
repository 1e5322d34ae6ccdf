"""Attention over ragged rows that share prompts, as batched matrix products over blocks (see `blocks.py`).

The scores of all rows of a group against their prompt are one matrix product; those against their own tokens are
another. Nothing of the size of the scores is kept for the backward pass, which computes them again. On a CPU in float32
both passes run in the compiled kernels instead (attention with sinks the forward pass alone), so training and sampling
compute the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from groupgrad.kernels import library
from groupgrad.kernels.attend import attend, attend_gradient, rows_by_prompt, slot_spans, span_table
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.blocks import Block, TokenSpan, make_blocks, span_records
from groupgrad.scoring.flex_attention import TokenPlaces, attend_flex, is_usable
from groupgrad.scoring.recurrence import Recurrence


class BlockLayout:
    """Attention layout of rows that may share prompts (see `attention.AttentionLayout`).

    Runs in flex attention where that is usable, otherwise in the compiled kernels or as products over blocks.
    """

    def __init__(self, spans: Sequence[TokenSpan]):
        self._spans = spans
        self._blocks_on: dict[torch.device, list[Block]] = {}
        self._places: dict[torch.device, TokenPlaces] = {}
        self._recurrence: Recurrence | None = None
        self._records = span_records(spans)
        self.kernel_spans = span_table(self._records)
        """(n, 10) int64, the spans as the compiled kernels take them."""

    def blocks(self, device: torch.device) -> list[Block]:
        """The blocks, made when they are first needed. Layers of a model may lie on several devices."""
        if device not in self._blocks_on:
            self._blocks_on[device] = [block.to(device) for block in self._blocks]
        return self._blocks_on[device]

    @cached_property
    def _blocks(self) -> list[Block]:
        return make_blocks(self._spans)

    @cached_property
    def groups(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The spans as the compiled gradient takes them, made when they are first needed."""
        return rows_by_prompt(self._records)

    def places(self, device: torch.device) -> TokenPlaces:
        """The tokens as flex attention masks them."""
        if device not in self._places:
            self._places[device] = TokenPlaces.of(self._spans, device)
        return self._places[device]

    @property
    def recurrence(self) -> Recurrence:
        """The order of the tokens in recurrent layers, made when it is first needed."""
        if self._recurrence is None:
            self._recurrence = Recurrence(self._spans)
        return self._recurrence

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """(T, Hq, D) outputs from query (Hq, T, D), key and value (Hkv, T, D).

        Differentiable in query, key, value and the sinks. Scores and weights are float32 for inputs of any type.
        """
        if is_usable(query, key, value, call):
            output = attend_flex(query, key, value, self.places(query.device), call)
            if output is not None:
                return output
        if call.dropout:
            raise ValueError(f"attention dropout of {call.dropout} cannot be used in the shared-prompt layout")
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        return _RowAttention.apply(query, key, value, call.sinks, self, call)  # pyright: ignore[reportReturnType]


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled kernels if they support these tensors (..., D), otherwise None."""
    is_supported = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in (query, key, value))
    return library() if is_supported and key.shape[-1] == value.shape[-1] else None


def wide_products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(B, T, S) products of (B, T, D) and (B, D, S): float32 for half precision on CUDA, else in the inputs' type.

    bfloat16 would round a score between 8 and 16 by up to 0.03. Not differentiable on CUDA.
    """
    if not left.is_cuda or left.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(left, right)
    if "dtype" in torch.ops.aten.bmm.overloads():  # torch 2.8
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        attention: BlockLayout,
        call: AttentionCall,
    ) -> torch.Tensor:
        kernels, totals = kernel_for(query, key, value), None
        if kernels is not None:
            # The kernels read the tokens of each head one after the other.
            keys, values = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
            records = slot_spans(attention.kernel_spans, (keys, values), (keys, values))
            if any(ctx.needs_input_grad) and sinks is None:
                totals = query.new_empty(*query.shape[:2], 2)
            output = attend(kernels, query.transpose(0, 1), records, keys.shape[1], call, totals)
        else:
            padded = query.new_empty(len(query) + 1, query.shape[1], value.shape[-1])
            with torch.autocast(query.device.type, enabled=False):
                for block in attention.blocks(query.device):
                    keys, values = _Keys(block, key), _Keys(block, value)
                    scores = _scores(keys, _take(query, block, keys.heads, call.scale), call, is_forward=True)
                    weights, _ = _softmax(scores, keys, sinks, call)
                    _put(padded, block, values.mix(weights))
            output = padded[:-1]
        ctx.save_for_backward(query, key, value, sinks, output, totals)
        ctx.attention, ctx.call, ctx.kernels = attention, call, kernels
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, output, totals = ctx.saved_tensors
        call: AttentionCall = ctx.call
        if totals is not None:
            tensors = query, key, value, output, grad, totals
            return *attend_gradient(ctx.kernels, tensors, ctx.attention.groups, call), None, None, None
        # Gradients have one more token, which takes what padding adds; the padding of `grad` is 0.
        grad_query, grad_key, grad_value = (x.new_zeros(len(x) + 1, *x.shape[1:]) for x in (query, key, value))
        grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        grad = F.pad(grad, (0, 0, 0, 0, 0, 1))
        with torch.autocast(query.device.type, enabled=False):
            for block in ctx.attention.blocks(query.device):
                keys, values = _Keys(block, key), _Keys(block, value)
                queries = _take(query, block, keys.heads, call.scale)
                scores = _scores(keys, queries, call)
                cap_slope = None if call.softcap is None else 1 - (scores / call.softcap).square()
                weights, sink_weights = _softmax(scores, keys, sinks, call)
                grad_out = _take(grad, block, keys.heads)
                delta = (grad_out * _take(output, block, keys.heads)).sum(-1, keepdim=True, dtype=torch.float32)
                values.add_gradient(weights, grad_out, grad_value)
                grad_scores = values.products(grad_out).sub_(delta).mul_(weights)
                if grad_sinks is not None and sink_weights is not None:
                    grad_sinks -= (sink_weights * delta).sum((0, 2, 4, 5)).flatten()
                if cap_slope is not None:
                    grad_scores.mul_(cap_slope)
                keys.add_gradient(grad_scores, queries, grad_key)
                _put(grad_query, block, keys.mix(grad_scores).mul_(call.scale))
        of_sinks = None if sinks is None or grad_sinks is None else grad_sinks.to(sinks.dtype)
        return grad_query[:-1], grad_key[:-1], grad_value[:-1], of_sinks, None, None


class _Keys:
    """Keys (or values) of a block, (T, Hkv, D) gathered: those of its prompts, if any, and the rows' own.

    Queries (n, Hkv, R, rep, C', D) have R rows for each prompt and `rep` heads for each key head. Their scores are
    (n, Hkv, R, rep, C', P + K).
    """

    def __init__(self, block: Block, flat: torch.Tensor):
        self.block, (_, self.heads, width) = block, flat.shape
        self.num_prompt = 0 if block.prompts is None else block.prompts.shape[2]
        self._places = [block.rows] if block.prompts is None else [block.prompts, block.rows]
        self._parts: list[torch.Tensor] = []
        for places in self._places:
            gathered = _gather(flat, places).view(*places.shape, self.heads, width)
            self._parts.append(gathered.permute(0, 3, 1, 2, 4).reshape(-1, places.shape[2], width))

    def products(self, query: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """(n, Hkv, R, rep, C', P + K) float32 products with (n, Hkv, R, rep, C', D), summed in `dtype`."""
        dtype = dtype or query.dtype
        query, scores = query.to(dtype), []
        for part in self._parts:
            products = wide_products(query.view(len(part), -1, part.shape[2]), part.to(dtype).transpose(1, 2))
            scores.append(products.view(*query.shape[:5], -1).float())
        return scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """(n, Hkv, R, rep, C', D) sums over the keys, weighted by (n, Hkv, R, rep, C', P + K)."""
        mixed = [torch.bmm(w, part) for w, part in zip(self._split(weights), self._parts)]
        total = mixed[0].view(*weights.shape[:5], -1)
        return total if len(mixed) == 1 else total.add_(mixed[1].view(total.shape))

    def add_gradient(self, weights: torch.Tensor, query: torch.Tensor, into: torch.Tensor) -> None:
        """Adds to `into` (T + 1, Hkv, D) each key's sum over the queries, weighted as in `mix`.

        A prompt's keys and values are there once, so they get the sum over the rows of its group here.
        """
        for w, part, places in zip(self._split(weights), self._parts, self._places):
            grad = torch.bmm(w.transpose(1, 2), query.view(len(part), -1, query.shape[-1]))
            grad = grad.view(len(places), self.heads, -1, *grad.shape[1:]).permute(0, 2, 3, 1, 4)
            at = places.flatten()
            # Tokens are distinct; this is several times as fast as `index_add_`, which allows for repeated ones.
            into.index_copy_(0, at, into.index_select(0, at).add_(grad.reshape(-1, *into.shape[1:])))

    def _split(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The weights of each part, as one matrix per matrix of the part."""
        weights = weights.to(self._parts[0].dtype)
        sizes = [part.shape[1] for part in self._parts]
        return [w.reshape(len(part), -1, w.shape[-1]) for w, part in zip(weights.split(sizes, dim=-1), self._parts)]


def _scores(keys: _Keys, queries: torch.Tensor, call: AttentionCall, *, is_forward: bool = False) -> torch.Tensor:
    """(n, Hkv, R, rep, C', P + K) float32 scores, capped but not masked.

    The forward pass sums float32 products in float64 where that is cheap: on a CPU, with no more keys than a token has
    numbers in all heads. Their rounding is a large part of the error of a log-prob. Gradients do not need it.
    """
    num_keys = keys.num_prompt + keys.block.rows.shape[2]
    is_cheap = num_keys <= queries.shape[1] * queries.shape[3] * queries.shape[5]
    is_float = queries.device.type == "cpu" and queries.dtype == torch.float32
    scores = keys.products(queries, torch.float64 if is_forward and is_cheap and is_float else None)
    return scores if call.softcap is None else scores.div_(call.softcap).tanh_().mul_(call.softcap)


def _softmax(
    scores: torch.Tensor, keys: _Keys, sinks: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The softmax over the visible keys, in place of the scores, and the sinks' share of it."""
    masks = keys.block.masks(call.window)
    if masks.prompt is not None:
        scores[..., : keys.num_prompt].masked_fill_(masks.prompt, float("-inf"))
    if masks.row is not None:
        scores[..., keys.num_prompt + masks.row_from :].masked_fill_(masks.row, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1), None
    sink = sinks.float().view(1, scores.shape[1], 1, scores.shape[3], 1, 1)
    peak = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights, sink_weights = (scores - peak).exp_(), (sink - peak).exp()
    total = weights.sum(-1, keepdim=True) + sink_weights
    return weights.div_(total), sink_weights / total


def _gather(flat: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(places, H, D) of (T, H, D); padding gets the last token, which has to be masked."""
    return flat.index_select(0, places.flatten().clamp(max=len(flat) - 1))


def _take(flat: torch.Tensor, block: Block, heads: int, scale: float = 1.0) -> torch.Tensor:
    """(n, Hkv, R, rep, C', D) of the block's queries in (T, Hq, D), times `scale`."""
    taken = _gather(flat, block.queries).view(*block.queries.shape, heads, -1, flat.shape[-1])
    taken = taken.permute(0, 3, 1, 4, 2, 5)
    return torch.mul(taken, scale).contiguous() if scale != 1.0 else taken.contiguous()


def _put(into: torch.Tensor, block: Block, values: torch.Tensor) -> None:
    """Writes (n, Hkv, R, rep, C', D) to the block's queries in (T + 1, Hq, D); the last token takes the padding."""
    flat = values.permute(0, 2, 4, 1, 3, 5).reshape(-1, *into.shape[1:])
    into.index_copy_(0, block.queries.flatten(), flat.to(into.dtype))
