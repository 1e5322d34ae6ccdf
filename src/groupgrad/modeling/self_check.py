"""Start-up checks of the user's model: its attention is causal, and its fastest layout gives the dense log-probs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from groupgrad import compat
from groupgrad.batch import Batch, TokenScores
from groupgrad.errors import UnavailableError
from groupgrad.modeling.quantized import rounds_to_int8
from groupgrad.modeling.scoring.attention import plannable
from groupgrad.modeling.scoring.forward import ForwardOptions, InputLayout, build_batch, evaluation_mode, score_tokens
from groupgrad.modeling.scoring.logit_transform import logit_transform
from groupgrad.modeling.unwrapping import base_model, is_multimodal, output_head, placeholder_ids, unwrap
from groupgrad.types import Prompt

# Two orders of the same additions differ by about 1e-5 (float32) and 0.05 (half precision, TF32) by rounding alone. A
# wrong mask or position makes several nats on a trained model and 0.01 or more on a random one.
TOLERANCE_FLOAT32, TOLERANCE_HALF = 1e-3, 0.25
"""Nats that log-probs may differ by: the largest over all tokens in float32, their mean in half precision."""

TOLERANCE_HALF_BALANCE = 0.02
"""Relative error allowed for the load-balancing loss in half precision, where rounding may reroute tokens."""

_PROMPT_LENGTHS, _ROWS = (7, 12), ((0, 5), (1, 8), (0, 11), (1, 3), (0, 1))
"""Prompt lengths, and (prompt, completion length) of each row."""

_COPIES_ON_GPU = 8
"""Repetitions of these prompts and rows on a GPU, where short inputs would run other kernels than long ones."""

_LENGTHS_WITH_IMAGES = (4, 2)
"""Completion lengths of the rows that continue an example prompt with images."""

_NUM_CAUSAL, _NUM_APPENDED = 9, 4
"""Random tokens that `check_causal` compares, and tokens appended to them in its second pass."""


@dataclass(slots=True, frozen=True)
class LayoutReport:
    """The layout in which a model is run, and the reason."""

    layout: InputLayout
    tiled_head: bool
    """The output head is computed in tiles."""
    reason: str | None
    """Why this is not the shared layout with a tiled head; None if it is."""
    difference: float | None
    """Nats between its log-probs and the plain dense ones on random tokens; None if they were not compared."""
    weighs_balance: bool = False
    """The load-balancing loss is right for prompts that are computed once for several rows."""

    def options(self, options: ForwardOptions) -> ForwardOptions:
        """`options` for a model with this report."""
        return replace(
            options,
            layout="dense" if self.layout == "dense" else None,
            tiled_head=self.tiled_head,
            weighs_balance=self.weighs_balance,
        )


def check_layout(
    model: nn.Module,
    options: ForwardOptions,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    example: Prompt | None = None,
) -> LayoutReport:
    """Finds the fastest layout and head that give the log-probs of the plain dense pass on random tokens.

    A VLM is also run on the images of `example`, a prompt made by the user's processor; ValueError if it fails on them.
    Random streams, module modes and gradients stay as they are.
    """
    obstacle = plannable(model)
    batch, reasons, difference = random_batch(model, example), [] if obstacle is None else [obstacle], None
    candidates: list[tuple[InputLayout, bool]] = [("shared", True), ("shared", False), ("dense", True)]
    head, head_calls = output_head(model), []
    with torch.no_grad(), evaluation_mode(model), precision():
        with nullcontext() if head is None else head.register_forward_pre_hook(lambda *_: head_calls.append(None)):
            expected = _plain_scores(model, batch, options)
        can_tile = False
        if logit_transform(unwrap(model)) is None:
            reasons.append("it is not known what the model makes of its output head")
        elif not head_calls:
            reasons.append("it multiplies with its output head's weight itself")
        else:
            can_tile = True
        for layout, tiled_head in candidates:
            if (tiled_head and not can_tile) or (layout != "dense" and obstacle is not None):
                continue
            name = f"{layout} layout with the {'tiled' if tiled_head else 'plain'} head"
            try:
                candidate = replace(options, layout=layout, tiled_head=tiled_head, aux_loss=False)
                scores = score_tokens(model, batch, candidate)
                difference = logprob_difference(scores.logprobs, expected.logprobs, model)
            except Exception as error:  # model code may raise anything; the dense layout remains
                reasons.append(f"the {name} failed: {type(error).__name__}: {error}")
                continue
            if difference <= tolerance(model):
                balance = layout == "shared" and options.aux_loss and _weighs_balance(model, batch, options)
                return LayoutReport(layout, tiled_head, "; ".join(reasons) or None, difference, balance)
            reasons.append(f"log-probs of the {name} differ by {difference:.2g} nats on random tokens")
    return LayoutReport("dense", False, "; ".join(reasons), difference)


def _plain_scores(model: nn.Module, batch: Batch, options: ForwardOptions) -> TokenScores:
    try:
        return score_tokens(model, batch, replace(options, layout="dense", tiled_head=False, aux_loss=False))
    except Exception as error:  # model code may raise anything
        if batch.media is None:
            raise
        raise ValueError(
            f"{type(unwrap(model)).__name__} fails at a prompt with one small image as this processor makes it "
            f"({type(error).__name__}: {error}); use the processor that belongs to the model, or pass "
            "processing_class=processor.tokenizer to train on text alone"
        ) from error


@torch.no_grad()
def check_causal(model: nn.Module, precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """UnavailableError if tokens appended to a text change the model's logits for the text.

    Encoders fail this test, although transformers loads some of them as causal language models. For all other models it
    shows that padding on the right, as in the dense layout, does not change a row. Module modes stay as they are.
    """
    generator = torch.Generator().manual_seed(2)
    ids = random_ids(model, _NUM_CAUSAL + _NUM_APPENDED, generator).to(next(model.parameters()).device)
    with evaluation_mode(model), precision():
        # An adapter may put virtual tokens in front, so the rows are counted from the end.
        alone, followed = (
            model(input_ids=part[None], use_cache=False).logits[0, -len(part) :].float().log_softmax(dim=-1)
            for part in (ids[:_NUM_CAUSAL], ids)
        )
    difference = logprob_difference(followed[:_NUM_CAUSAL], alone, model)
    if difference > tolerance(model):
        raise UnavailableError(
            f"{type(base_model(unwrap(model))).__name__} looks to the right: more tokens behind a text change what it "
            f"says of the text, by {difference:.2g} nats a token, as in an encoder. groupgrad trains decoder-only "
            "language models, in which a token sees those before it; of some encoders the config's is_decoder=True "
            "makes one"
        )


def random_batch(model: nn.Module, example: Prompt | None = None) -> Batch:
    """A small ragged batch of random token ids on the model's device.

    For a VLM some rows continue `example`, a prompt with images, and contain a placeholder that stands for no image.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    copies = _copies(device)
    prompt_lengths, lengths = list(_PROMPT_LENGTHS) * copies, [length for _, length in _ROWS] * copies
    prompt_of_row = [prompt + copy * len(_PROMPT_LENGTHS) for copy in range(copies) for prompt, _ in _ROWS]
    ids = random_ids(model, sum(lengths) + sum(prompt_lengths), generator).split([*lengths, *prompt_lengths])
    completions, prompts = ([row.tolist() for row in part] for part in (ids[: len(lengths)], ids[len(lengths) :]))
    media = None
    if example is not None and example.media is not None and is_multimodal(model):
        vocab_size = _text_config(model).vocab_size
        placeholder = [token for token in placeholder_ids(model) if token < vocab_size][:1]
        for row in random_ids(model, sum(_LENGTHS_WITH_IMAGES), generator).split(list(_LENGTHS_WITH_IMAGES)):
            completions.append([*row.tolist(), *placeholder, int(row[0])])
            prompt_of_row.append(len(prompts))
        prompts.append(example.ids)
        media = (*[None] * len(prompt_lengths), example.media)
    return build_batch(prompts, prompt_of_row, completions, media).to(device)


def _copies(device: torch.device) -> int:
    return _COPIES_ON_GPU if device.type == "cuda" else 1


def _text_config(model: nn.Module) -> Any:
    inner: Any = unwrap(model)
    return inner.config.get_text_config()


def random_ids(model: nn.Module, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) random ids of the model's vocabulary, without the padding token and placeholders of images."""
    config = _text_config(model)
    pad = getattr(config, "pad_token_id", None)
    ids = torch.randint(0, config.vocab_size, (count,), generator=generator)
    # Some models warn about a missing mask when they find the padding token.
    special = torch.tensor([-1 if pad is None else pad, *placeholder_ids(model)])
    while bool((is_special := torch.isin(ids, special)).any()):
        ids = torch.where(is_special, (ids + 1) % config.vocab_size, ids)
    return ids


def reversed_prompts(batch: Batch) -> Batch:
    """The batch with each prompt's tokens reversed, so that it shares no prompt with the original."""
    bounds = batch.prompt_offsets.tolist()
    reversed_ids = [batch.prompt_ids[a:b].flip(0) for a, b in pairwise(bounds)]
    return replace(batch, prompt_ids=torch.cat(reversed_ids))


def _weighs_balance(model: nn.Module, batch: Batch, options: ForwardOptions) -> bool:
    """True if the load-balancing loss with shared prompts, each weighted by its rows, equals the unshared one."""
    try:
        packed, shared = (
            score_tokens(model, batch, replace(options, layout=layout, aux_loss=True)).aux_loss
            for layout in ("packed", "shared")
        )
    except Exception:  # model code may raise anything; the packed layout remains
        return False
    if packed is None or shared is None:
        return False
    relative = TOLERANCE_HALF_BALANCE if _is_half(model) else TOLERANCE_FLOAT32
    return bool((shared - packed).abs() <= relative * packed.abs())


def logprob_difference(measured: torch.Tensor, expected: torch.Tensor, model: nn.Module) -> float:
    """Nats between two sets of log-probs, comparable with `tolerance`; inf if a value is not finite."""
    gaps = (measured.float() - expected.float()).abs()
    gap = float(gaps.mean() if _is_half(model) else gaps.max())
    return gap if math.isfinite(gap) else math.inf


def tolerance(model: nn.Module) -> float:
    """Nats that rounding may make in the precision of `model`."""
    return TOLERANCE_HALF if _is_half(model) else TOLERANCE_FLOAT32


def _is_half(model: nn.Module) -> bool:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if rounds_to_int8(model):
        return True
    # Offloaded weights are on the meta device until they are used.
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if "cuda" in devices and torch.float32 in dtypes and compat.multiplies_in_tf32():
        return True
    return bool(dtypes - {torch.float32, torch.float64}) or any(map(torch.is_autocast_enabled, devices))
