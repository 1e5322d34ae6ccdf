"""The engine that samples by transformers' continuous batching, over a paged key-value cache.

transformers draws all rows of a batch from one global random stream, so a completion depends on its neighbours too. The
batches are the same in every run of a seed, because all requests are queued before the first one is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from groupgrad.activity import sign_of_life
from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.engines.generation_options import PAGED
from groupgrad.engines.transformers import end_ids
from groupgrad.garbage import existing_objects_skipped
from groupgrad.models.load import Float32Linear
from groupgrad.models.unwrapping import parameters_replaced, pretrained, unwrap
from groupgrad.scoring.forward import evaluation_mode
from groupgrad.scoring.fused_modules import computes_in_float32

_CPU_PAGE, _CPU_BATCH_TOKENS = 32, 1024
"""Tokens of a page and of a forward pass on a CPU, where larger ones would be mostly padding and mask."""

_FIELDS = ("temperature", "top_k", "top_p", "min_p")
_FILTERS = PAGED - {"temperature", "eos_token_id", "max_new_tokens", "do_sample"}


class ContinuousBatchingEngine(BatchEngine):
    """Samples through the model's `ContinuousBatchingManager`, in evaluation mode.

    `settings` are fields of `ContinuousBatchingConfig`. `precision` makes training's autocast context. Where training
    computes in another type than that of the weights, the engine samples from copies in that type, and the model has
    its own weights again afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: dict[str, Any],
        *,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ):
        self._model, self._settings, self._precision = model, settings, precision

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order. RuntimeError if transformers fails on a request."""
        if not requests:
            return []
        model: Any = pretrained(unwrap(self._model))
        device, eos_ids = model.device, end_ids(options)
        fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with evaluation_mode(self._model), _weights_in(model, self._dtype(device)), _attention_restored(model), fork:
            outputs = _run(model, requests, self._config(model, requests, options), _generation_config(options))
        samples = []
        for output in outputs:
            ids = list(output.generated_tokens)
            reason = "eos" if ids[-1] in eos_ids else "length"
            samples.append(Sample(ids, reason, list(output.logprobs) or None))
        return samples

    def _dtype(self, device: torch.device) -> torch.dtype | None:
        """The type that training computes in where it is not that of the weights; None where it is.

        Autocast does not reach the thread that samples, and a cache has the type of the weights.
        """
        with self._precision():
            if torch.is_autocast_enabled(device.type):
                return torch.get_autocast_dtype(device.type)
        return torch.float32 if computes_in_float32(self._model) else None

    def _config(self, model: Any, requests: Sequence[Request], options: SamplingOptions) -> Any:
        values: dict[str, Any] = {"max_memory_percent": 0.5}  # training needs memory too
        if model.device.type == "cpu":
            page = self._settings.get("page_size", _CPU_PAGE)
            num_pages = sum(-(-(len(r.prompt_ids) + r.max_new_tokens) // page) + 1 for r in requests)
            num_tokens = max(len(requests), sum(len(request.prompt_ids) for request in requests))
            # A cache of a share of all memory would be cleared before each generation batch.
            values |= {"page_size": page, "num_blocks": num_pages * 5 // 4 + 2}
            values["max_batch_tokens"] = min(num_tokens, _CPU_BATCH_TOKENS)
        if model.dtype == torch.float32:
            values["auto_switch_to_flash"] = False  # its kernels are for half precision
        values |= self._settings
        # transformers reports log-probs after all filters.
        is_filtered = options.top_k or options.top_p < 1.0 or options.min_p or options.extra.keys() & _FILTERS
        values |= {"return_logprobs": not is_filtered, "seed": requests[0].seed % 2**32}
        return ContinuousBatchingConfig(**values)


def _generation_config(options: SamplingOptions) -> GenerationConfig:
    values = {name: getattr(options, name) for name in _FIELDS} | options.extra
    values |= {"do_sample": True, "pad_token_id": options.pad_id, "eos_token_id": end_ids(options) or -1}
    return GenerationConfig(**values)


def _run(model: Any, requests: Sequence[Request], config: Any, generation: GenerationConfig) -> list[Any]:
    """The outputs of all requests, in order."""
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=config)
    places = {}
    for i, request in enumerate(requests):
        ticket = manager.add_request(request.prompt_ids, max_new_tokens=request.max_new_tokens)
        places[ticket] = i
    outputs: list[Any] = [None] * len(requests)
    try:
        manager.start()
        while places:
            output = manager.get_result(timeout=1)
            if output is not None:
                sign_of_life()
            if output is None:
                if not manager.is_running():
                    raise _failure(manager.background_thread_status.fatal_error)
            elif output.is_finished():
                if output.error is not None:
                    raise _failure(output.error)
                outputs[places.pop(output.request_id)] = output
    finally:
        with existing_objects_skipped():  # the manager collects garbage twice when it stops
            manager.stop(block=True, hard_stop=bool(places))
    return outputs


def _failure(error: object) -> RuntimeError:
    return RuntimeError(
        f"transformers' continuous batching failed ({error}); transformers_continuous_batching_config sets its memory "
        "(num_blocks, page_size, max_batch_tokens), and use_transformers_continuous_batching=False leaves it"
    )


def _weights_in(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Context in which copies in `dtype` are in place of the parameters of `model`; no change for None.

    Those are its float32 parameters or, for a `dtype` of float32, those in bfloat16. They keep their gradients and
    optimizer states. A float32 head stays float32.
    """
    source = torch.bfloat16 if dtype == torch.float32 else torch.float32
    modules = [part for part in model.modules() if not isinstance(part, Float32Linear)] if dtype is not None else []
    found = {id(p): p for module in modules for p in module.parameters(recurse=False) if p.dtype == source}
    copies = {key: nn.Parameter(parameter.to(dtype), requires_grad=False) for key, parameter in found.items()}
    return parameters_replaced(modules, copies)


@contextmanager
def _attention_restored(model: Any) -> Iterator[None]:
    """Restores the attention implementation of `model` afterwards, also where the manager could not be made."""
    name = model.config._attn_implementation
    try:
        yield
    finally:
        if model.config._attn_implementation != name:
            model.set_attn_implementation(name)
