"""The computations of recurrent layers over flat tokens, each for one kind of layer.

They take the arguments of transformers' functions, and the `Recurrence` that orders the tokens. What happens inside a
chunk is computed for a block of chunks at once; then the states pass through them. On a CPU in float32 convolutions and
the gated delta rule run in the compiled kernels instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from groupgrad.kernels import delta_rule
from groupgrad.kernels.convolution import convolution
from groupgrad.kernels.cumulative_sums import cumulative_sum
from groupgrad.kernels.recurrent import convolution_step, state_step, step_kernels
from groupgrad.scoring.recurrence import Chunks, Recurrence, inputs_at


def causal_conv1d(
    recurrence: Recurrence,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    function: Callable[..., torch.Tensor] | None = None,
    **_: object,
) -> torch.Tensor:
    """(1, D, T) depthwise convolution of (1, D, T) over the last K tokens of each row, with weights (D, K).

    `function` is transformers' function, by which tokens are computed that have their whole window before them.
    """
    width = weight.shape[-1]
    values, tokens = hidden_states.to(weight.dtype), hidden_states[0].T.to(weight.dtype)
    kernels = step_kernels(values, weight, bias)
    gates = activation in ("silu", "swish")
    if _is_step(recurrence):
        states = recurrence.states_in_place()
        kernels = step_kernels(states, values, weight, bias)
        output = convolution_step(kernels, states, tokens, weight, bias, gates=gates).T[None]
    elif kernels is not None:
        before, heads = recurrence.inputs_before(values[0], width), recurrence.heads(width, values.device)
        output = convolution(kernels, tokens, before.T, heads, weight, bias, gates=gates).T[None]
    else:
        gates = False
        output = _convolved(recurrence, values, weight, bias, function)
    if activation is not None and not gates:
        output = _activation(activation)(output)
    return output.to(hidden_states.dtype)


def _convolved(
    recurrence: Recurrence,
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    function: Callable[..., torch.Tensor] | None,
) -> torch.Tensor:
    """`causal_conv1d` without the compiled kernels, and without an activation."""
    width = weight.shape[-1]
    places, windows = recurrence.heads(width, values.device)
    rows = inputs_at(values[0], recurrence.inputs_before(values[0], width), windows)
    output = (rows * weight.unsqueeze(1)).sum(-1)[None]
    if bias is not None:
        output = output + bias[:, None]
    num_tokens = values.shape[-1]
    if len(places) < num_tokens:
        if function is not None:
            inside = function(values, weight, bias, activation=None)
        else:
            inside = F.conv1d(values, weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight))
            inside = inside[..., :num_tokens]
        output = inside.index_copy(2, places, output.to(inside.dtype))
    return output


def gated_delta_rule(
    recurrence: Recurrence,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule (arXiv:2412.06464, section 3.3) of flat tokens, (1, T, Hv, Dv).

    The state S (Dk, Dv) of a head becomes a (I - b k k') S + b k v' with decay a = exp(g) and strength b; the output is
    q' S. Query and key are (1, T, Hk, Dk), where Hk divides Hv, value is (1, T, Hv, Dv), g and beta (1, T, Hv).
    """
    kernels, scale = step_kernels(query, key, value, g, beta), query.shape[-1] ** -0.5
    vectors, norm = (query[0], key[0], value[0]), use_qk_l2norm_in_kernel
    if _is_step(recurrence):
        decay, states = g[0].exp(), recurrence.states_in_place()
        output = state_step(kernels, states, vectors, decay, beta[0], scale=scale, norm=norm)
        return output[None].to(query.dtype), None
    if kernels is not None:
        initial = recurrence.initial_states(partial(zero_states, key, value))
        outputs = delta_rule.gated_delta_rule(kernels, recurrence.state_rows, vectors, g[0], beta[0], norm, initial)
        recurrence.keep_states(outputs[1])
        return outputs[0][None], None
    chunks = recurrence.chunks(query.device)
    groups = value.shape[2] // key.shape[2]

    def prepare(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, strength: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, decay = _repeated(q, groups), _repeated(k, groups), cumulative_sum(g.squeeze(-1))
        between = _decay_between(decay)
        # What the tokens of a chunk write, if the state before the chunk is S, is written - read @ S: the solution of
        # (I + the strictly lower triangle of `system`) @ solution = `right`: the values to write, the keys that read.
        system = ((k * strength) @ k.mT) * between
        right = torch.cat([v, k * decay.exp()[..., None]], dim=-1) * strength
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        written, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
        inside = (q @ k.mT) * between
        from_state = q * decay.exp()[..., None]
        to_state = (k * (decay[..., -1:] - decay).exp()[..., None]).mT
        return written, read, inside, from_state, to_state, decay[..., -1].exp()[..., None, None]

    pair = [tensor.to(_state_dtype(tensor)) for tensor in (query, key)]
    if norm:
        pair = [tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + delta_rule.EPSILON) for tensor in pair]
    inputs = (pair[0] * scale, pair[1], value, g[..., None], beta[..., None])
    steps = chunks.steps(prepare, *(_chunked(chunks, tensor) for tensor in inputs))

    def advance(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        written, read, inside, from_state, to_state, kept = next(steps)
        new = written - read @ state
        return from_state @ state + inside @ new, state * kept + to_state @ new

    output = recurrence.scan(chunks, partial(zero_states, key, value), advance)
    return chunks.join(output.transpose(1, 2))[None].to(query.dtype), None


def mamba2_scan(
    recurrence: Recurrence,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> torch.Tensor:
    """Mamba-2's state space layer (arXiv:2405.21060, section 6) of flat tokens, (1, T, H, P).

    The state S (N, P) of a head becomes exp(dt A) S + dt B x', and the output is C' S + D x. `hidden_states` x is
    (1, T, H, P), dt (1, T, H), A and D (H,), B and C (1, T, G, N), where G divides H.
    """
    dt = step_lengths(dt, dt_bias, dt_limit, softplus=dt_softplus)
    x, log_decay = hidden_states.to(dt.dtype) * dt[..., None], dt * A
    kernels = step_kernels(x, log_decay, B, C)
    if _is_step(recurrence):
        decay = log_decay.exp()[0]
        output = state_step(kernels, recurrence.states_in_place(), (C[0], B[0], x[0]), decay)[None]
    elif kernels is not None:
        initial = recurrence.initial_states(partial(zero_states, B, x))
        vectors = (C[0], B[0], x[0])
        rows, finals = delta_rule.mamba2(kernels, recurrence.state_rows, vectors, log_decay[0], initial)
        recurrence.keep_states(finals)
        output = rows[None]
    else:
        output = _mamba2_by_chunks(recurrence, x, B, C, log_decay)
    return output if D is None else output + hidden_states * D[:, None]


def step_lengths(
    dt: torch.Tensor, bias: torch.Tensor | None, limit: tuple[float, float], *, softplus: bool
) -> torch.Tensor:
    """(1, T, H) lengths of Mamba-2's steps, in float32 at least."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).clamp(*limit).to(_state_dtype(dt))


def _mamba2_by_chunks(
    recurrence: Recurrence, x: torch.Tensor, B: torch.Tensor, C: torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """`mamba2_scan` without D by PyTorch; x (1, T, H, P) are multiplied with the steps dt."""
    chunks = recurrence.chunks(x.device)
    groups = x.shape[2] // B.shape[2]
    x, b, c, g = (_chunked(chunks, tensor) for tensor in (x, B, C, log_decay[..., None]))

    def prepare(x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, c, decay = _repeated(b, groups), _repeated(c, groups), cumulative_sum(g.squeeze(-1))
        inside = ((c @ b.mT) * _decay_between(decay)) @ x
        added = (b * (decay[..., -1:] - decay).exp()[..., None]).mT @ x
        return inside, c * decay.exp()[..., None], decay[..., -1].exp()[..., None, None], added

    steps = chunks.steps(prepare, x, b, c, g)

    def advance(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside, from_state, kept, added = next(steps)
        return inside + from_state @ state, state * kept + added

    output = recurrence.scan(chunks, lambda n: x.new_zeros(n, x.shape[1], b.shape[-1], x.shape[-1]), advance)
    return chunks.join(output.transpose(1, 2))[None]


def zero_states(key: torch.Tensor, value: torch.Tensor, num_rows: int) -> torch.Tensor:
    """(n, H, Dk, Dv) states before the first token."""
    return key.new_zeros(num_rows, value.shape[2], key.shape[-1], value.shape[-1], dtype=_state_dtype(key))


def _is_step(recurrence: Recurrence) -> bool:
    """True if the flat tokens are one token of each row, whose states are updated in place."""
    return recurrence.is_step and not torch.is_grad_enabled()


@cache
def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACT2FN[name]


def _state_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunked(chunks: Chunks, tensor: torch.Tensor) -> torch.Tensor:
    """(N, H, C, ...) chunks of (1, T, H, ...) values, in float32 at least."""
    return chunks.split(tensor[0].to(_state_dtype(tensor))).transpose(1, 2)


def _repeated(heads: torch.Tensor, times: int) -> torch.Tensor:
    """Repeats each head of (N, H, ...) `times` times; returns (N, H * times, ...)."""
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _decay_between(decay: torch.Tensor) -> torch.Tensor:
    """(..., C, C) decay factors: entry (i, j) is the decay of token j's write when token i reads it, 0 for j > i.

    `decay` (..., C) is the logarithm of the decay from the chunk's beginning to each token.
    """
    size = decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
