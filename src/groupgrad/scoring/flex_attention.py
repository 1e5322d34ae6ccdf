"""Attention over rows that share prompts by torch's flex attention, one compiled kernel on a GPU.

It runs for half-precision tensors on CUDA. Everything else takes the matrix products of `block_attention.py`, and so
does a device on which the kernel cannot be compiled. Before the first call of each kind a small call of that kind is
tried, backward pass included, because an error of the backward pass would otherwise interrupt a training step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from groupgrad.batch import to_device
from groupgrad.kernels.fallbacks import fall_back
from groupgrad.memory.oom import is_out_of_memory
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.blocks import TokenSpan

logger = logging.getLogger(__name__)

_BLOCK = 128
"""Tokens on each side of a tile of the mask; tiles that are fully masked cost nothing."""

_MIN_HEAD_DIM = 16
"""Minimum head dimension; torch refuses smaller ones, because the GPU's matrix units do not take them."""

_VARIANTS = 64
"""Maximum number of kernel variants that torch may compile (its default is 8). They differ by device, window, and
which of queries, keys and values need gradients."""

_STOP: Any = getattr(torch_checkpoint, "_StopRecomputationError", ())
"""Raised where a checkpointed layer saves the last tensor that its backward pass needs; no failure."""

_TRIED_TOKENS = 3 * _BLOCK - 1
"""Tokens of the trial call: several tiles, the last one partly filled."""


@dataclass(slots=True)
class TokenPlaces:
    """Row, prompt and positions of each flat token, all (T,) int64; a row's number is the place of its first token."""

    row: torch.Tensor
    """The token's row; a shared prompt is a row too."""
    prompt: torch.Tensor
    """The shared prompt of its row, or the row itself if it has none."""
    position: torch.Tensor
    """Position in the row, the prompt counted."""
    begin: torch.Tensor
    """Position of the row's first token: the number of tokens of the prompt that come before the row."""
    _masks: dict[int | None, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], device: torch.device) -> TokenPlaces:
        """The places of all flat tokens, in the order of their spans."""
        lengths = torch.tensor([s.length for s in spans], dtype=torch.int64)
        # Columns of one tensor would have strides, which torch compiles for.
        table = [(s.start, (s.shared or s).start, s.position - s.start, s.position) for s in spans]
        row, prompt, offset, begin = (
            torch.tensor(column, dtype=torch.int64).repeat_interleave(lengths) for column in zip(*table)
        )
        position = offset + torch.arange(len(offset))
        row, prompt, position, begin = (to_device(x, device) for x in (row, prompt, position, begin))
        return cls(row, prompt, position, begin)

    def visible(self, window: int | None) -> Callable[..., torch.Tensor]:
        """The mask function for flex attention: True where a query attends to a key."""

        def rule(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_before = (self.prompt[query] == self.row[key]) & (self.position[key] < self.begin[query])
            related = (self.row[query] == self.row[key]) | is_before
            distance = self.position[query] - self.position[key]
            is_visible = related & (distance >= 0)
            return is_visible if window is None else is_visible & (distance < window)

        return rule

    def mask(self, window: int | None) -> Any:
        """The block mask, made once for all layers with the same sliding window."""
        if window not in self._masks:
            device = self.row.device
            # Without gradients in every mode, so that torch compiles one variant only.
            with torch.no_grad():
                self._masks[window] = _kernels().make_mask(self.visible(window), self.row.shape[0], device)
        return self._masks[window]


_Kind = tuple[Any, ...]
"""Properties of a call that torch compiles a kernel for; the number of tokens is not one of them."""

_failed: set[_Kind] = set()
"""Kinds of calls that cannot run; a model may have others beside them, such as narrower heads."""
_tried: set[_Kind] = set()
"""Kinds of calls that ran forward and backward."""


def _kind_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> _Kind:
    sizes = query.shape[0], key.shape[0], query.shape[2], value.shape[2]  # heads and widths
    return query.device, query.dtype, *sizes, call.scale, call.softcap, call.window is not None


def is_usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> bool:
    """True if flex attention should run: half precision on CUDA, more than one tile, no sinks.

    A single tile has nothing to skip, and torch compiles a separate kernel for lengths up to it.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[1] > _BLOCK and min(query.shape[2], value.shape[2]) >= _MIN_HEAD_DIM
    can_run = query.device.type == "cuda" and half and fits and call.sinks is None
    return can_run and _kind_of(query, key, value, call) not in _failed


def attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TokenPlaces, call: AttentionCall
) -> torch.Tensor | None:
    """(T, Hq, D) outputs for query (Hq, T, D), key and value (Hkv, T, D), differentiable in all three.

    Returns None and warns if the kernel cannot run; calls of this kind are not usable from then on.
    """
    try:
        _try_once(query, key, value, call)
        return _attend(query, key, value, places, call)
    except _STOP:
        raise
    except Exception as error:  # the compiler may raise anything, and block attention can take over
        if is_out_of_memory(error):
            raise
        _failed.add(_kind_of(query, key, value, call))
        what = f"attention of training (heads of {query.shape[2]}) runs by matrix products, which is slower"
        fall_back(logger, what, f"flex attention cannot run here ({type(error).__name__}: {error})")
        return None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TokenPlaces, call: AttentionCall
) -> torch.Tensor:
    softcap = call.softcap

    def capped(score: torch.Tensor, *_places: Any) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else capped
    # The inputs have one type already. Autocast would only add a compiled variant.
    with torch.autocast(query.device.type, enabled=False):
        attend = _kernels().attend
        output = attend(query[None], key[None], value[None], places.mask(call.window), call.scale, score_mod)
    return output[0].transpose(0, 1)


def _try_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> None:
    """Runs a small call of the same kind, forward and backward, before the first one. Raises what that raises.

    The trial is isolated from the caller: from its gradient mode, and from its saved-tensor hooks, because gradient
    checkpointing counts the tensors that a layer saves.
    """
    kind = _kind_of(query, key, value, call)
    if kind in _tried:
        return
    hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        q, k, v = (_ones_like(x).requires_grad_() for x in (query, key, value))
        position = torch.arange(_TRIED_TOKENS, device=query.device)
        # Tensors of their own: torch would compile a variant for one tensor given twice.
        row, prompt, begin = (torch.zeros_like(position) for _ in range(3))
        places = TokenPlaces(row, prompt, position, begin)
        output = _attend(q, k, v, places, call)
        gradients = torch.autograd.grad(output, [q, k, v], torch.ones_like(output))
    # Reading the numbers waits for the device, which reports errors late.
    if not all(bool(x.isfinite().all()) for x in (output.detach(), *gradients)):
        raise ArithmeticError("it makes numbers of equal tokens that are not finite")
    _tried.add(kind)


def _ones_like(tensor: torch.Tensor) -> torch.Tensor:
    """(H, T, D) for the trial call, with heads or tokens outermost in memory as in `tensor`."""
    heads, _, width = tensor.shape
    if tensor.stride(0) < tensor.stride(1):
        return tensor.new_ones(_TRIED_TOKENS, heads, width).transpose(0, 1)
    return tensor.new_ones(heads, _TRIED_TOKENS, width)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(slots=True, frozen=True)
class _Kernels:
    """The two functions of torch's flex attention, with positional arguments."""

    attend: Callable[..., Any]
    """(1, Hq, T, D) from query, key, value, mask, scale and score_mod."""
    make_mask: Callable[..., Any]
    """The block mask of a mask function, a number of tokens and a device."""


@cache
def _kernels(backend: Any = "inductor") -> _Kernels:
    """Each function compiled by torch's `backend` as one graph, so that the (T, T) pairs are never in memory."""
    functions = _functions(_require_compiler)
    return _Kernels(_compiled(functions.attend, backend), _compiled(functions.make_mask, backend))


def _functions(check: Callable[[], None]) -> _Kernels:
    """The functions as torch offers them, after `check`. Not compiled they hold all (T, T) pairs of every head."""
    # Imported late, because it imports the compiler, which is slow.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(query: Any, key: Any, value: Any, mask: Any, scale: float, score_mod: Any) -> Any:
        check()
        return flex_attention(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            # The kernel for short inputs has no configuration for many grouped heads.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )

    def make_mask(rule: Any, size: int, device: torch.device) -> Any:
        check()
        return create_block_mask(rule, None, None, size, size, device=device, BLOCK_SIZE=_BLOCK)

    return _Kernels(attend, make_mask)


def _require_compiler() -> None:
    """Raises RuntimeError outside of the compiler, which runs functions uncompiled without saying so."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile is switched off, or at its limit of variants")


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """`function` compiled for any number of tokens."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)

    def call(*arguments: Any) -> Any:
        config: Any = torch._dynamo.config
        limit = max(_VARIANTS, config.recompile_limit)
        # Scale and soft cap are constants of the model. A variable soft cap would be a number on the CPU, which a GPU
        # kernel cannot read.
        with config.patch(recompile_limit=limit, specialize_float=True):
            return compiled(*arguments)

    return call
