"""Computes the common work of arms once: tokenised prompts, samples and reference log-probs.

Arms that differ in a learning rate or a loss have the same weights until their first optimizer step, so they sample the
same completions. A result is kept under a digest of everything that it depends on, the device and the bits of the
weights included, and an arm takes it only where all of that is equal. On a CPU the arm itself would have computed the
same bits. On a GPU it would have drawn from the same probabilities with the same random streams, up to rounding.
"""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerCallback

from groupgrad.batch import Batch
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Request, Sample, SamplingOptions, Session
from groupgrad.engines.native import NativeEngine
from groupgrad.metrics import Metric
from groupgrad.models.quantized import is_quantized
from groupgrad.models.unwrapping import unwrap
from groupgrad.objectives import PolicyOptions
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.scoring.old_and_ref import OldAndRefScorer
from groupgrad.trainer.changed_options import deciding
from groupgrad.trainer.resumed_optimizer import OPTIMIZER_OPTIONS

T = TypeVar("T")

DEVICES = ("cpu", "cuda")
"""Types of devices on which samples and log-probs are shared; on others the digest of weights has not been tested."""
MAX_BYTES = 64 * 2**20
"""Memory limit of the kept results; beyond it the least recently used are dropped."""
_WORDS_AT_ONCE = 2**22
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIXES = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
_BYTES_OF_ID, _BYTES_OF_TOKEN = 8, 80  # of a Python list; of an id, a log-prob and an entropy in three lists

AFTER_SAMPLING = frozenset(
    {
        *({field.name for field in dataclasses.fields(PolicyOptions)} - {"max_completion_length"}),
        *OPTIMIZER_OPTIONS,
        *("lr_scheduler_type", "lr_scheduler_kwargs", "max_grad_norm", "max_steps", "num_train_epochs"),
        *("mask_truncated_completions", "multi_objective_aggregation", "reward_weights", "scale_rewards"),
        *("warmup_ratio", "warmup_steps"),
    }
)
"""Settings that change neither the samples nor the reference log-probs of given weights. A setting that is missing here
costs shared work, never exactness."""


class CommonWork:
    """Results that the arms of a sweep compute once."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        """Results with their sizes, the one that was used last at the end."""

    def result(self, parts: Sequence[Any], compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """The result that depends on `parts` alone, computed unless it is kept; `size` gives its bytes."""
        key = _digest(parts)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][0]
        found = compute()
        self._kept[key] = found, size(found)
        self._num_bytes += self._kept[key][1]
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return found

    def join(self, trainer: Any) -> None:
        """Connects the new trainer of an arm, so that it reuses results of other arms and provides its own.

        Samples of one turn from the model itself, and log-probs of a reference that stays as it is, are shared on
        `DEVICES`; prompts of text wherever the tokenizer can be compared.
        """
        self._join_prompts(trainer.prompt_maker, trainer.args.special_tokens_in_prompts)
        if trainer.args.device.type in DEVICES and not is_quantized(unwrap(trainer.model)):
            trainer.add_callback(JoinedModel(trainer, self))

    def _join_prompts(self, maker: PromptMaker, special_tokens: str) -> None:
        backend = getattr(maker.tokenizer, "backend_tokenizer", None)
        if type(maker) is not PromptMaker or backend is None:
            return
        tokenise, template = maker.token_ids, getattr(maker.tokenizer, "chat_template", None)
        same = _digest([backend.to_str(), template, maker.chat_template_kwargs, maker.continues_turns, special_tokens])

        def token_ids(prompt: Any) -> list[int]:
            return self.result((same, prompt), lambda: tokenise(prompt), lambda ids: _BYTES_OF_ID * len(ids))

        maker.token_ids = token_ids


class JoinedModel(TrainerCallback):
    """Puts what shares results in place of a trainer's engine and scorer, which are made anew by each training."""

    def __init__(self, trainer: Any, work: CommonWork):
        self._trainer, self._work, self._model = trainer, work, unwrap(trainer.model)
        settings = {k: v for k, v in deciding(trainer.args.to_dict()).items() if k not in AFTER_SAMPLING}
        frozen = [(name, weight) for name, weight in self._model.named_parameters() if not weight.requires_grad]
        described = json.dumps(
            (settings, _architecture(self._model)),
            sort_keys=True,
            default=lambda part: sorted(part) if isinstance(part, (set, frozenset)) else repr(part),
        )
        where = str(trainer.args.device), described
        self._identity = _digest(where), _weights(frozen)
        self._reference = (*self._identity, _changing_weights(self._model))  # a reference is the model at its start

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Joins this training."""
        trainer, components = self._trainer, self._trainer.components
        rollouts = components.collector.rollouts
        if isinstance(rollouts, SingleTurnRollouts) and isinstance(rollouts.engine, NativeEngine):
            rollouts.engine = CommonSamples(rollouts.engine, self._work, self._present_identity)
        if trainer.reference is not None and not args.sync_ref_model:
            identity = *self._reference, repr(components.forward_options)
            scorer = CommonReference(components.scorer, self._work, identity)
            trainer.components = dataclasses.replace(components, scorer=scorer)

    def _present_identity(self) -> tuple[Any, ...]:
        return (*self._identity, _changing_weights(self._model))


class CommonSamples:
    """An engine that samples what no arm of the same weights and settings has sampled, and otherwise takes theirs."""

    def __init__(self, engine: NativeEngine, work: CommonWork, identity: Callable[[], tuple[Any, ...]]):
        self.engine, self._work, self._identity = engine, work, identity

    @property
    def is_exact(self) -> bool:
        """True, as for the engine itself."""
        return self.engine.is_exact

    @property
    def path(self) -> str:
        """The engine's `path`."""
        return self.engine.path

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order. Requests with images are always sampled."""
        if not requests or any(request.media is not None for request in requests):
            return self.engine.sample(requests, options)
        asked = [(request.prompt_ids, request.seed, request.max_new_tokens) for request in requests]
        parts = "samples", *self._identity(), asked, options
        return self._work.result(
            parts,
            lambda: self.engine.sample(requests, options),
            lambda samples: _BYTES_OF_TOKEN * sum(len(sample.ids) for sample in samples),
        )

    def metrics(self) -> dict[str, Metric]:
        """What the engine tells of the completions that it sampled last."""
        return self.engine.metrics()

    def session(self, options: SamplingOptions) -> AbstractContextManager[Session]:
        """A session of the engine; nothing of it is shared."""
        return self.engine.session(options)


class CommonReference:
    """A scorer whose reference log-probs are taken from an arm with the same reference, rows and settings."""

    def __init__(self, scorer: OldAndRefScorer, work: CommonWork, identity: tuple[Any, ...]):
        self._scorer, self._work, self._identity = scorer, work, identity
        self.policy = scorer.policy

    def reference_logprobs(self, batch: Batch, *, rows_per_pass: int | None = None) -> torch.Tensor | None:
        """(L,) log-probs (nats) by the reference model. Rows with images are always scored."""

        def score() -> torch.Tensor | None:
            return self._scorer.reference_logprobs(batch, rows_per_pass=rows_per_pass)

        if batch.media is not None or batch.row_media is not None:
            return score()
        tokens = batch.completion_ids, batch.offsets, batch.prompt_ids, batch.prompt_offsets, batch.prompt_of_row
        parts = "reference", *self._identity, [tensor.tolist() for tensor in tokens], rows_per_pass
        return self._work.result(parts, score, lambda found: 0 if found is None else found.nbytes)


def _architecture(model: Any) -> list[Any]:
    """All that decides what a model computes but its weights: modules, configuration, adapters."""
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    adapters = {name: adapter.to_dict() for name, adapter in getattr(model, "peft_config", {}).items()}
    return [repr(model), config, getattr(model.config, "_attn_implementation", None), adapters]


def _changing_weights(model: nn.Module) -> bytes:
    """A digest of the weights that train, and of buffers."""
    trained = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    return _weights([*trained, *model.named_buffers()])


def _weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """A digest of named tensors. A sum of their bits would not do: the first step of Adam moves all weights by the same
    amount up or down, so the differences between two arms may cancel."""
    found, sums = blake2b(digest_size=16), []
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if bits.device.type == "cpu":
            found.update(bits.numpy())  # pyright: ignore
        else:
            sums.append(weighted_sum_of_bits(bits))
    if sums:
        found.update(repr(torch.stack(sums).tolist()).encode())  # one wait for the device
    return found.digest()


def weighted_sum_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """() int64 checksum of a tensor of bytes: the sum of its 64-bit words, each times its own weight, modulo 2^64.

    The weights are odd and look random (splitmix64), so every change of one word changes the sum, and changes of
    several cancel with a probability of about 2^-63. Nothing leaves the device.
    """
    words = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)]).view(torch.int64)
    total = words.new_zeros(())
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        mixed = torch.arange(start + 1, start + 1 + part.numel(), device=part.device) * _GOLDEN
        for shift, factor in _MIXES:
            mixed = (mixed ^ (mixed >> shift)) * factor
        total = total + (part * (mixed | 1)).sum()
    return total


def _digest(parts: Sequence[Any]) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()
