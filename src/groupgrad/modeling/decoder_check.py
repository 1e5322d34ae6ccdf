"""Whether a model looks to the right: completions can neither be sampled from nor trained in one that does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from groupgrad.errors import UnavailableError
from groupgrad.modeling.scoring.forward import evaluation_mode, unwrap
from groupgrad.modeling.self_check import logprob_difference, random_ids, tolerance

_TOKENS, _MORE = 9, 4
"""Random tokens that are looked at, and those that follow them the second time."""


@torch.no_grad()
def check_causal(model: nn.Module, precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """UnavailableError if what `model` says of a text changes when more tokens follow it.

    Encoders do, which transformers loads as language models all the same. Of all others this shows that padding on the
    right of a row, in the dense layout, reaches nothing on its left. No state is touched.
    """
    ids = random_ids(model, _TOKENS + _MORE, torch.Generator().manual_seed(2)).to(next(model.parameters()).device)
    with evaluation_mode(model), precision():
        alone, followed = (_logprobs(model, ids[:length]) for length in (_TOKENS, len(ids)))
    difference = logprob_difference(followed[:_TOKENS], alone, model)
    if difference > tolerance(model):
        inner: Any = unwrap(model)
        name = type(inner.get_base_model() if hasattr(inner, "get_base_model") else inner).__name__
        raise UnavailableError(
            f"{name} looks to the right: more tokens behind a text change what it says of the text, by "
            f"{difference:.2g} nats a token, as in an encoder. groupgrad trains decoder-only language models, in which "
            "a token sees those before it; of some encoders the config's is_decoder=True makes one"
        )


def _logprobs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) float32; adapters may put virtual tokens in front, which are left out."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(ids) :]
    return logits.float().log_softmax(dim=-1)
