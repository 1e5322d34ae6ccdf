"""The engine that samples from the very modules that train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
from groupgrad.engines.native.attention_plans import ProbePlan
from groupgrad.engines.native.direct_step import direct_model
from groupgrad.engines.native.kv_cache import KVCache, LayerShape
from groupgrad.engines.native.logits import cast_bytes, last_logits, weights_cast_once
from groupgrad.engines.native.packed_linear import fast_linears
from groupgrad.engines.native.probe_cache import ProbeCache
from groupgrad.engines.native.runner import DecodeRunner, cuda_recorder
from groupgrad.engines.native.sampler import Sampler
from groupgrad.engines.native.sampling_params import SamplingParams, read_options
from groupgrad.engines.native.scheduler import Scheduler
from groupgrad.engines.native.session import NativeSession, Statistics
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.modeling.fused_modules import compiled_parts, own_parts
from groupgrad.modeling.scoring.forward import evaluation_mode, unwrap
from groupgrad.modeling.systems.checkpointing import free_bytes

MEMORY_SHARE = 0.5
"""Share of the free memory that keys and values may take if no bound is given."""


class NativeEngine:
    """Samples from `model` in process, under adapters too, in evaluation mode and without gradients.

    `kv_memory` bounds the keys and values in bytes (None: half of what is free on the device when sampling begins) and
    `max_rows` the rows computed at once (None: as many as fit). `pack_weights` trades memory for speed on a CPU where
    our kernels cannot be compiled: while sampling, float32 linear layers have a copy of their weights in the order that
    oneDNN reads fastest. `precision`
    makes the context that training's mixed precision computes in. The model has to be one that
    `models.attention.plannable` accepts.
    """

    _recorder = staticmethod(cuda_recorder)
    is_exact = True
    """Its log-probs are those that training assigns."""

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        kv_memory: int | None = None,
        max_rows: int | None = None,
        pack_weights: bool = False,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        if kv_memory is not None and kv_memory <= 0:
            raise ValueError(f"engine_kv_memory={kv_memory} holds no keys and values; give bytes, or None to derive it")
        if max_rows is not None and max_rows <= 0:
            raise ValueError(f"max_rows={max_rows} lets no row be computed; set it to at least 1, or None")
        self._model, self._tokenizer = model, tokenizer
        self._kv_memory, self._max_rows, self._precision = kv_memory, max_rows, precision
        self._pack_weights = pack_weights
        self._knowledge = ProbeCache()
        self.statistics = Statistics()

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order, with log-probs and entropies.

        ConfigError for an option this engine lacks, ValueError for a row that can never fit into the memory bound.
        """
        if not requests:
            read_options(options, self._tokenizer)
            self.statistics = Statistics()
            return []
        with self.session(options) as session:
            session.check(requests)
            return sample_all(session, [replace(request, continues=None, keep=False) for request in requests])

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[NativeSession]:
        """Sampling under way, to which requests may come at any time; see `engines.base.Session`.

        Each of its samples has log-probs and entropies. `statistics` are those of the session opened last.
        ConfigError for an option this engine lacks.
        """
        choosing = read_options(options, self._tokenizer)
        self.statistics = statistics = Statistics()
        model = unwrap(self._model)
        # Whoever trains without the trainer may have left them otherwise, and then nothing is computed directly.
        own_parts(model)
        parts, linears = compiled_parts(model, stays=False), fast_linears(model, pack=self._pack_weights)
        with evaluation_mode(self._model), self._precision(), weights_cast_once(model), parts, linears:
            session = self._make_session(model, choosing, statistics)
            try:
                yield session
            finally:
                session.close()

    @torch.no_grad()
    def _make_session(self, model: nn.Module, choosing: SamplingParams, statistics: Statistics) -> NativeSession:
        device = input_device(model)
        token = torch.zeros(1, dtype=torch.int64, device=device)
        known = self._knowledge.of(model, lambda plan: last_logits(model, token, token, plan, token))
        devices = {layer.device for layer in known.probe.layers.values()}
        record = self._recorder(devices) if known.agreement.records else None
        store, direct = self._make_store(known.probe, record is not None), direct_model(model, known.probe.calls)
        return NativeSession(
            model,
            Sampler(choosing, device),
            Scheduler(store, self._max_rows),
            DecodeRunner(model, store, device, record=record, direct=direct, agreement=known.agreement),
            end_ids=frozenset(choosing.eos_ids),
            stops=StopStrings(choosing.stop_strings, self._tokenizer),
            # A bound that nobody set refuses nothing: one row at least may try.
            may_stretch=self._kv_memory is None,
            statistics=statistics,
        )

    def _make_store(self, plan: ProbePlan, is_recorded: bool) -> KVCache:
        bound = self._kv_memory
        if bound is None:
            layers = list(plan.layers.values())
            bound = _tokens_that_fit(layers, self._model) * sum(layer.bytes_per_token for layer in layers)
        return KVCache(plan.layers, bound, is_recorded=is_recorded)


def input_device(model: nn.Module) -> torch.device:
    """Where token ids go."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    parameters = [*(embedding.parameters() if embedding is not None else ()), *model.parameters()]
    # Offloaded weights are nowhere until they are used.
    return next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))


def _tokens_that_fit(layers: list[LayerShape], model: nn.Module) -> int:
    """Tokens whose keys and values take a share of what is free on the device that has least room for its layers."""
    devices = {layer.device for layer in layers}
    free = {device: max(0, free_bytes(device) - cast_bytes(model, device)) for device in devices}
    return min(
        int(MEMORY_SHARE * free[device]) // sum(x.bytes_per_token for x in layers if x.device == device)
        for device in devices
    )
