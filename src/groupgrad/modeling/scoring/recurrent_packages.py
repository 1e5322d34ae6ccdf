"""Delta rules on a GPU by the kernels of flash-linear-attention, where that is installed.

transformers' functions lead to the package's kernels, which take rows of unlike length end to end, with the states that
they begin with, and return the states behind them. So prompts are computed first, and the rows behind a prompt begin
with its state; autograd sums their gradients.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from groupgrad.modeling.scoring.recurrence import Recurrence
from groupgrad.modeling.scoring.recurrent_scans import zero_states

_PACKAGES = {"torch_chunk_gated_delta_rule": "fla", "chunk_kimi_delta_attention": "fla"}
"""Name of a function in transformers' model files -> the package that it leads to."""


def is_usable(name: str, tensor: torch.Tensor) -> bool:
    """True if transformers' function of this name leads to an installed package, for half precision on a GPU.

    In float32 the package's products are rounded to fewer digits, so PyTorch computes it.
    """
    is_half = tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)
    return is_half and name in _PACKAGES and _is_installed(_PACKAGES[name])


@cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def by_package(
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
    """(1, T, H, Dv) outputs of transformers' `function` for flat tokens, whose shapes are those of its arguments."""
    packed, zeros = recurrence.packed(value.device), partial(zero_states, key, value)
    given = recurrence.initial_states(zeros)
    states = zeros(1) if given is None else torch.cat([given, zeros(1)])
    outputs, finals = [], []
    for level in packed.levels:
        parts = [tensor.index_select(1, level.places) for tensor in (query, key, value, g, beta)]
        output, states = function(
            *parts[:3],
            g=parts[3],
            beta=parts[4],
            initial_state=states.index_select(0, level.sources),
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=level.bounds,
        )
        outputs.append(output)
        finals.append(states)
    recurrence.keep_states(torch.cat(finals).index_select(0, packed.ends))
    return torch.cat(outputs, dim=1).index_select(1, packed.inverse), None
