"""Recurrent layers over flat tokens: a prompt is computed once, and its final state is the initial state of its rows.

Each segment (a shared prompt, or the tokens of a row) is cut into chunks. What happens inside a chunk is computed for
all chunks at once. The states then pass from chunk to chunk, and all segments take a step together until the shortest
has ended: a row costs its own chunks, whatever the length of the others. A state carries the gradients of all rows that
begin with it back to their prompt.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from groupgrad.kernels import library
from groupgrad.kernels.recurrent import can_step, convolution_step, state_step
from groupgrad.modeling.scoring.blocks import Segment

CHUNK_SIZES = (16, 32, 64)
"""Sizes of chunks to choose from; small ones waste less on short rows, large ones take fewer steps."""

_STATE_WIDTH = 128
"""Width of a state for which the chunk size is chosen: a token of a chunk of C costs about C + this many products."""

Advance = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(number of the step, initial states of its chunks) -> (their outputs, their final states)."""


@dataclass(slots=True, frozen=True)
class _Level:
    """Segments that are computed side by side, the longest first."""

    counts: list[int]
    """Number of segments that still have a chunk, for each step."""
    parents: torch.Tensor | None
    """(n,) int64, the segment of the level before whose final state each begins with; None: all begin with zeros."""
    order: torch.Tensor
    """(n,) int64 numbers of the segments among those that have tokens."""


@dataclass(slots=True, frozen=True)
class Chunks:
    """All flat tokens in chunks, in the order in which states pass through them."""

    places: torch.Tensor
    """(N, C) int64 flat places of the chunks' tokens; T stands for padding, which is last in a chunk."""
    inverse: torch.Tensor
    """(T,) int64, the place in the flattened chunks of each token."""
    levels: tuple[_Level, ...]

    def split(self, flat: torch.Tensor) -> torch.Tensor:
        """(N, C, ...) chunks of (T, ...) values, with zeros for padding."""
        return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[self.places]

    def join(self, chunks: torch.Tensor) -> torch.Tensor:
        """(T, ...) values of (N, C, ...) chunks."""
        return chunks.flatten(0, 1)[self.inverse]

    def steps(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The chunks (N, ...) of each step of `scan`.

        They are split at once: the gradient of a slice is as large as all chunks, so the cost of the backward pass
        would grow with the square of the number of steps.
        """
        return values.split([count for level in self.levels for count in level.counts])

    def scan(
        self, initial: Callable[[torch.Tensor], torch.Tensor], advance: Advance
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, ...) outputs of `advance` over all chunks, and the final states of the last level.

        `initial` makes the states that segments, given by their numbers (n,), begin with.
        """
        outputs: list[torch.Tensor] = []
        step, final = 0, torch.empty(0)
        for level in self.levels:
            state = initial(level.order) if level.parents is None else final.index_select(0, level.parents)
            ended: list[torch.Tensor] = []
            for count in level.counts:
                if count < len(state):
                    ended.append(state[count:])
                    state = state[:count]
                output, state = advance(step, state)
                outputs.append(output)
                step += 1
            final = torch.cat([state, *reversed(ended)])
        return torch.cat(outputs), final


class Recurrence:
    """The order of flat tokens in recurrent layers: which token follows which, and where states come from."""

    def __init__(self, segments: Sequence[Segment]):
        self._segments = [segment for segment in segments if segment.length]
        self._num_tokens = sum(segment.length for segment in self._segments)
        self._chunks: dict[tuple[int, torch.device], Chunks] = {}
        self._heads: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def is_step(self) -> bool:
        """True if states of the flat tokens, one for each, can be updated in place (`states_in_place`)."""
        return False

    def begin_pass(self) -> None:
        """Called before the model computes the tokens."""

    def scan(self, chunks: Chunks, zeros: Callable[[int], torch.Tensor], advance: Advance) -> torch.Tensor:
        """(N, ...) outputs of `advance` over all chunks of a layer. `zeros` makes states of a number of segments."""
        return chunks.scan(lambda order: zeros(len(order)), advance)[0]

    def with_inputs_before(self, values: torch.Tensor, width: int) -> torch.Tensor:
        """(D, T + more) inputs of a convolution over `width` tokens: (D, T), then what `heads` names beside them."""
        return torch.cat([values, values.new_zeros(len(values), 1)], dim=1)

    def states_in_place(self) -> torch.Tensor:
        """(n, ...) float32 states of the next layer, which the caller computes and updates. For an `is_step` alone."""
        raise RuntimeError("only a pass with one token a row has states that can be updated in place")

    def chunks(self, device: torch.device, size: int | None = None) -> Chunks:
        """The tokens in chunks of `size`, by default the one that costs least; made once for all layers."""
        if max(segment.length for segment in self._segments) == 1:
            size = 1
        size = size or min(CHUNK_SIZES, key=self._cost)
        if (size, device) not in self._chunks:
            self._chunks[size, device] = self._make_chunks(size, device)
        return self._chunks[size, device]

    def _cost(self, size: int) -> int:
        return sum(-(-segment.length // size) * size * (size + _STATE_WIDTH) for segment in self._segments)

    def _make_chunks(self, size: int, device: torch.device) -> Chunks:
        first = [segment for segment in self._segments if segment.shared is None]
        behind = [segment for segment in self._segments if segment.shared is not None]
        starts: list[np.ndarray] = []
        lengths: list[np.ndarray] = []
        levels: list[_Level] = []
        rank_of_start: dict[int, int] = {}
        number = {segment.start: index for index, segment in enumerate(self._segments)}
        for level in (first, behind):
            if not level:
                continue
            ordered = sorted(level, key=lambda segment: -segment.length)
            start = np.array([segment.start for segment in ordered])
            length = np.array([segment.length for segment in ordered])
            counts = [int((length > done).sum()) for done in range(0, int(length[0]), size)]
            for step, count in enumerate(counts):
                starts.append(start[:count] + step * size)
                lengths.append(np.minimum(length[:count] - step * size, size))
            parents = [rank_of_start[s.shared.start] for s in ordered if s.shared is not None]
            order = torch.tensor([number[segment.start] for segment in ordered], device=device)
            levels.append(_Level(counts, torch.tensor(parents, device=device) if parents else None, order))
            rank_of_start = {segment.start: rank for rank, segment in enumerate(ordered)}
        offset = np.arange(size)
        begin, count = np.concatenate(starts)[:, None], np.concatenate(lengths)[:, None]
        places = np.where(offset < count, begin + offset, self._num_tokens)
        inverse = np.empty(self._num_tokens, dtype=np.int64)
        inverse[places[offset < count]] = np.flatnonzero(offset < count)
        return Chunks(
            torch.from_numpy(places.astype(np.int64)).to(device), torch.from_numpy(inverse).to(device), tuple(levels)
        )

    def heads(self, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens whose last `width` tokens are not the last `width` flat ones.

        (M,) int64 places of these tokens, and (M, width) places in `with_inputs_before` of what comes up to each in its
        row, itself last.
        """
        if (width, device) not in self._heads:
            places, windows = [], []
            for number, segment in enumerate(self._segments):
                before = self._places_before(number, segment, width - 1)
                for index in range(min(width - 1, segment.length)):
                    own = range(segment.start, segment.start + index + 1)
                    places.append(segment.start + index)
                    windows.append([*before, *own][-width:])
            self._heads[width, device] = (
                torch.tensor(places, dtype=torch.int64, device=device),
                torch.tensor(windows, dtype=torch.int64, device=device).view(-1, width),
            )
        return self._heads[width, device]

    def _places_before(self, number: int, segment: Segment, count: int) -> list[int]:
        """Places in `with_inputs_before` of the last `count` inputs before a segment in its row."""
        shared = segment.shared
        places = [] if shared is None else list(range(shared.start, shared.start + shared.length))[-count:]
        return [self._num_tokens] * (count - len(places)) + places


# Each of the following computes one kind of layer for flat tokens, with the arguments of transformers' functions.


def causal_conv1d(
    recurrence: Recurrence,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> torch.Tensor:
    """(1, D, T) depthwise convolution of (1, D, T) over the last K tokens of each row, with weights (D, K)."""
    width = weight.shape[-1]
    values = hidden_states.to(weight.dtype)
    kernels = _step_kernels(recurrence, values, weight, bias)
    if kernels is not None:
        output = convolution_step(kernels, recurrence.states_in_place(), values[0].T, weight, bias).T[None]
        return (output if activation is None else _activation(activation)(output)).to(hidden_states.dtype)
    places, windows = recurrence.heads(width, values.device)
    rows = recurrence.with_inputs_before(values[0], width)[:, windows]
    output = (rows * weight.unsqueeze(1)).sum(-1)[None]
    if bias is not None:
        output = output + bias[:, None]
    num_tokens = values.shape[-1]
    if len(places) < num_tokens:
        inside = F.conv1d(values, weight.unsqueeze(1), bias, padding=width - 1, groups=len(weight))[..., :num_tokens]
        output = inside.index_copy(2, places, output.to(inside.dtype))
    if activation is not None:
        output = _activation(activation)(output)
    return output.to(hidden_states.dtype)


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
    step = _delta_step(recurrence, query, key, value, g[..., None], beta, use_qk_l2norm_in_kernel)
    if step is not None:
        return step, None
    chunks = recurrence.chunks(query.device)
    groups = value.shape[2] // key.shape[2]
    q, k = (_chunked(chunks, x, groups) for x in _query_and_key(query, key, use_qk_l2norm_in_kernel))
    v, strength = _chunked(chunks, value), _chunked(chunks, beta[..., None])
    decay = _chunked(chunks, g[..., None]).squeeze(-1).cumsum(-1)
    between = _decay_between(decay)
    # What the tokens of a chunk write, if the state before the chunk is S: written - read @ S.
    system = ((k * strength) @ k.mT) * between
    right = torch.cat([v, k * decay.exp()[..., None]], dim=-1) * strength
    inside = (q @ k.mT) * between
    from_state = q * decay.exp()[..., None]
    to_state = (k * (decay[..., -1:] - decay).exp()[..., None]).mT
    kept = decay[..., -1].exp()[..., None, None]
    rule = _DeltaRule(system, right, inside, from_state, to_state, kept)
    return rule.output(recurrence, chunks)[None].to(query.dtype), None


def kimi_delta_rule(
    recurrence: Recurrence,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Kimi delta attention (arXiv:2510.26692, section 3): the gated delta rule with a decay for each key channel.

    Shapes as in `gated_delta_rule`, but g is (1, T, H, Dk).
    """
    step = _delta_step(recurrence, query, key, value, g, beta, use_qk_l2norm_in_kernel)
    if step is not None:
        return step, None
    chunks = recurrence.chunks(query.device, CHUNK_SIZES[0])
    q, k = (_chunked(chunks, x) for x in _query_and_key(query, key, use_qk_l2norm_in_kernel))
    v, strength = _chunked(chunks, value), _chunked(chunks, beta[..., None])
    decay = _chunked(chunks, g).cumsum(-2)
    between = _decay_between(decay.mT).movedim(-3, -1)
    decayed = k[..., None, :, :] * between
    system = ((k * strength)[..., None, :] * decayed).sum(-1)
    right = torch.cat([v, k * decay.exp()], dim=-1) * strength
    inside = (q[..., None, :] * decayed).sum(-1)
    from_state = q * decay.exp()
    to_state = (k * (decay[..., -1:, :] - decay).exp()).mT
    kept = decay[..., -1, :].exp()[..., None]
    rule = _DeltaRule(system, right, inside, from_state, to_state, kept)
    return rule.output(recurrence, chunks)[None].to(query.dtype), None


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
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).to(_state_dtype(dt))
    kernels = _step_kernels(recurrence, hidden_states, dt, B, C)
    if kernels is not None:
        decay, x = (dt * A).exp()[0, ..., None], hidden_states[0] * dt[0, ..., None]
        output = state_step(kernels, recurrence.states_in_place(), C[0], B[0], x, decay)[None]
        return output if D is None else output + hidden_states * D[:, None]
    chunks = recurrence.chunks(hidden_states.device)
    groups = hidden_states.shape[2] // B.shape[2]
    x = _chunked(chunks, hidden_states.to(dt.dtype) * dt[..., None])
    b, c = (_chunked(chunks, tensor, groups) for tensor in (B, C))
    decay = _chunked(chunks, (dt * A)[..., None]).squeeze(-1).cumsum(-1)
    inside = ((c @ b.mT) * _decay_between(decay)) @ x
    from_state = c * decay.exp()[..., None]
    added = (b * (decay[..., -1:] - decay).exp()[..., None]).mT @ x
    kept = decay[..., -1].exp()[..., None, None]
    steps = list(zip(*map(chunks.steps, (inside, from_state, kept, added))))

    def advance(step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside, from_state, kept, added = steps[step]
        return inside + from_state @ state, state * kept + added

    output = recurrence.scan(chunks, lambda n: x.new_zeros(n, x.shape[1], b.shape[-1], x.shape[-1]), advance)
    output = chunks.join(output.transpose(1, 2))[None]
    return output if D is None else output + hidden_states * D[:, None]


def mamba_scan(
    recurrence: Recurrence,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: object,
) -> torch.Tensor:
    """Mamba's selective scan (arXiv:2312.00752, algorithm 2) of flat tokens, (1, E, T), one token a step.

    The state h (E, N) becomes exp(dt A) h + dt B x, and the output is C h + D x, times silu(z). `hidden_states` x, dt
    and z are (1, E, T), A (E, N), B and C (1, N, T), D (E,).
    """
    chunks = recurrence.chunks(hidden_states.device, 1)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    width, x, b, c = (chunks.split(tensor[0].mT)[:, 0].to(_state_dtype(tensor)) for tensor in (dt, hidden_states, B, C))

    steps = list(zip(*map(chunks.steps, (width, x, b, c))))

    def advance(step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width, x, b, c = steps[step]
        state = (width[..., None] * A).exp() * state + (width * x)[..., None] * b[:, None]
        return (state @ c[..., None]).squeeze(-1), state

    output = recurrence.scan(chunks, lambda n: x.new_zeros(n, x.shape[1], b.shape[1]), advance)
    output = chunks.join(output[:, None]).mT[None]
    output = output if D is None else output + hidden_states * D[:, None]
    return output if z is None else output * F.silu(z)


@dataclass(slots=True, frozen=True)
class _DeltaRule:
    """The chunks of a delta rule, (N, H, ...), by which states (n, H, Dk, Dv) pass through them."""

    system: torch.Tensor
    """(N, H, C, C) unit lower triangular: what the tokens write, times this, is `right`."""
    right: torch.Tensor
    """(N, H, C, Dv + Dk): values to write, and keys by which the state before the chunk is read."""
    inside: torch.Tensor
    """(N, H, C, C) weights of what earlier tokens of the chunk wrote."""
    from_state: torch.Tensor
    """(N, H, C, Dk) queries to the state before the chunk."""
    to_state: torch.Tensor
    """(N, H, Dk, C) keys under which tokens write into the state behind the chunk."""
    kept: torch.Tensor
    """(N, H, 1 or Dk, 1) share of the state that a chunk keeps."""

    def output(self, recurrence: Recurrence, chunks: Chunks) -> torch.Tensor:
        """(T, H, Dv) outputs of the flat tokens."""
        solved = torch.linalg.solve_triangular(self.system, self.right, upper=False, unitriangular=True)
        key_width = self.to_state.shape[-2]
        value_width = solved.shape[-1] - key_width
        written, read = solved.split([value_width, key_width], dim=-1)
        parts = (written, read, self.inside, self.from_state, self.to_state, self.kept)
        steps = list(zip(*map(chunks.steps, parts)))

        def advance(step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            written, read, inside, from_state, to_state, kept = steps[step]
            new = written - read @ state
            return from_state @ state + inside @ new, state * kept + to_state @ new

        def zeros(num_rows: int) -> torch.Tensor:
            return solved.new_zeros(num_rows, solved.shape[1], key_width, value_width)

        output = recurrence.scan(chunks, zeros, advance)
        return chunks.join(output.transpose(1, 2))


def _step_kernels(recurrence: Recurrence, *tensors: torch.Tensor | None) -> ctypes.CDLL | None:
    """The compiled kernels if the flat tokens are one token of each row, whose states they can update in place."""
    if torch.is_grad_enabled() or not recurrence.is_step or not can_step(*tensors):
        return None
    return library()


def _delta_step(
    recurrence: Recurrence,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    norm: bool,
) -> torch.Tensor | None:
    """Outputs of a delta rule for one token of each row; None where they are computed by chunks."""
    kernels = _step_kernels(recurrence, query, key, value, decay, beta)
    if kernels is None:
        return None
    q, k = _query_and_key(query, key, norm)
    return state_step(kernels, recurrence.states_in_place(), q[0], k[0], value[0], decay[0].exp(), beta[0])[None]


@cache
def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACT2FN[name]


def _state_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunked(chunks: Chunks, tensor: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """(N, H * repeats, C, ...) chunks of (1, T, H, ...) values, in float32 at least."""
    heads = chunks.split(tensor[0].to(_state_dtype(tensor))).transpose(1, 2)
    return heads if repeats == 1 else heads.repeat_interleave(repeats, dim=1)


def _query_and_key(query: torch.Tensor, key: torch.Tensor, norm: bool) -> list[torch.Tensor]:
    """Queries, divided by the root of their width, and keys, both of length 1 before if `norm`."""
    pair = [tensor.to(_state_dtype(tensor)) for tensor in (query, key)]
    if norm:
        pair = [tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in pair]
    return [pair[0] * query.shape[-1] ** -0.5, pair[1]]


def _decay_between(decay: torch.Tensor) -> torch.Tensor:
    """(..., C, C) what is left at each token of a chunk of what each earlier one wrote; 0 for later ones.

    `decay` (..., C) is the logarithm of what is left since the chunk's beginning.
    """
    size = decay.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
