"""Native engine: samples from the policy's own modules."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions, sample_all
from groupgrad.engines.native.attention_layouts import ProbeLayout
from groupgrad.engines.native.cpp_step import CompiledModel
from groupgrad.engines.native.cuda_graphs import cuda_recorder
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.engines.native.kv_cache import KVCache, LayerShape, StateShape
from groupgrad.engines.native.logits import cast_bytes, last_logits, weights_cast_once
from groupgrad.engines.native.runner import MODULES, DecodeRunner, StepFindings
from groupgrad.engines.native.sampler import Sampler
from groupgrad.engines.native.sampling_params import SamplingParams, read_options
from groupgrad.engines.native.scheduler import Scheduler
from groupgrad.engines.native.session import NativeSession, Statistics
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.kernels.fallbacks import fall_back, fallbacks
from groupgrad.memory.free_memory import free_bytes, used_bytes
from groupgrad.metrics import Metric, average, maximum, mean_of
from groupgrad.models.unwrapping import unwrap
from groupgrad.scoring.forward import evaluation_mode
from groupgrad.scoring.fused_modules import compiled_parts, restore_modules

logger = logging.getLogger(__name__)

MEMORY_FRACTION = 0.5
"""Fraction of the free memory that keys and values may take without an explicit bound."""


_ATTENTION_SETTINGS = ("scaling", "sliding_window")
"""Attributes of transformers' attention layers that may be changed in place."""


class NativeEngine:
    """Samples from `model` in process, under adapters too, in evaluation mode and without gradients.

    `kv_memory` bounds the keys and values in bytes (None: half of the memory that is free when a session opens),
    `max_rows` the sequences that run at once (None: as many as fit). `precision` makes training's autocast context. An
    engine that `is_plain` computes decode steps in the model's modules, and attention on a GPU by matrix products. The
    model has to pass `scoring.attention.flat_obstacle`.
    """

    _recorder = staticmethod(cuda_recorder)
    is_exact = True
    takes_temperatures = True

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        kv_memory: int | None = None,
        max_rows: int | None = None,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        is_plain: bool = False,
    ):
        self._model, self._tokenizer, self._is_plain = model, tokenizer, is_plain
        self._kv_memory, self._max_rows, self._precision = kv_memory, max_rows, precision
        self._probe, self._findings = ProbeLayout(), StepFindings()
        self._fingerprint: tuple[Any, ...] = ()
        self.statistics = Statistics()

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order, with log-probs and entropies.

        ConfigError for an option this engine lacks, ValueError for a request that can never fit into the memory bound.
        """
        if not requests:
            read_options(options, self._tokenizer)
            self.statistics = Statistics()
            return []
        with self.session(options) as session:
            return sample_all(session, [_alone(request) for request in requests])

    @contextmanager
    def session(self, options: SamplingOptions) -> Iterator[NativeSession]:
        """Opens a session; its samples have log-probs and entropies.

        `statistics` are those of the session opened last. ConfigError for an option this engine lacks.
        """
        params = read_options(options, self._tokenizer)
        self.statistics = statistics = Statistics()
        model = unwrap(self._model)
        # Modules that gradient checkpointing left replaced could not be computed directly.
        restore_modules(model)
        compiled, device = compiled_parts(model, stays=False), input_device(model)
        before = used_bytes(device)
        with evaluation_mode(self._model), self._precision(), weights_cast_once(model), compiled:
            session = self._make_session(model, params, statistics)
            try:
                yield session
            finally:
                session.close()
        statistics.left_bytes = used_bytes(device) - before

    @property
    def path(self) -> str:
        """The paths of the last session's decode steps (`DecodeStep.path`), and why it took no faster one.

        Empty if no step ran.
        """
        paths = ", ".join(path for path, _ in self.statistics.steps_by_path.most_common())
        reasons = "; ".join(f"{what} ({why})" for what, why in fallbacks().items())
        return f"{paths}; {reasons}" if paths and reasons else paths

    def metrics(self) -> dict[str, Metric]:
        """Numbers of the session opened last: the share of decode steps by path, and of a GPU more."""
        found, num_steps = self.statistics, self.statistics.num_steps
        metrics = {f"sampling/path/{path}": mean_of(n, num_steps) for path, n in found.steps_by_path.items()}
        if num_steps and input_device(unwrap(self._model)).type == "cuda":
            metrics["sampling/recordings"] = average(found.num_recorded)
            metrics["sampling/memory_left"] = maximum(found.left_bytes / 2**20)
            metrics["sampling/fallbacks"] = maximum(len(fallbacks()))
        return metrics

    @torch.no_grad()
    def _make_session(self, model: nn.Module, params: SamplingParams, statistics: Statistics) -> NativeSession:
        device, probe = input_device(model), self._probe_of(model)
        devices = {part.device for part in (*probe.layers.values(), *probe.states)}
        record = self._recorder(devices) if self._findings.can_record else None
        cache = self._make_cache(probe, record is not None)
        direct = None if self._is_plain else self._direct_form(model, probe)
        runner = DecodeRunner(
            model,
            cache,
            device,
            record=record,
            direct=direct,
            findings=self._findings,
            uses_triton=not self._is_plain,
        )
        return NativeSession(
            model,
            Sampler(params, device),
            Scheduler(cache, self._max_rows),
            runner,
            StopStrings(params.stop_strings, self._tokenizer),
            statistics,
            # Only an explicit bound refuses a sequence.
            may_exceed_bound=self._kv_memory is None,
        )

    def _direct_form(self, model: nn.Module, probe: ProbeLayout) -> CompiledModel | DirectModel | None:
        """The direct form of the model; None if it has none, which is said once where its family has one."""
        form = direct_model(model, probe.calls)
        if not isinstance(form, str):
            return form
        if form and any(layer.device.type == "cuda" for layer in probe.layers.values()):
            fall_back(logger, MODULES, form)
        return None

    def _probe_of(self, model: nn.Module) -> ProbeLayout:
        """The probe of `model`, kept as long as that consists of the same modules and parameters; values may differ."""
        fingerprint = _fingerprint(model)
        if self._fingerprint != fingerprint:
            probe, token = ProbeLayout(), torch.zeros(1, dtype=torch.int64, device=input_device(model))
            last_logits(model, token, token, probe, token)
            self._probe, self._findings, self._fingerprint = probe, StepFindings(), fingerprint
        return self._probe

    def _make_cache(self, probe: ProbeLayout, is_recorded: bool) -> KVCache:
        bound = self._kv_memory
        if bound is None:
            bound = _bytes_that_fit(list(probe.layers.values()), probe.states, self._model)
        return KVCache(probe.layers, bound, states=probe.states, is_recorded=is_recorded)


def _alone(request: Request) -> Request:
    """The request without a predecessor and a successor."""
    is_alone = request.continues is None and not request.keep
    return request if is_alone else replace(request, continues=None, keep=False)


def _fingerprint(model: nn.Module) -> tuple[Any, ...]:
    # Weak references, since a later module may have the address of an earlier one.
    modules = ((weakref.ref(m), *(m.__dict__.get(name) for name in _ATTENTION_SETTINGS)) for m in model.modules())
    parameters = [(p.shape, p.dtype, p.device) for p in model.parameters()]
    device_types = sorted({"cpu", *(device.type for _, _, device in parameters)} - {"meta"})
    autocast = ((name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in device_types)
    return (*modules, *parameters, *autocast)


def input_device(model: nn.Module) -> torch.device:
    """The device that token ids have to be on."""
    getter = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    parameters = chain(() if embedding is None else embedding.parameters(), model.parameters())
    # Offloaded weights are on the meta device until they are used.
    return next((p.device for p in parameters if p.device.type != "meta"), torch.device("cpu"))


def _bytes_that_fit(layers: list[LayerShape], states: list[StateShape], model: nn.Module) -> int:
    """Bytes for keys, values and states, over all devices, if each gives at most `MEMORY_FRACTION` of its free memory.

    A device takes part by its share of the layers' keys and values, or of the states if there are none.
    """
    unit_bytes: dict[torch.device, int] = {}
    for device, num_bytes in [(x.device, x.bytes_per_token) for x in layers] or [
        (x.device, x.num_bytes) for x in states
    ]:
        if num_bytes:
            unit_bytes[device] = unit_bytes.get(device, 0) + num_bytes
    free = {device: max(0, free_bytes(device) - cast_bytes(model, device)) for device in unit_bytes}
    units = min(int(MEMORY_FRACTION * free[device]) // size for device, size in unit_bytes.items())
    return units * sum(unit_bytes.values())
