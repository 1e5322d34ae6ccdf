"""Runs the compiled decode step: fills the structures of `decode.cpp` with addresses of weights, keys and values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupgrad.engines.native.attention_layouts import DecodeBatch
from groupgrad.engines.native.decoder_layers import (
    DELTA_LINEARS,
    LINEARS,
    NORMS,
    Decoder,
    LayerModules,
    is_norm,
    norm_epsilon,
    norm_weight,
    recurrent_kind,
    recurrent_sizes,
    rotary_width,
)
from groupgrad.engines.native.kv_cache import KVCache
from groupgrad.kernels.choose import bits_factor
from groupgrad.kernels.compile import library
from groupgrad.kernels.delta_rule import EPSILON
from groupgrad.models.families import POSITION_ONLY_ROPE_TYPES
from groupgrad.scoring.fused_modules import is_replaced, is_silu, is_squared_relu

_Pointer, _Number = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = (("weight", _Pointer), ("bias", _Pointer))


class _Recurrent(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in DELTA_LINEARS),
        *(
            (name, _Pointer)
            for name in ("convolution", "convolution_bias", "decay_rates", "decay_bias", "skips", "norm")
        ),
        *((name, _Pointer) for name in ("last_inputs", "states")),
        ("norm_groups", _Number),
        *((name, ctypes.c_float) for name in ("shortest", "longest")),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("inputs", "output")),
        *((name, _Pointer) for name in ("convolution", "convolution_bias", "last_inputs")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in (*NORMS, "recurrent", "convolution")),
        *((name, _Linear) for name in LINEARS),
        *((name, _Pointer) for name in ("suffix_keys", "suffix_values", "prompt_keys", "prompt_values")),
        ("window", _Number),
        ("scale", ctypes.c_float),
    )


_SIZES = ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_width", "vocabulary")
_ATTENTION_SIZES = ("rotary_width", "query_stride")
_RECURRENT_SIZES = ("value_heads", "key_heads", "key_width", "value_width", "taps", "convolved")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Number) for name in (*_SIZES, *_ATTENTION_SIZES, *_RECURRENT_SIZES, "is_half")),
        *((name, _Pointer) for name in ("layers", "embedding", "norm")),
        ("head", _Linear),
        *((name, _Pointer) for name in ("cosines", "sines")),
        *((name, ctypes.c_float) for name in ("epsilon", "length_epsilon")),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _Number) for name in ("count", "suffix_places", "prompt_places", "num_chunks")),
        *((name, _Pointer) for name in ("groups", "prompt_lengths", "order", "chunks")),
    )


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("draws", "logprobs", "entropies")),
        ("longest", _Number),
        *((name, _Pointer) for name in ("requests", "counts", "ends")),
        ("num_ends", _Number),
        ("idle", _Number),
        ("factor", ctypes.c_float),
    )


@dataclass(slots=True, frozen=True)
class UnfilteredSampling:
    """State of sampling from the plain softmax, where a uniform draw decides each token."""

    draws: torch.Tensor
    """(requests, longest) float64 in [0, 1)."""
    logprobs: torch.Tensor
    """(requests, longest) float32, to be filled in."""
    entropies: torch.Tensor
    temperature: float
    requests: torch.Tensor
    """(n,) table row of each batch row."""
    counts: torch.Tensor
    """(n,) tokens that the row has so far."""
    ends: torch.Tensor
    """Tokens that end a row."""
    idle: int = 0
    """Maximum number of tokens to compute after the ends of rows."""


class CompiledModel:
    """Addresses of a decoder's weights. Made for each session, because parameters may be replaced in between."""

    def __init__(self, kernels: ctypes.CDLL, decoder: Decoder):
        self.kernels, self._rotary = kernels, decoder.rotary
        layers, self._embedding = decoder.layers, decoder.embedding.weight
        self._keep: list[Any] = [p.detach() for p in decoder.parameters]
        """The objects that the addresses point into."""
        self._recurrent: list[_Recurrent | _Convolution] = []
        self._layers = (_Layer * len(layers))(*map(self._read_layer, layers))
        self._attention = [(to, layer.call.layer) for to, layer in zip(self._layers, layers) if layer.call is not None]
        attention = next(layer for layer in layers if layer.call is not None)
        head_dim, modules = attention.head_dim, attention.modules
        self.structure = _Model(
            num_layers=len(layers),
            hidden=self._embedding.shape[1],
            inner=next((layer.modules["up"].out_features for layer in layers if layer.modules["up"] is not None), 0),
            heads=modules["output"].in_features // head_dim,
            kv_heads=modules["key"].out_features // head_dim,
            head_width=head_dim,
            vocabulary=decoder.head.out_features,
            rotary_width=rotary_width(decoder.rotary),
            query_stride=modules["query"].out_features // (modules["output"].in_features // head_dim),
            layers=ctypes.addressof(self._layers),
            embedding=self._embedding.data_ptr(),
            norm=self._read_norm(decoder.norm),
            is_half=self._embedding.dtype == torch.bfloat16,
            head=self._read_linear(decoder.head),
            epsilon=norm_epsilon(decoder.norm),
            length_epsilon=EPSILON,
            **next((recurrent_sizes(layer.recurrent) for layer in layers if layer.recurrent is not None), {}),
        )
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cache_version = (-1, -1)
        self._logits = torch.empty(0, decoder.head.out_features)

    def _address(self, tensor: torch.Tensor) -> int:
        """The address of a tensor, which is kept as long as the model."""
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _read_norm(self, norm: Any) -> int:
        return self._address(norm_weight(norm).float())

    def _read_linear(self, module: nn.Linear) -> _Linear:
        bias = None if module.bias is None else self._address(module.bias.detach().float())
        return _Linear(module.weight.data_ptr(), bias)

    def _read_layer(self, layer: LayerModules) -> _Layer:
        modules, call = layer.modules, layer.call
        linears = [name for name in LINEARS if modules[name] is not None]
        structure = _Layer(
            **{name: self._read_norm(modules[name]) for name in NORMS if modules[name] is not None},
            **{name: self._read_linear(modules[name]) for name in linears},
        )
        if call is not None:
            structure.window, structure.scale = call.window or 0, call.scale
        if layer.recurrent is not None:
            recurrent = self._read_recurrent(layer.recurrent)
            self._recurrent.append(recurrent)
            name = "recurrent" if isinstance(recurrent, _Recurrent) else "convolution"
            setattr(structure, name, ctypes.addressof(recurrent))
        return structure

    def _read_recurrent(self, module: Any) -> _Recurrent | _Convolution:
        kind = recurrent_kind(module)
        if kind == "convolution":
            linears = {"inputs": self._read_linear(module.in_proj), "output": self._read_linear(module.out_proj)}
            return _Convolution(**linears, **_read_convolution(module.conv))
        return _Recurrent(
            **_read_mamba(module) if kind == "mamba" else _read_delta(module),
            **_read_convolution(module.conv1d),
            decay_rates=self._address(-module.A_log.detach().exp()),
            decay_bias=module.dt_bias.data_ptr(),
            norm=module.norm.weight.data_ptr(),
        )

    def bind(self, cache: KVCache) -> None:
        """Notes the addresses of the cache's tensors, and computes rotary angles for all positions it has room for.

        The convolution of a recurrent layer comes before its recurrence, so its state does too.
        """
        if cache.version == self._cache_version:
            return
        self._cache_version = cache.version
        suffixes, prompts = cache.suffixes, cache.prompts
        for layer, number in self._attention:
            layer.suffix_keys, layer.suffix_values = (x.data_ptr() for x in suffixes.tensors[number])
            layer.prompt_keys, layer.prompt_values = (x.data_ptr() for x in prompts.tensors[number])
        states = (state.data_ptr() for state in suffixes.states)
        for recurrent in self._recurrent:
            recurrent.last_inputs = next(states)
            if isinstance(recurrent, _Recurrent):
                recurrent.states = next(states)
        limit = suffixes.slot_size + prompts.slot_size
        if self._rotary is not None and (self._tables is None or len(self._tables[0]) < limit):
            positions = torch.arange(1 << (limit - 1).bit_length())[None]
            cosines, sines = self._rotary(self._embedding[None, :1].float(), positions)
            self._tables = cosines[0].contiguous(), sines[0].contiguous()
            self.structure.cosines, self.structure.sines = (table.data_ptr() for table in self._tables)

    def logits_of(self, num_rows: int) -> torch.Tensor:
        """(num_rows, V) memory that all steps share."""
        if len(self._logits) < num_rows:
            self._logits = self._logits.new_empty(num_rows, self.structure.vocabulary)
        return self._logits[:num_rows]


class CompiledStep:
    """The compiled decode step of one batch; its rows keep their slots."""

    def __init__(self, model: CompiledModel, cache: KVCache, batch: DecodeBatch):
        self._model, self._cache, self._batch = model, cache, batch
        self._arrays: list[torch.Tensor] = []
        self._rows: _Rows | None = None
        self._cache_version = (-1, -1)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits behind `tokens` (n,) at `positions` (n,), whose keys and values are stored.

        The next step overwrites them.
        """
        model, rows = self._model, self._bound_rows()
        tokens, positions, logits = tokens.contiguous(), positions.contiguous(), model.logits_of(rows.count)
        failed = model.kernels.groupgrad_decode(
            ctypes.addressof(model.structure),
            ctypes.addressof(rows),
            tokens.data_ptr(),
            positions.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise _out_of_memory(rows)
        return logits

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, state: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor:
        """(steps, n) tokens of up to `num_steps` steps, fewer where rows end.

        Sampling stops before the step that would exceed `state.idle` tokens computed after the ends of rows.
        """
        model, rows = self._model, self._bound_rows()
        tokens, positions = tokens.contiguous(), positions.contiguous()
        sampled = torch.empty(num_steps, rows.count, dtype=torch.int64)
        names = ("draws", "logprobs", "entropies", "requests", "counts", "ends")
        sampling = _Sampling(
            longest=state.draws.shape[1],
            num_ends=len(state.ends),
            idle=state.idle,
            factor=bits_factor(state.temperature),
            **{name: getattr(state, name).data_ptr() for name in names},
        )
        num_done = model.kernels.groupgrad_sample(
            ctypes.addressof(model.structure),
            ctypes.addressof(rows),
            ctypes.addressof(sampling),
            rows.count,
            model.structure.vocabulary,
            tokens.data_ptr(),
            positions.data_ptr(),
            model.logits_of(rows.count).data_ptr(),
            num_steps,
            sampled.data_ptr(),
            torch.get_num_threads(),
        )
        if num_done < 0:
            raise _out_of_memory(rows)
        return sampled[:num_done]

    def _bound_rows(self) -> _Rows:
        """The structure of the batch's rows, in a cache whose addresses the model has."""
        if self._rows is None or self._cache.version != self._cache_version:
            self._rows, self._cache_version = self._make_rows(), self._cache.version
        self._model.bind(self._cache)
        return self._rows

    def _make_rows(self) -> _Rows:
        structure, batch = self._model.structure, self._batch
        chunk_rows = self._model.kernels.groupgrad_chunk_rows(structure.heads // structure.kv_heads)
        order = sorted(range(len(batch.groups)), key=batch.groups.__getitem__)
        chunks = [0]
        for at in range(1, len(order)):
            is_same = batch.groups[order[at]] == batch.groups[order[at - 1]]
            if not is_same or at - chunks[-1] == chunk_rows:
                chunks.append(at)
        chunks.append(len(order))
        arrays = batch.groups, batch.prompt_lengths, order, chunks
        self._arrays = [torch.tensor(array, dtype=torch.int64) for array in arrays]
        slot_sizes = self._cache.suffixes.slot_size, self._cache.prompts.slot_size
        return _Rows(len(order), *slot_sizes, len(chunks) - 1, *(array.data_ptr() for array in self._arrays))


def _out_of_memory(rows: _Rows) -> MemoryError:
    return MemoryError(f"no memory is left for a decode step of {rows.count} rows; lower engine_kv_memory")


def compiled_model(decoder: Decoder) -> CompiledModel | None:
    """The compiled form of a known decoder (see `families`); None if it has none here.

    Adapters, hooks and other activations than the kernel's have to be called, so every layer must compute what its
    class does.
    """
    kernels = library() if _is_supported(decoder) else None
    return None if kernels is None else CompiledModel(kernels, decoder)


def _is_supported(decoder: Decoder) -> bool:
    layers, rotary = decoder.layers, decoder.rotary
    if type(decoder.embedding) is not nn.Embedding or decoder.embedding.max_norm is not None:
        return False
    if rotary is not None and getattr(rotary, "rope_type", None) not in POSITION_ONLY_ROPE_TYPES:
        return False
    recurrent = [layer.recurrent for layer in layers if layer.recurrent is not None]
    has_silu = all(getattr(module, "activation", "silu") in ("silu", "swish") for module in recurrent)
    if not has_silu or not all(map(_has_activation, layers)):
        return False
    calls = [layer.call for layer in layers if layer.call is not None]
    if not calls or any(call.softcap is not None or call.sinks is not None for call in calls):
        return False
    modules = [module for layer in layers for module in layer.all_modules()]
    linears = [decoder.head, *(module for module in modules if isinstance(module, nn.Linear))]
    norms = [decoder.norm, *(module for module in modules if type(module) not in (nn.Linear, nn.Conv1d))]
    if not all(map(_is_plain_linear, linears)) or not all(map(is_norm, norms)):
        return False
    if len(set(map(norm_epsilon, norms))) != 1 or not _has_equal_shapes(layers):
        return False
    matrices = [decoder.embedding, *linears]
    if len({module.weight.dtype for module in matrices}) != 1:
        return False
    width = rotary_width(rotary)
    rotates = width % 2 == 0 and all(width <= layer.head_dim for layer in layers if layer.call is not None)
    return rotates and all(map(_is_plain_memory, decoder.parameters))


def _is_plain_linear(module: Any) -> bool:
    """True for a plain linear layer, whose `forward` nothing but groupgrad may have replaced."""
    is_unchanged = "forward" not in module.__dict__ or is_replaced(module)
    return (
        type(module) is nn.Linear and is_unchanged and module.weight.shape == (module.out_features, module.in_features)
    )


def _is_plain_memory(parameter: torch.Tensor) -> bool:
    """True if the values can be read from the parameter's address; sharded and quantised weights have other classes."""
    return type(parameter) is nn.Parameter and parameter.is_contiguous()


def _has_activation(layer: LayerModules) -> bool:
    """True if the kernel computes the activation of a layer's MLP, if any."""
    if layer.activation is None:
        return True
    return is_silu(layer.activation) if layer.is_gated else is_squared_relu(layer.activation)


def _has_equal_shapes(layers: list[LayerModules]) -> bool:
    """True if all attention has the same shapes, and so have all recurrences and all MLPs."""
    attention: set[Any] = set()
    recurrent: set[Any] = set()
    mlps: set[Any] = set()
    for layer in layers:
        shapes = {name: tuple(m.weight.shape) for name, m in layer.modules.items() if m is not None}
        if layer.call is not None:
            attention.add(tuple(shapes[name] for name in ("query", "key", "value", "output")))
        if layer.recurrent is not None:
            recurrent.add(tuple(recurrent_sizes(layer.recurrent).values()))
        if "down" in shapes:
            mlps.add(tuple(shapes.get(name) for name in ("gate", "up", "down")))
    return max(len(attention), len(recurrent), len(mlps)) == 1


def _read_linear(module: nn.Linear) -> _Linear:
    return _Linear(module.weight.data_ptr(), None if module.bias is None else module.bias.data_ptr())


def _rows_of(module: nn.Linear, first: int) -> _Linear:
    """A linear layer's outputs from the first of these on."""
    bias = None if module.bias is None else module.bias[first:].data_ptr()
    return _Linear(module.weight[first:].data_ptr(), bias)


def _read_convolution(module: nn.Conv1d) -> dict[str, Any]:
    bias = None if module.bias is None else module.bias.data_ptr()
    return {"convolution": module.weight.data_ptr(), "convolution_bias": bias}


def _read_delta(module: Any) -> dict[str, Any]:
    """The linear layers of a gated delta rule, by their names in the kernel."""
    return {name: _read_linear(getattr(module, path)) for name, path in DELTA_LINEARS.items()}


def _read_mamba(module: Any) -> dict[str, Any]:
    """Weights of Mamba-2 by their names in the kernel. The rows of one weight give gates, inputs and time steps."""
    values, (shortest, longest) = module.intermediate_size, module.time_step_limit
    return {
        "gates": _read_linear(module.in_proj),
        "inputs": _rows_of(module.in_proj, values),
        "decays": _rows_of(module.in_proj, values + module.conv_dim),
        "output": _read_linear(module.out_proj),
        "skips": module.D.data_ptr(),
        "norm_groups": values // module.norm.group_size,
        "shortest": shortest,
        "longest": longest,
    }
