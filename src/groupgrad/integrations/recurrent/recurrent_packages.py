"""Recurrent layers on a GPU by the kernels of flash-linear-attention, mamba-ssm and causal-conv1d, where installed.

transformers' functions lead to the packages' kernels, which begin with given states and return those behind the last
token. So prompts are computed first, and the rows behind a prompt begin with its state; autograd sums their gradients.
Delta rules take rows of unlike length end to end, Mamba-2's scan takes rectangles of rows of like length.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from groupgrad.integrations.recurrent import recurrent_scans
from groupgrad.integrations.recurrent.recurrent_scans import step_lengths, zero_states
from groupgrad.scoring.recurrence import PackedLevel, Recurrence, Zeros

logger = logging.getLogger(__name__)

_PACKAGES = {
    "torch_chunk_gated_delta_rule": "fla",
    "mamba2_chunk_scan": "mamba_ssm",
    "causal_conv1d_fn": "causal_conv1d",
}
"""Name of a function in transformers' model files -> the package that it leads to."""

_MODULES = {
    "fla": "fla.ops.gated_delta_rule",
    "mamba_ssm": "mamba_ssm.ops.triton.ssd_combined",
    "causal_conv1d": "causal_conv1d",
}
"""Package -> the module from which transformers takes its functions."""

Compute = Callable[[PackedLevel, Sequence[torch.Tensor], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A level, its tokens of some inputs (each (1, t, ...)), its initial states -> outputs (1, t, ...) and final states."""


def is_usable(name: str, tensor: torch.Tensor) -> bool:
    """True if transformers' function of this name leads to an installed package, for half precision on a GPU.

    In float32 the package's products are rounded to fewer digits, so PyTorch computes it.
    """
    is_half = tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)
    return is_half and name in _PACKAGES and _is_installed(_PACKAGES[name])


@cache
def _is_installed(package: str) -> bool:
    """True if the package can be imported. A build for another release of torch or Triton fails there.

    transformers' functions then compute in PyTorch, and refuse rows that lie end to end.
    """
    if importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(_MODULES[package])
    except Exception as error:  # a binary of another release may raise anything
        logger.warning("%s cannot be imported (%s: %s): PyTorch computes instead", package, type(error).__name__, error)
        return False
    return True


def by_package(function: Callable[..., Any], name: str, recurrence: Recurrence, *args: Any, **options: Any) -> Any:
    """Computes flat tokens by transformers' `function` of this name, whose arguments these are."""
    if name == "causal_conv1d_fn":
        return recurrent_scans.causal_conv1d(recurrence, *args, **options, function=function)
    return (_mamba2_scan if name == "mamba2_chunk_scan" else _delta_rule)(function, recurrence, *args, **options)


def _delta_rule(
    function: Callable[..., Any],
    recurrence: Recurrence,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """(1, T, H, Dv) outputs of a delta rule."""

    def compute(level: PackedLevel, inputs: Sequence[torch.Tensor], initial: torch.Tensor) -> tuple[Any, Any]:
        return function(
            *inputs[:3],
            g=inputs[3],
            beta=inputs[4],
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=level.bounds,
        )

    return _by_levels(recurrence, partial(zero_states, key, value), (query, key, value, g, beta), compute), None


def _mamba2_scan(
    function: Callable[..., Any],
    recurrence: Recurrence,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> torch.Tensor:
    """(1, T, H, P) outputs of Mamba-2's scan; a step of length 0, as padding has, leaves the state as it is."""

    of_levels = iter(recurrence.rectangles(hidden_states.device))

    def compute(level: PackedLevel, inputs: Sequence[torch.Tensor], initial: torch.Tensor) -> tuple[Any, Any]:
        outputs, finals, rectangles = [], [], next(of_levels)
        for part in rectangles.parts:
            x, steps, b, c = (tensor[0, part.places] for tensor in inputs)
            output, final = function(
                x,
                steps * part.is_token[..., None],
                A,
                b,
                c,
                chunk_size=chunk_size,
                initial_states=initial.index_select(0, part.spans).mT.contiguous(),
                return_final_states=True,
            )
            outputs.append(output.flatten(0, 1))
            finals.append(final.mT)
        of_tokens = torch.cat(outputs).index_select(0, rectangles.tokens)
        return of_tokens[None], torch.cat(finals).index_select(0, rectangles.order)

    steps = step_lengths(dt, dt_bias, dt_limit, softplus=dt_softplus)
    inputs = (hidden_states, steps, B, C)
    output = _by_levels(recurrence, partial(zero_states, B, hidden_states), inputs, compute)
    output = output.to(hidden_states.dtype)
    return output if D is None else output + hidden_states * D[:, None]


def _by_levels(recurrence: Recurrence, zeros: Zeros, inputs: Sequence[torch.Tensor], compute: Compute) -> torch.Tensor:
    """(1, T, ...) outputs: prompts are computed first, then the rows that begin with their states."""
    packed, given = recurrence.packed(inputs[0].device), recurrence.initial_states(zeros)
    states = zeros(1) if given is None else torch.cat([given, zeros(1)])
    outputs, finals = [], []
    for level in packed.levels:
        parts = [tensor.index_select(1, level.places) for tensor in inputs]
        output, states = compute(level, parts, states.index_select(0, level.sources))
        outputs.append(output)
        finals.append(states)
    recurrence.keep_states(torch.cat(finals).index_select(0, packed.ends))
    return torch.cat(outputs, dim=1).index_select(1, packed.inverse)
