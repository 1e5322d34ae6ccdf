"""Sampling by the `generate` method of the model that trains.

`generate` draws all rows of a batch from one global random stream. Here each row draws from its own, by inverting the
cumulative distribution at one uniform number a token, so a row's text is a function of its seed alone.
"""

from __future__ import annotations

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

from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.modeling.scoring.forward import evaluation_mode, unwrap
from groupgrad.modeling.vlm import ModelInputs, padded_image_inputs, prompt_images

# With these options `generate` searches or cuts in ways of its own: rows then share its random stream.
_OWN_SAMPLER = frozenset(
    {"num_beams", "do_sample", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "custom_generate"}
)

# With these options the tokens before a completion count, and padding on the left would count with them.
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
    """Samples through `model.generate`, at most `max_rows` rows a call, without dropout and in evaluation mode.

    `precision` makes the context that training's mixed precision computes in. With `equal_lengths` prompts share a call
    only if they have equally many tokens, for models whose states begin with what lies left of a prompt.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        max_rows: int = 64,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        equal_lengths: bool = False,
    ):
        self._model, self._tokenizer, self._max_rows = model, tokenizer, max_rows
        self._equal_lengths = equal_lengths
        # `accelerate` gives the outermost module training's mixed precision; an adapter's `generate` goes past it.
        self._precision = precision

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        """One sample a request, in order."""
        samples: list[Sample | None] = [None] * len(requests)
        # Rows of like budget and prompt length share a call: less padding, and no row runs past its context.
        # Rows with images are apart from those without.
        order = sorted(range(len(requests)), key=lambda i: (_kind(requests[i]), len(requests[i].prompt_ids)))
        padded = not (self._equal_lengths or _needs_equal_lengths(unwrap(self._model), options))
        with _switched_by_itself(unwrap(self._model)), evaluation_mode(self._model), self._precision():
            for chunk in _chunks(order, requests, self._max_rows, padded=padded):
                for i, sample in zip(chunk, self._generate([requests[i] for i in chunk], options)):
                    samples[i] = sample
        return [sample for sample in samples if sample is not None]

    def _generate(self, requests: list[Request], options: SamplingOptions) -> list[Sample]:
        model = unwrap(self._model)
        device = next(model.parameters()).device
        ids, mask = _left_padded([request.prompt_ids for request in requests], options.pad_id, device)
        view = _view(model, ids, requests)
        budget = requests[0].max_new_tokens
        config = _generation_config(options, budget)
        stop = _StopStrings(options.extra.get("stop_strings") or (), self._tokenizer, ids.shape[1])
        kwargs: dict[str, Any] = {"attention_mask": mask, "generation_config": config, **view.inputs}
        if stop.strings:
            kwargs["stopping_criteria"] = StoppingCriteriaList([stop])
        if _OWN_SAMPLER & options.extra.keys():
            fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
            with fork, view.embedding_true_ids(model), _only_config(model, config):
                torch.manual_seed(requests[0].seed)
                output = model.generate(view.ids, **kwargs)  # pyright: ignore[reportCallIssue]
            return [_cut(row, None, options, stop) for row in output[:, ids.shape[1] :].tolist()]
        sampler = _RowSampler([request.seed for request in requests], budget, options, device)
        kwargs["logits_processor"] = LogitsProcessorList([*_warpers(options), sampler])
        with sampler.watching(model), view.embedding_true_ids(model), _only_config(model, config):
            output = model.generate(view.ids, **kwargs)  # pyright: ignore[reportCallIssue]
        completions = output[:, ids.shape[1] :].tolist()
        return [_cut(row, logprobs, options, stop) for row, logprobs in zip(completions, sampler.logprobs())]


@contextmanager
def _switched_by_itself(model: Any) -> Iterator[None]:
    """Let a model that brings `for_inference()` and `for_training()`, as Unsloth's do, switch itself to the one and
    back to the other; afterwards every module is in the mode that it was in, gradient checkpointing included."""
    begin, end = getattr(model, "for_inference", None), getattr(model, "for_training", None)
    if not (callable(begin) and callable(end)):
        yield
        return
    names = ("training", "gradient_checkpointing")
    modes = [
        (module, {name: vars(module)[name] for name in names if name in vars(module)}) for module in model.modules()
    ]
    begin()
    try:
        yield
    finally:
        end()
        for module, mode in modes:
            vars(module).update(mode)


class _StopStrings(StoppingCriteria):
    """Ends a row when its completion contains one of some strings; `generate`'s own rule would look into the prompt."""

    def __init__(self, strings: str | Sequence[str], tokenizer: Any, prompt_width: int):
        self.strings = (strings,) if isinstance(strings, str) else tuple(strings)
        self._tokenizer, self._prompt_width = tokenizer, prompt_width
        # A token gives at least one byte, but for a few special ones.
        self._window = max((len(string.encode()) for string in self.strings), default=0) + 8

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        rows = input_ids[:, self._prompt_width :][:, -self._window :].tolist()
        return torch.tensor([self._is_hit(row) for row in rows], device=input_ids.device)  # pyright: ignore

    def end(self, row: list[int]) -> int | None:
        """Tokens up to and including the one that completes a string; None if none occurs."""
        if not self.strings:
            return None
        return next((n for n in range(1, len(row) + 1) if self._is_hit(row[max(0, n - self._window) : n])), None)

    def _is_hit(self, row: list[int]) -> bool:
        text = self._tokenizer.decode(row)
        return any(string in text for string in self.strings)


def _cut(row: list[int], logprobs: list[float] | None, options: SamplingOptions, stop: _StopStrings) -> Sample:
    """The row up to its first end; what `generate` filled in behind it is not part of it."""
    end = next((i + 1 for i, token in enumerate(row) if token in _eos_ids(options)), None)
    end = stop.end(row[:end]) or end
    ids = row[:end]
    return Sample(ids, "length" if end is None else "eos", None if logprobs is None else logprobs[: len(ids)])


def _eos_ids(options: SamplingOptions) -> list[int]:
    given = options.extra.get("eos_token_id", options.eos_ids)
    return [] if given is None else [given] if isinstance(given, int) else list(given)


class _RowSampler(LogitsProcessor):
    """Chooses each row's next token by the row's own random stream, and leaves `generate` no other choice.

    The log-probs that it notes are those of the model's own logits at the sampling temperature, as training will score
    them, whatever was cut from the distribution for sampling.
    """

    def __init__(self, seeds: list[int], max_tokens: int, options: SamplingOptions, device: torch.device):
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        draws = [torch.rand(max_tokens, generator=stream, dtype=torch.float64) for stream in streams]
        # Apple's GPUs have no float64: there the choice is made on the CPU.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._draws = torch.stack(draws, dim=1).to(self._device)  # (max_tokens, B)
        self._temperature = float(options.extra.get("temperature", options.temperature))
        self._logits: torch.Tensor | None = None
        self._steps = 0
        self._logprobs: list[torch.Tensor] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Look at the logits of every forward pass inside."""

        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            logits = getattr(output, "logits", None)
            self._logits = None if logits is None else logits[:, -1].float()

        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore
        handle = inner.register_forward_hook(look)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
        try:
            yield
        finally:
            handle.remove()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        draws = self._draws[self._steps]
        self._steps += 1
        cumulative = scores.to(self._device).double().softmax(dim=-1).cumsum(dim=-1)
        # The last sum is 1 up to rounding; scaling the draw by it keeps the choice inside the support.
        chosen = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)
        chosen = chosen.clamp(max=scores.shape[-1] - 1).to(scores.device)
        # A model patched from outside may go past the hook that shows them.
        logits, self._logits = self._logits, None
        if logits is not None:
            logprobs = torch.log_softmax(logits / self._temperature, dim=-1).gather(-1, chosen)
            self._logprobs.append(logprobs.squeeze(-1))
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)  # pyright: ignore[reportReturnType]

    def logprobs(self) -> Sequence[list[float] | None]:
        """By row, one number a step taken; None if the model's logits were not seen in every step."""
        if len(self._logprobs) < self._steps or not self._steps:
            return [None] * self._draws.shape[1]
        return torch.stack(self._logprobs, dim=1).tolist()


def _warpers(options: SamplingOptions) -> list[LogitsProcessor]:
    """The cuts of the distribution, in the order in which `generate` applies them."""
    chosen = {
        name: options.extra.get(name, getattr(options, name)) for name in ("temperature", "top_k", "top_p", "min_p")
    }
    warpers: list[LogitsProcessor] = []
    if chosen["temperature"] != 1.0:
        warpers.append(TemperatureLogitsWarper(float(chosen["temperature"])))
    if chosen["top_k"]:
        warpers.append(TopKLogitsWarper(top_k=int(chosen["top_k"])))
    if chosen["top_p"] < 1.0:
        warpers.append(TopPLogitsWarper(top_p=float(chosen["top_p"])))
    if chosen["min_p"]:
        warpers.append(MinPLogitsWarper(min_p=float(chosen["min_p"])))
    return warpers


def _generation_config(options: SamplingOptions, budget: int) -> GenerationConfig:
    own_sampler = bool(_OWN_SAMPLER & options.extra.keys())
    values: dict[str, Any] = {
        "max_new_tokens": budget,
        "do_sample": own_sampler,
        "repetition_penalty": options.repetition_penalty,
        "pad_token_id": options.pad_id,
        "disable_compile": True,
        "use_cache": True,
    }
    if options.cache_implementation is not None:
        values["cache_implementation"] = options.cache_implementation
    cuts = {"temperature", "top_k", "top_p", "min_p"}
    if own_sampler:
        values |= {name: getattr(options, name) for name in cuts}
        values |= options.extra
    else:
        values |= {name: value for name, value in options.extra.items() if name not in cuts}
    values |= {"max_new_tokens": budget, "eos_token_id": _eos_ids(options) or None, "stop_strings": None}
    return GenerationConfig(**values)


@contextmanager
def _only_config(model: nn.Module, config: GenerationConfig) -> Iterator[None]:
    """Keep the model's own generation config out: `generate` would fill every option left unset from it."""
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


def _view(model: nn.Module, ids: torch.Tensor, requests: list[Request]) -> ModelInputs:
    """What the model is given to see the requests' images; positions it finds itself."""
    sights = [
        None if request.media is None else prompt_images(model, torch.tensor(request.prompt_ids), request.media)
        for request in requests
    ]
    return padded_image_inputs(model, ids, sights, [ids.shape[1] - len(request.prompt_ids) for request in requests])


def _kind(request: Request) -> tuple[int, bool]:
    """Requests of one call of `generate` have this in common."""
    return request.max_new_tokens, request.media is not None


def _needs_equal_lengths(model: Any, options: SamplingOptions) -> bool:
    """True if padding on the left of a prompt would change what comes after it.

    Virtual tokens of an adapter stand left of the padding, so that it moves them away from the prompt.
    """
    if options.repetition_penalty != 1.0 or _LOOKS_BACK & options.extra.keys():
        return True
    adapters = getattr(model, "peft_config", None) or {}
    return isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values())


def _chunks(order: list[int], requests: Sequence[Request], max_rows: int, *, padded: bool) -> Iterator[list[int]]:
    """Runs of `order` of at most `max_rows` requests of one kind, and unless `padded` one prompt length."""

    def kind(i: int) -> tuple[Any, int]:
        return _kind(requests[i]), 0 if padded else len(requests[i].prompt_ids)

    chunk: list[int] = []
    for i in order:
        if chunk and (len(chunk) == max_rows or kind(i) != kind(chunk[0])):
            yield chunk
            chunk = []
        chunk.append(i)
    if chunk:
        yield chunk
