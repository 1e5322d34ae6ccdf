"""Decode steps recorded once and repeated: on a GPU the launches of a small step take longer than the work itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupgrad.engines.native.attention_plans import DecodeBatch, DecodePlan, StepShape
from groupgrad.engines.native.cpp_step import CompiledModel, UnfilteredSampling
from groupgrad.engines.native.direct_step import DirectModel
from groupgrad.engines.native.kv_cache import KVCache, padded
from groupgrad.engines.native.logits import step_logits
from groupgrad.modeling.systems.oom import is_out_of_memory

logger = logging.getLogger(__name__)

Work = Callable[[], torch.Tensor]

Record = Callable[[Work, Iterable[torch.Tensor]], Work]
"""From work, and the tensors that it reads and that somebody else keeps, makes work that repeats it."""

DIRECT_TOLERANCE = 1e-5
"""Of the largest logit, by which the direct form of a model may differ from the model."""


class EagerStep:
    """A step as the model's modules compute it, or `direct` in their place."""

    def __init__(self, model: nn.Module, store: KVCache, standing: DecodeBatch, direct: _Direct):
        self._model, self._plan, self._direct = model, DecodePlan(store, standing), direct
        self._compiled = direct.model.stand(store, standing) if isinstance(direct.model, CompiledModel) else None

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits that follow the rows' newest `tokens` (n,) at `positions` (n,), which are stored."""
        if self._direct.is_checked or self._direct.model is None:
            logits = self._direct_logits(tokens, positions)
        else:
            expected = step_logits(self._model, tokens, positions, self._plan)
            # Last, so that what it stores stays and a first round is like all others.
            logits = self._direct_logits(tokens, positions)
            self._direct.check(logits, expected)
        if logits is None or self._direct.model is None:
            logits = step_logits(self._model, tokens, positions, self._plan)
        self._plan.advance()
        return logits

    def sample(
        self, tokens: torch.Tensor, positions: torch.Tensor, free: UnfilteredSampling, num_steps: int
    ) -> torch.Tensor | None:
        """(steps, n) tokens that follow, of up to `num_steps` steps (see `CompiledStep.sample`); None if each step has
        to be made by itself."""
        if self._compiled is None or not self._direct.is_checked or self._direct.model is None:
            return None
        found = self._compiled.sample(tokens, positions, free, num_steps)
        self._plan.advance(len(found))
        return found

    def _direct_logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        direct = self._direct.model
        if isinstance(direct, CompiledModel):
            return None if self._compiled is None else self._compiled(tokens, positions)
        return None if direct is None else direct(tokens, positions, self._plan)


@dataclass(slots=True)
class Agreement:
    """What sampling has found out about a model's steps."""

    found: dict[type, bool] = field(default_factory=dict)
    """Whether the model and its direct form have been seen to compute the same, by the kind of that form."""
    records: bool = True
    """False once a step of the model could not be recorded."""


class _Direct:
    """A model's direct form, in use once it has been seen to agree."""

    def __init__(self, model: CompiledModel | DirectModel | None, agreement: Agreement):
        self._kind, self._agreement = type(model), agreement
        self.model = model if agreement.found.get(self._kind, True) else None

    @property
    def is_checked(self) -> bool:
        return self._kind in self._agreement.found

    def check(self, found: torch.Tensor | None, expected: torch.Tensor) -> None:
        """Compare logits (n, V) of both ways; the direct one is given up if they differ by more than rounding."""
        if found is None:
            return
        if not expected.isfinite().all():
            # That says nothing about other weights.
            self.model = None
            return
        difference = float((found - expected).abs().max())
        agrees = difference <= DIRECT_TOLERANCE * max(1.0, float(expected.abs().max()))
        self._agreement.found[self._kind] = agrees
        if not agrees:
            self.model = None
            logger.warning("the direct decode step differs by %.1e in its logits: the model's own is used", difference)


@dataclass(slots=True)
class RecordedStep:
    """A step of fixed sizes, repeated on the tensors that it was recorded with."""

    plan: DecodePlan
    ids: torch.Tensor
    """(padded n,)."""
    positions: torch.Tensor
    replay: Work

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(n, V) logits; overwritten by the next step."""
        self.ids[: len(tokens)] = tokens
        self.positions[: len(tokens)] = positions
        logits = self.replay()[: len(tokens)]
        self.plan.advance()
        return logits


class DecodeRunner:
    """Makes the steps of a model: recorded ones if `record` can, eager ones otherwise."""

    def __init__(
        self,
        model: nn.Module,
        store: KVCache,
        device: torch.device,
        *,
        record: Record | None,
        direct: CompiledModel | DirectModel | None,
        agreement: Agreement,
    ):
        self._model, self._store, self._device, self._record = model, store, device, record
        self._agreement, self._direct = agreement, _Direct(direct, agreement)
        self._rows_of_group = 1
        self._recorded: dict[StepShape, RecordedStep] = {}
        self._versions = (0, 0)

    def leave_direct(self) -> None:
        """From now on the model's own modules compute the steps that are made."""
        self._direct.model = None

    def make(self, standing: DecodeBatch) -> EagerStep | RecordedStep:
        """A step for these rows."""
        if self._record is not None:
            try:
                return self._make_recorded(standing, self._record)
            except Exception as error:
                self._record, self._recorded = None, {}
                # Another round may find more memory.
                self._agreement.records = is_out_of_memory(error)
                logger.warning(
                    "the decode step of %s cannot be recorded as a CUDA graph (%s: %s); sampling is slower",
                    type(self._model).__name__,
                    type(error).__name__,
                    error,
                )
        return EagerStep(self._model, self._store, standing, self._direct)

    def _make_recorded(self, standing: DecodeBatch, record: Record) -> RecordedStep:
        own, prompts = self._store.own, self._store.prompts
        if self._versions != (own.version, prompts.version):
            # The tensors that these were recorded with are gone.
            self._recorded, self._versions = {}, (own.version, prompts.version)
        # It never shrinks: that would cost recordings and save a few queries only.
        self._rows_of_group = max(self._rows_of_group, padded(standing.rows_of_group))
        shape = StepShape(
            rows=min(padded(len(standing.groups)), own.slots),
            groups=min(padded(max(standing.groups) + 1), prompts.slots),
            rows_of_group=self._rows_of_group,
            prompt_places=prompts.places,
            own_places=own.places,
        )
        if shape in self._recorded:
            self._recorded[shape].plan.change(standing)
            return self._recorded[shape]
        plan = DecodePlan(self._store, standing, shape)
        ids, positions = (torch.zeros(shape.rows, dtype=torch.int64, device=self._device) for _ in range(2))

        def work() -> torch.Tensor:
            # Made within, masks are part of what is recorded.
            plan.forget_masks()
            return step_logits(self._model, ids, positions, plan)

        stored = [x for slab in (own, prompts) for x in (*slab.keys.values(), *slab.values.values())]
        self._recorded[shape] = RecordedStep(plan, ids, positions, record(work, stored))
        return self._recorded[shape]


def cuda_recorder(devices: set[torch.device]) -> Record | None:
    """Records work as CUDA graphs that share their memory; None if the model does not lie on one CUDA device.

    Of graphs that share memory only the one replayed last has a valid result.
    """
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    device = next(iter(devices))
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(work: Work, lasting: Iterable[torch.Tensor]) -> Work:
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.device(device), torch.cuda.stream(side):
            # Libraries set themselves up in a first run, which a graph must not contain. What it writes to the store,
            # the first replay writes again.
            work()
            replay = _capture(work, pool, _Reading(lasting))
        current.wait_stream(side)
        return replay

    return record


@dataclass(slots=True, frozen=True)
class _Replay:
    """Recorded work, done anew at each call."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor
    inputs: list[torch.Tensor]
    """What it reads, so that it lives as long."""

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


def _capture(work: Work, pool: Any, reading: _Reading) -> _Replay:
    """What `work` does on the current stream, recorded and not done.

    `torch.cuda.graph` would do the same, but does not put stream and memory back where they were if the work fails.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with reading:
            output = work()
        graph.capture_end()
    except BaseException:
        with suppress(RuntimeError):
            graph.capture_end()
        # A capture that failed leaves its pool open, and no cached memory could be freed any more.
        close = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if close is not None:
            with suppress(RuntimeError):
                close(torch.cuda.current_device(), pool)
        raise
    return _Replay(graph, output, list(reading.inputs.values()))


class _Reading(TorchDispatchMode):
    """Collects the tensors that operations read and that none of them has made, but for `lasting` ones.

    Some have no other owner for as long as a graph reads them: weights that mixed precision has cast are let go when
    any thread leaves it.
    """

    def __init__(self, lasting: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.inputs: dict[int, torch.Tensor] = {}
        self._made = {_memory(tensor) for tensor in lasting}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            if (key := _memory(tensor)) not in self._made:
                self.inputs.setdefault(key, tensor)
        found = func(*args, **(kwargs or {}))
        self._made.update(key for tensor in _tensors(found) if (key := _memory(tensor)) not in self.inputs)
        return found


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
