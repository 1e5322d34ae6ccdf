"""The compiled decode step as the engine calls it: the structures of `decode.cpp`, filled with where tensors lie."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from groupgrad.engines.native.attention_plans import DecodeBatch
from groupgrad.engines.native.kv_cache import KVCache
from groupgrad.engines.native.packed_linear import is_plain, lies_plainly
from groupgrad.kernels.choose import bits_factor
from groupgrad.kernels.compile import library
from groupgrad.modeling.families import POSITION_ONLY_ROPE_TYPES, is_rms_norm
from groupgrad.modeling.fused_modules import is_silu
from groupgrad.modeling.scoring.attention import AttentionCall

_Pointer, _Number = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = (("weight", _Pointer), ("bias", _Pointer))


_NORMS = ("attention_norm", "query_norm", "key_norm", "gated_norm")
_LINEARS = ("query", "key", "value", "output", "gate", "up", "down")


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in _NORMS),
        *((name, _Linear) for name in _LINEARS),
        *((name, _Pointer) for name in ("own_keys", "own_values", "prompt_keys", "prompt_values")),
        ("window", _Number),
        ("scale", ctypes.c_float),
    )


_SIZES = ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_width", "vocabulary")


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _Number) for name in _SIZES),
        *((name, _Pointer) for name in ("layers", "embedding", "norm")),
        ("head", _Linear),
        *((name, _Pointer) for name in ("cosines", "sines")),
        ("epsilon", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        *((name, _Number) for name in ("count", "own_places", "prompt_places", "num_chunks")),
        *((name, _Pointer) for name in ("groups", "prompt_lengths", "order", "chunks")),
    )


class _Choosing(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("draws", "logprobs", "entropies")),
        ("longest", _Number),
        *((name, _Pointer) for name in ("requests", "counts", "ends")),
        ("num_ends", _Number),
        ("factor", ctypes.c_float),
    )


@dataclass(slots=True, frozen=True)
class UnfilteredSampling:
    """How tokens are chosen where nothing is cut off: by a draw each, which the next step need not be asked for."""

    draws: torch.Tensor
    """(requests, longest) float64 in [0, 1)."""
    logprobs: torch.Tensor
    """(requests, longest) float32, to be filled in."""
    entropies: torch.Tensor
    temperature: float
    requests: torch.Tensor
    """(n,) of each row: its place in the tables."""
    counts: torch.Tensor
    """(n,) tokens it has there."""
    ends: torch.Tensor
    """Tokens that end a row."""


@dataclass(slots=True, frozen=True)
class _Parts:
    """The modules of one layer."""

    call: AttentionCall
    attention_norm: Any
    query_norm: Any
    key_norm: Any
    gated_norm: Any
    query: Any
    key: Any
    value: Any
    output: Any
    gate: Any
    up: Any
    down: Any


class CompiledModel:
    """A decoder's weights, where they lie now; made anew for each round of sampling, as parameters may be replaced."""

    def __init__(self, kernels: ctypes.CDLL, inner: Any, parts: list[_Parts]):
        self._kernels, self._rotary, self._numbers = kernels, inner.model.rotary_emb, [p.call.layer for p in parts]
        self._embedding = inner.model.embed_tokens.weight
        self._layers = (_Layer * len(parts))(*map(_read_layer, parts))
        width, first = inner.model.layers[0].self_attn.head_dim, parts[0]
        self._model = _Model(
            num_layers=len(parts),
            hidden=self._embedding.shape[1],
            inner=first.gate.out_features,
            heads=first.query.out_features // width,
            kv_heads=first.key.out_features // width,
            head_width=width,
            vocabulary=inner.lm_head.out_features,
            layers=ctypes.addressof(self._layers),
            embedding=self._embedding.data_ptr(),
            norm=inner.model.norm.weight.data_ptr(),
            head=_read_linear(inner.lm_head),
            epsilon=inner.model.norm.variance_epsilon,
        )
        # The pointers are good as long as the tensors are kept.
        self._kept = [p.detach() for p in inner.parameters()]
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._versions = (-1, -1)
        self._logits = torch.empty(0, inner.lm_head.out_features)

    def stand(self, store: KVCache, standing: DecodeBatch) -> CompiledStep:
        """The step for these rows."""
        return CompiledStep(self, store, standing)

    def make_rows(self, store: KVCache, standing: DecodeBatch, kept: list[Any]) -> _Rows:
        """The rows' side of a step; `kept` takes what its pointers point to."""
        chunk_rows = self._kernels.groupgrad_chunk_rows(self._model.heads // self._model.kv_heads)
        order = sorted(range(len(standing.groups)), key=standing.groups.__getitem__)
        chunks = [0]
        for at in range(1, len(order)):
            is_same = standing.groups[order[at]] == standing.groups[order[at - 1]]
            if not is_same or at - chunks[-1] == chunk_rows:
                chunks.append(at)
        chunks.append(len(order))
        arrays = [(_Number * len(x))(*x) for x in (standing.groups, standing.prompt_lengths, order, chunks)]
        kept.extend(arrays)
        places = store.own.places, store.prompts.places
        return _Rows(len(order), *places, len(chunks) - 1, *map(ctypes.addressof, arrays))

    def place(self, store: KVCache) -> None:
        """Note where the store's tensors lie, and the angles of all positions it has room for."""
        versions = (store.own.version, store.prompts.version)
        if versions == self._versions:
            return
        self._versions = versions
        for layer, number in zip(self._layers, self._numbers):
            layer.own_keys, layer.own_values = (x[number].data_ptr() for x in (store.own.keys, store.own.values))
            layer.prompt_keys = store.prompts.keys[number].data_ptr()
            layer.prompt_values = store.prompts.values[number].data_ptr()
        limit = store.own.places + store.prompts.places
        if self._tables is None or len(self._tables[0]) < limit:
            positions = torch.arange(1 << (limit - 1).bit_length())[None]
            cosines, sines = self._rotary(self._embedding[None, :1], positions)
            self._tables = cosines[0].contiguous(), sines[0].contiguous()
            self._model.cosines, self._model.sines = (table.data_ptr() for table in self._tables)

    def run(self, rows: _Rows, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits, overwritten by the next step."""
        logits = self._logits_of(rows)
        failed = self._kernels.groupgrad_decode(
            ctypes.addressof(self._model),
            ctypes.addressof(rows),
            tokens.data_ptr(),
            positions.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise _shortage(rows)
        return logits

    def sample(
        self, rows: _Rows, tokens: torch.Tensor, positions: torch.Tensor, free: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor:
        """(steps, n) tokens of `num_steps` steps, or fewer if a row ends by the last of them."""
        chosen = torch.empty(num_steps, rows.count, dtype=torch.int64)
        choosing = _Choosing(
            longest=free.draws.shape[1],
            num_ends=len(free.ends),
            factor=bits_factor(free.temperature),
            **{
                name: getattr(free, name).data_ptr()
                for name in ("draws", "logprobs", "entropies", "requests", "counts", "ends")
            },
        )
        done = self._kernels.groupgrad_sample(
            ctypes.addressof(self._model),
            ctypes.addressof(rows),
            ctypes.addressof(choosing),
            rows.count,
            self._model.vocabulary,
            tokens.data_ptr(),
            positions.data_ptr(),
            self._logits_of(rows).data_ptr(),
            num_steps,
            chosen.data_ptr(),
            torch.get_num_threads(),
        )
        if done < 0:
            raise _shortage(rows)
        return chosen[:done]

    def _logits_of(self, rows: _Rows) -> torch.Tensor:
        if len(self._logits) < rows.count:
            self._logits = self._logits.new_empty(rows.count, self._model.vocabulary)
        return self._logits[: rows.count]


def _shortage(rows: _Rows) -> MemoryError:
    return MemoryError(f"no memory is left for a decode step of {rows.count} rows; lower engine_kv_memory")


class CompiledStep:
    """Logits of one token each of n rows that stand where they were when it was made."""

    def __init__(self, model: CompiledModel, store: KVCache, standing: DecodeBatch):
        self._model, self._store, self._standing = model, store, standing
        self._kept: list[Any] = []
        self._rows: _Rows | None = None
        self._versions = (-1, -1)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits that follow `tokens` (n,) at `positions` (n,), which are stored; overwritten by the next."""
        return self._model.run(self._placed_rows(), tokens.contiguous(), positions.contiguous())

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, free: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor:
        """(steps, n) tokens that follow, of `num_steps` steps or fewer: the last step is one in which a row ends."""
        rows = self._placed_rows()
        return self._model.sample(rows, tokens.contiguous(), positions.contiguous(), free, num_steps)

    def _placed_rows(self) -> _Rows:
        versions = (self._store.own.version, self._store.prompts.version)
        if self._rows is None or versions != self._versions:
            self._kept, self._versions = [], versions
            self._rows = self._model.make_rows(self._store, self._standing, self._kept)
        self._model.place(self._store)
        return self._rows


def compiled_model(inner: Any, calls: dict[int, AttentionCall]) -> CompiledModel | None:
    """The compiled form of a decoder of one of `families.CAUSAL_LMS`, or None if it has none here.

    `calls` is what its layers ask of attention. No layer may be anything but what its class computes: adapters, hooks
    and activations other than SiLU have to be called.
    """
    parts = [_parts(layer, calls) for layer in inner.model.layers]
    if not _fits(inner, parts):
        return None
    kernels = library()
    return None if kernels is None else CompiledModel(kernels, inner, parts)


def _parts(layer: Any, calls: dict[int, AttentionCall]) -> _Parts:
    attention, gated = layer.self_attn, layer.mlp
    return _Parts(
        call=calls[attention.layer_idx],
        attention_norm=layer.input_layernorm,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        gated_norm=layer.post_attention_layernorm,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        output=attention.o_proj,
        gate=gated.gate_proj,
        up=gated.up_proj,
        down=gated.down_proj,
    )


def _fits(inner: Any, parts: list[_Parts]) -> bool:
    backbone = inner.model
    if type(backbone.embed_tokens) is not nn.Embedding or backbone.embed_tokens.max_norm is not None:
        return False
    if getattr(backbone.rotary_emb, "rope_type", None) not in POSITION_ONLY_ROPE_TYPES:
        return False
    if not all(is_silu(layer.mlp.act_fn) for layer in backbone.layers):
        return False
    if any(p.call.softcap is not None or p.call.sinks is not None for p in parts):
        return False
    linears = [inner.lm_head, *(getattr(p, name) for p in parts for name in _LINEARS)]
    norms = [backbone.norm, *(getattr(p, name) for p in parts for name in _NORMS)]
    norms = [norm for norm in norms if norm is not None]
    if not all(map(is_plain, linears)) or not all(map(is_rms_norm, norms)):
        return False
    if len({norm.variance_epsilon for norm in norms}) != 1 or len(set(map(_shape, parts))) != 1:
        return False
    width = backbone.layers[0].self_attn.head_dim
    is_whole = width % 2 == 0 and 2 * backbone.rotary_emb.inv_freq.numel() == width
    return is_whole and all(map(lies_plainly, inner.parameters()))


def _shape(parts: _Parts) -> tuple[Any, ...]:
    """What the kernel takes to be the same in all layers."""
    modules = [getattr(parts, field.name) for field in fields(parts) if field.name != "call"]
    return tuple(None if module is None else module.weight.shape for module in modules)


def _read_layer(parts: _Parts) -> _Layer:
    norms = {name: getattr(parts, name) for name in _NORMS}
    return _Layer(
        **{name: norm.weight.data_ptr() for name, norm in norms.items() if norm is not None},
        **{name: _read_linear(getattr(parts, name)) for name in _LINEARS},
        window=parts.call.window or 0,
        scale=parts.call.scale,
    )


def _read_linear(module: nn.Linear) -> _Linear:
    return _Linear(module.weight.data_ptr(), None if module.bias is None else module.bias.data_ptr())
