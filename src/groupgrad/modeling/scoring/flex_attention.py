"""The shared layout's attention by torch's flex attention, which on a GPU compiles one kernel for it.

Used for half-precision tensors on CUDA; everything else takes the matrix products of `blocks.py`, and so does a device
on which the kernel cannot be compiled. Before a model's calls are made for the first time a small one like them is
tried, backward too: an error of the backward pass would come up in the middle of a training step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch

from groupgrad.modeling.scoring.attention import AttentionCall
from groupgrad.modeling.systems.oom import is_out_of_memory

logger = logging.getLogger(__name__)

_BLOCK = 128
"""Tokens on each side of a tile of the mask; tiles that nothing is seen in cost nothing."""

_NARROWEST = 16
"""Numbers that a head has at least: the GPU's matrix units take no fewer, and torch refuses them."""

_VARIANTS = 64
"""Variants of the kernel that torch may compile (its own limit is 8): by device, window, gradients, and for which of
queries, keys and values."""

_TRIED_TOKENS = 3 * _BLOCK - 1
"""Tokens of the call that is tried: several tiles, the last one in part."""


@dataclass(slots=True)
class TokenPlaces:
    """Where each flat token belongs, all (T,) int64."""

    row: torch.Tensor
    """Its row; prompts are rows too."""
    prompt: torch.Tensor
    """The row of its prompt, or its own row if it has none."""
    position: torch.Tensor
    """Its place in its row, the prompt counted."""
    _masks: dict[int | None, Any] = field(default_factory=dict)

    def to(self, device: torch.device) -> TokenPlaces:
        """The same on `device`."""
        return TokenPlaces(self.row.to(device), self.prompt.to(device), self.position.to(device))

    def sees(self, window: int | None) -> Callable[..., torch.Tensor]:
        """Which keys a query sees, as flex attention asks for it."""

        def rule(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            related = (self.row[query] == self.row[key]) | (self.prompt[query] == self.row[key])
            distance = self.position[query] - self.position[key]
            seen = related & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        return rule

    def mask(self, window: int | None) -> Any:
        """The same mask object for every layer of a pass."""
        if window not in self._masks:
            device = self.row.device
            # One variant whoever asks.
            with torch.no_grad():
                self._masks[window] = _kernels(device).make_mask(self.sees(window), self.row.shape[0], device)
        return self._masks[window]


class _State:
    """What is known of the kernel on this machine."""

    failed = False
    tried: ClassVar[set[_Kind]] = set()
    """The calls that it can make, forward and backward."""


@dataclass(slots=True, frozen=True)
class _Kind:
    """All of a call that torch compiles a kernel for; the number of tokens is not."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    key_heads: int
    width: int
    value_width: int
    scale: float
    softcap: float | None
    has_window: bool


def is_usable(query: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> bool:
    """True if flex attention is the faster way: half precision on CUDA, more than one tile, without sinks.

    Nothing can be left out of one tile, and torch compiles lengths up to it apart from all others.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    fits = query.shape[1] > _BLOCK and min(query.shape[2], value.shape[2]) >= _NARROWEST
    return query.device.type == "cuda" and half and fits and call.sinks is None and not _State.failed


def attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TokenPlaces, call: AttentionCall
) -> torch.Tensor | None:
    """(T, Hq, D) outputs for query (Hq, T, D), key and value (Hkv, T, D); None, and one warning, if it cannot run.

    Differentiable in all three.
    """
    try:
        if _kernels(query.device).differentiable:
            _try_once(query, key, value, call)
        return _attend(query, key, value, places, call)
    except Exception as error:  # whatever the compiler says: there is another way
        if is_out_of_memory(error):
            raise
        _State.failed = True
        logger.warning("flex attention cannot run here (%s: %s); matrix products do", type(error).__name__, error)
        return None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: TokenPlaces, call: AttentionCall
) -> torch.Tensor:
    softcap = call.softcap

    def capped(score: torch.Tensor, *_places: Any) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else capped
    # All three are of one type already; with autocast there would be a variant of its own.
    with torch.autocast(query.device.type, enabled=False):
        attend = _kernels(query.device).attend
        output = attend(query[None], key[None], value[None], places.mask(call.window), call.scale, score_mod)
    return output[0].transpose(0, 1)


def _try_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> None:
    """Raise what a small call like this one raises, forward or backward, the first time that one is made.

    It runs apart from the caller's graph, whose mode it does not see, and whose hooks (gradient checkpointing counts
    what is saved) do not see it.
    """
    kind = _Kind(
        device=query.device,
        dtype=query.dtype,
        heads=query.shape[0],
        key_heads=key.shape[0],
        width=query.shape[2],
        value_width=value.shape[2],
        scale=call.scale,
        softcap=call.softcap,
        has_window=call.window is not None,
    )
    if kind in _State.tried:
        return
    hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        q, k, v = (_ones_laid_like(x).requires_grad_() for x in (query, key, value))
        position = torch.arange(_TRIED_TOKENS, device=query.device)
        # Not one tensor twice, which torch would compile for.
        places = TokenPlaces(torch.zeros_like(position), torch.zeros_like(position), position)
        output = _attend(q, k, v, places, call)
        gradients = torch.autograd.grad(output, [q, k, v], torch.ones_like(output))
    # A look at the numbers waits for the device, which reports its errors late.
    if not all(bool(x.isfinite().all()) for x in (output.detach(), *gradients)):
        raise ArithmeticError("it makes numbers of equal tokens that are not finite")
    _State.tried.add(kind)


def _ones_laid_like(tensor: torch.Tensor) -> torch.Tensor:
    """(H, T, D) for the call that is tried, in memory with the heads or the tokens first as in `tensor`."""
    heads, _, width = tensor.shape
    if tensor.stride(0) < tensor.stride(1):
        return tensor.new_ones(_TRIED_TOKENS, heads, width).transpose(0, 1)
    return tensor.new_ones(heads, _TRIED_TOKENS, width)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(slots=True, frozen=True)
class _Kernels:
    """The two functions of torch's flex attention, with arguments by place."""

    attend: Callable[..., Any]
    """(1, Hq, T, D) from query, key, value, mask, scale and score_mod."""
    make_mask: Callable[..., Any]
    """The mask of a rule, a number of tokens and a device."""
    differentiable: bool


def _kernels(device: torch.device) -> _Kernels:
    return _compiled() if device.type == "cuda" else _plain()


@cache
def _plain() -> _Kernels:
    """As they are written, for the CPU: all (T, T) pairs at once, and no gradients."""
    return _functions(lambda: None, differentiable=False)


@cache
def _compiled(engine: Any = "inductor") -> _Kernels:
    """Compiled in one piece each, by torch's `engine`; they never hold the (T, T) pairs."""
    functions = _functions(_insist, differentiable=True)
    return replace(functions, attend=_fused(functions.attend, engine), make_mask=_fused(functions.make_mask, engine))


def _functions(first: Callable[[], None], *, differentiable: bool) -> _Kernels:
    # Imported when needed: it brings the compiler along, which takes a while.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attend(query: Any, key: Any, value: Any, mask: Any, scale: float, score_mod: Any) -> Any:
        first()
        return flex_attention(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            # The other kernel, for short inputs, has no configuration for many grouped heads.
            kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        )

    def make_mask(rule: Any, size: int, device: torch.device) -> Any:
        first()
        return create_block_mask(rule, None, None, size, size, device=device, BLOCK_SIZE=_BLOCK)

    return _Kernels(attend, make_mask, differentiable)


def _insist() -> None:
    """RuntimeError outside of the compiler: as it is written the function would hold all (T, T) pairs of every head."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError("torch.compile is switched off, or at its limit of variants")


def _fused(function: Callable[..., Any], engine: Any) -> Callable[..., Any]:
    """`function` compiled for any number of tokens."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=engine)

    def call(*arguments: Any) -> Any:
        config: Any = torch._dynamo.config
        limit = max(_VARIANTS, config.recompile_limit)
        # Scale and soft cap are of the model. Left variable, a soft cap is a number on the CPU, which a GPU's kernel
        # cannot read.
        with config.patch(recompile_limit=limit, specialize_float=True):
            return compiled(*arguments)

    return call
