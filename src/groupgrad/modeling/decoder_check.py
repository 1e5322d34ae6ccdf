"""Rejects models with non-causal attention, in which completions can neither be sampled nor trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from groupgrad.errors import UnavailableError
from groupgrad.modeling.adapters import base_model
from groupgrad.modeling.scoring.forward import evaluation_mode, unwrap
from groupgrad.modeling.self_check import logprob_difference, random_ids, tolerance

_NUM_TOKENS, _NUM_APPENDED = 9, 4
"""Random tokens that are compared, and tokens appended to them in the second pass."""


@torch.no_grad()
def check_causal(model: nn.Module, precision: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
    """UnavailableError if tokens appended to a text change the model's logits for the text.

    Encoders fail this test, although transformers loads some of them as causal language models. For all other models it
    shows that padding on the right, as in the dense layout, does not change a row. Module modes stay as they are.
    """
    generator = torch.Generator().manual_seed(2)
    ids = random_ids(model, _NUM_TOKENS + _NUM_APPENDED, generator).to(next(model.parameters()).device)
    with evaluation_mode(model), precision():
        alone, followed = (_logprobs(model, ids[:length]) for length in (_NUM_TOKENS, len(ids)))
    difference = logprob_difference(followed[:_NUM_TOKENS], alone, model)
    if difference > tolerance(model):
        raise UnavailableError(
            f"{type(base_model(unwrap(model))).__name__} looks to the right: more tokens behind a text change what it "
            f"says of the text, by {difference:.2g} nats a token, as in an encoder. groupgrad trains decoder-only "
            "language models, in which a token sees those before it; of some encoders the config's is_decoder=True "
            "makes one"
        )


def _logprobs(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """(T, V) float32, without the virtual tokens that an adapter may put in front."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(ids) :]
    return logits.float().log_softmax(dim=-1)
