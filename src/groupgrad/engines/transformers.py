"""Engine that samples with the policy's own `generate` method (transformers).

`generate` draws all rows of a batch from one global random stream. This engine gives each row its own: it inverts the
cumulative distribution at one uniform number per token, so that a completion depends on its seed alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from groupgrad.activity import sign_of_life
from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.engines.stop_strings import StopStrings
from groupgrad.kernels.cumulative_sums import cumulative_sum
from groupgrad.models.unwrapping import unwrap
from groupgrad.scoring.forward import evaluation_mode
from groupgrad.scoring.fused_modules import as_trained
from groupgrad.scoring.vlm import padded_image_inputs, prompt_images

# With these options `generate` searches or filters in ways of its own, and rows share its random stream.
_NEEDS_PLAIN_SAMPLER = frozenset({"num_beams", "do_sample", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"})

# With these options the tokens before a completion matter, and left padding would count among them.
_LOOKS_BACK = frozenset(
    {
        "bad_words_ids",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "repetition_penalty",
        "sequence_bias",
        "watermarking_config",
    }
)


class TransformersEngine(BatchEngine):
    """Samples through `model.generate`, at most `max_rows` rows a call, in evaluation mode.

    `precision` makes training's autocast context. With `equal_lengths` only prompts of equal lengths share a call, for
    models whose recurrent state would include left padding. Without `use_cache` every token is computed from the whole
    text, for models that continue wrongly from cached keys and values.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        max_rows: int = 64,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        equal_lengths: bool = False,
        use_cache: bool = True,
    ):
        self._model, self._tokenizer, self._max_rows = model, tokenizer, max_rows
        self._equal_lengths, self._use_cache = equal_lengths, use_cache
        # `accelerate` puts autocast around the outermost module's forward pass, which an adapter's `generate` bypasses.
        self._precision = precision

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample per request, in order."""
        samples: list[Sample | None] = [None] * len(requests)
        # Rows of similar budgets and prompt lengths share a call: less padding, and no row exceeds its context.
        order = sorted(range(len(requests)), key=lambda i: (_call_key(requests[i]), len(requests[i].prompt_ids)))
        padded = not (self._equal_lengths or _needs_equal_lengths(unwrap(self._model), options))
        with (
            _inference_mode(unwrap(self._model)),
            evaluation_mode(self._model),
            self._precision(),
            as_trained(self._model),
        ):
            for chunk in _chunks(order, requests, self._max_rows, padded=padded):
                for i, sample in zip(chunk, self._generate([requests[i] for i in chunk], options)):
                    samples[i] = sample
        return [sample for sample in samples if sample is not None]

    def _generate(self, requests: list[Request], options: SamplingOptions) -> list[Sample]:
        model = unwrap(self._model)
        device = next(model.parameters()).device
        ids, mask = _left_padded([request.prompt_ids for request in requests], options.pad_id, device)
        images = [
            None if request.media is None else prompt_images(model, torch.tensor(request.prompt_ids), request.media)
            for request in requests
        ]
        padding = [ids.shape[1] - len(request.prompt_ids) for request in requests]
        view = padded_image_inputs(model, ids, images, padding)  # the model computes positions itself
        budget = requests[0].max_new_tokens
        config = _generation_config(options, budget)
        config.use_cache = config.use_cache and self._use_cache
        stops = StopStrings(options.extra.get("stop_strings") or (), self._tokenizer)
        kwargs: dict[str, Any] = {"attention_mask": mask, "generation_config": config, **view.inputs}
        if stops:
            kwargs["stopping_criteria"] = StoppingCriteriaList([_StopCriterion(stops, ids.shape[1])])
        if _NEEDS_PLAIN_SAMPLER & options.extra.keys():
            fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
            with fork, view.embedding_true_ids(model), _only_config(model, config):
                torch.manual_seed(requests[0].seed)
                output = model.generate(view.ids, **kwargs)  # pyright: ignore[reportCallIssue]
            return [_as_sample(row, None, options, stops) for row in output[:, ids.shape[1] :].tolist()]
        sampler = _RowSampler([request.seed for request in requests], budget, options, device)
        kwargs["logits_processor"] = LogitsProcessorList([*_warpers(options), sampler])
        with sampler.reading_logits(model), view.embedding_true_ids(model), _only_config(model, config):
            output = model.generate(view.ids, **kwargs)  # pyright: ignore[reportCallIssue]
        completions = output[:, ids.shape[1] :].tolist()
        return [_as_sample(row, logprobs, options, stops) for row, logprobs in zip(completions, sampler.logprobs())]


@contextmanager
def _inference_mode(model: Any) -> Iterator[None]:
    """Calls `for_inference()` and `for_training()` of models that have them, such as Unsloth's.

    Afterwards every module has its former mode, gradient checkpointing included.
    """
    for_inference, for_training = getattr(model, "for_inference", None), getattr(model, "for_training", None)
    if not (callable(for_inference) and callable(for_training)):
        yield
        return
    names = ("training", "gradient_checkpointing")
    modes = [
        (module, {name: vars(module)[name] for name in names if name in vars(module)}) for module in model.modules()
    ]
    for_inference()
    try:
        yield
    finally:
        for_training()
        for module, mode in modes:
            vars(module).update(mode)


class _StopCriterion(StoppingCriteria):
    """Ends a row at a stop string in its completion; `generate`'s own rule would also search the prompt."""

    def __init__(self, strings: StopStrings, prompt_width: int):
        self._strings, self._prompt_width = strings, prompt_width

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        rows = input_ids[:, self._prompt_width :][:, -self._strings.window :].tolist()
        return torch.tensor([self._strings.is_end(row) for row in rows], device=input_ids.device)  # pyright: ignore


def _as_sample(row: list[int], logprobs: list[float] | None, options: SamplingOptions, stops: StopStrings) -> Sample:
    """Truncates a row at its first end; `generate` fills the rest with padding."""
    eos_ids = end_ids(options)
    end = next((i + 1 for i, token in enumerate(row) if token in eos_ids), None)
    end = stops.end(row[:end]) or end
    ids = row[:end]
    return Sample(ids, "length" if end is None else "eos", None if logprobs is None else logprobs[: len(ids)])


def end_ids(options: SamplingOptions) -> list[int]:
    """The ids that end a completion."""
    eos_ids = options.extra.get("eos_token_id", options.eos_ids)
    return [] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else list(eos_ids)


class _RowSampler(LogitsProcessor):
    """Samples each row's next token from its own random stream and masks all others, so that `generate` takes it.

    It collects log-probs of the model's logits at the sampling temperature before any filter, as training scores them.
    """

    def __init__(self, seeds: list[int], max_tokens: int, options: SamplingOptions, device: torch.device):
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        draws = [torch.rand(max_tokens, generator=stream, dtype=torch.float64) for stream in streams]
        # Apple's GPUs have no float64, so tokens are sampled on the CPU.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._draws = torch.stack(draws, dim=1).to(self._device)  # (max_tokens, B)
        self._temperature = float(options.extra.get("temperature", options.temperature))
        self._logits: torch.Tensor | None = None
        self._steps = 0
        self._logprobs: list[torch.Tensor] = []

    @contextmanager
    def reading_logits(self, model: nn.Module) -> Iterator[None]:
        """Keeps the logits of every forward pass inside."""

        def keep_logits(_module: nn.Module, _inputs: Any, output: Any) -> None:
            logits = getattr(output, "logits", None)
            self._logits = None if logits is None else logits[:, -1].float()

        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
        handle = inner.register_forward_hook(keep_logits)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        try:
            yield
        finally:
            handle.remove()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        sign_of_life()
        draws = self._draws[self._steps]
        self._steps += 1
        cumulative = cumulative_sum(scores.to(self._device).double().softmax(dim=-1))
        # The last sum is 1 up to rounding; scaling the draw by it keeps the token inside the support.
        tokens = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)
        tokens = tokens.clamp(max=scores.shape[-1] - 1).to(scores.device)
        # A patched model may bypass the hook; its logits are then unknown.
        logits, self._logits = self._logits, None
        if logits is not None:
            logprobs = torch.log_softmax(logits / self._temperature, dim=-1).gather(-1, tokens)
            self._logprobs.append(logprobs.squeeze(-1))
        return torch.full_like(scores, float("-inf")).scatter(-1, tokens, 0.0)  # pyright: ignore[reportReturnType]

    def logprobs(self) -> Sequence[list[float] | None]:
        """Log-probs by row, one per step; None if the logits of some step are unknown."""
        if len(self._logprobs) < self._steps or not self._steps:
            return [None] * self._draws.shape[1]
        return torch.stack(self._logprobs, dim=1).tolist()


def _warpers(options: SamplingOptions) -> list[LogitsProcessor]:
    """Temperature and filters, in the order in which `generate` applies them."""
    values = {
        name: options.extra.get(name, getattr(options, name)) for name in ("temperature", "top_k", "top_p", "min_p")
    }
    warpers: list[LogitsProcessor] = []
    if values["temperature"] != 1.0:
        warpers.append(TemperatureLogitsWarper(float(values["temperature"])))
    if values["top_k"]:
        warpers.append(TopKLogitsWarper(top_k=int(values["top_k"])))
    if values["top_p"] < 1.0:
        warpers.append(TopPLogitsWarper(top_p=float(values["top_p"])))
    if values["min_p"]:
        warpers.append(MinPLogitsWarper(min_p=float(values["min_p"])))
    return warpers


def _generation_config(options: SamplingOptions, budget: int) -> GenerationConfig:
    uses_plain_sampler = bool(_NEEDS_PLAIN_SAMPLER & options.extra.keys())
    values: dict[str, Any] = {
        "max_new_tokens": budget,
        "do_sample": uses_plain_sampler,
        "repetition_penalty": options.repetition_penalty,
        "pad_token_id": options.pad_id,
        "disable_compile": True,
        "use_cache": True,
    }
    if options.cache_implementation is not None:
        values["cache_implementation"] = options.cache_implementation
    filters = {"temperature", "top_k", "top_p", "min_p"}
    if uses_plain_sampler:
        values |= {name: getattr(options, name) for name in filters}
        values |= options.extra
    else:
        values |= {name: value for name, value in options.extra.items() if name not in filters}
    values |= {"max_new_tokens": budget, "eos_token_id": end_ids(options) or None, "stop_strings": None}
    return GenerationConfig(**values)


@contextmanager
def _only_config(model: nn.Module, config: GenerationConfig) -> Iterator[None]:
    """Hides the model's own generation config, from which `generate` would fill every unset option."""
    owners: list[Any] = [model]
    if hasattr(model, "get_base_model"):
        owners.append(owners[0].get_base_model())
    saved = [(owner, owner.generation_config) for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    try:
        yield
    finally:
        for owner, original in saved:
            owner.generation_config = original


def _left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(prompt) for prompt in prompts)
    ids = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _call_key(request: Request) -> tuple[int, bool]:
    """Requests with equal keys may share a call of `generate`: equal budgets, and all or none with images."""
    return request.max_new_tokens, request.media is not None


def _needs_equal_lengths(model: Any, options: SamplingOptions) -> bool:
    """True if left padding of a prompt would change its completion.

    Virtual tokens of an adapter precede the padding, which would separate them from the prompt.
    """
    if options.repetition_penalty != 1.0 or _LOOKS_BACK & options.extra.keys():
        return True
    adapters = getattr(model, "peft_config", None) or {}
    return isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values())


def _chunks(order: list[int], requests: Sequence[Request], max_rows: int, *, padded: bool) -> Iterator[list[int]]:
    """Splits `order` into calls of at most `max_rows` requests, and unless `padded` of one prompt length."""

    def key(i: int) -> tuple[Any, int]:
        return _call_key(requests[i]), 0 if padded else len(requests[i].prompt_ids)

    for _, group in itertools.groupby(order, key):
        rows = list(group)
        yield from (rows[start : start + max_rows] for start in range(0, len(rows), max_rows))
