"""Checks that a model is a language model with usable weights, and that its tokenizer belongs to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from groupgrad.models.quantized import is_packed
from groupgrad.models.shards import local_part
from groupgrad.models.unwrapping import unwrap


def check_language_model(model: nn.Module) -> None:
    """TypeError for a model that gives no scores of next tokens, ValueError for weights that are not finite."""
    inner: Any = unwrap(model)
    name = type(inner).__name__
    if not hasattr(inner, "get_output_embeddings") or not hasattr(inner, "config"):
        raise TypeError(
            f"model is a {name}, which is no language model of transformers; load one with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    if inner.get_output_embeddings() is None:
        raise TypeError(
            f"model is a {name}, which has no output head, so it gives no scores of tokens; load the policy "
            "with AutoModelForCausalLM.from_pretrained(...); classifiers go into reward_funcs"
        )
    if bad := nonfinite_weights(inner):
        raise ValueError(f"{bad}, so every score would be NaN; load a checkpoint whose weights are finite")


def nonfinite_weights(model: nn.Module, *, trained_only: bool = False) -> str | None:
    """Names the first parameter with numbers that are not finite; None if there is none.

    With `trained_only` frozen parameters are not read. Of a sharded parameter this rank's part is read.
    """
    for name, parameter in model.named_parameters():
        if trained_only and not parameter.requires_grad:
            continue
        parameter = local_part(parameter)
        if parameter.is_meta or is_packed(parameter) or parameter.dtype.itemsize < 2:  # quantized
            continue
        # The sum needs no copy of the weights, and is finite only if all of them are. MPS has no float64.
        dtype = torch.float32 if parameter.device.type == "mps" else torch.float64
        if parameter.numel() and not bool(parameter.detach().sum(dtype=dtype).isfinite()):
            num_bad = int((~torch.isfinite(parameter)).sum())
            return f"{num_bad} of {parameter.numel()} numbers of the model's {name} are NaN or infinite"
    return None


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """ValueError if the tokenizer has tokens without a row in the model's embeddings.

    Special tokens are allowed that nothing writes, neither the chat template nor the ends and the padding of rows:
    text-only variants of models with images share the tokenizer of the others, and with it the placeholder of an image.
    """
    inner: Any = unwrap(model)
    num_rows = int(getattr(inner.get_input_embeddings(), "num_embeddings", 0))
    num_tokens = len(tokenizer)
    if not num_rows or num_tokens <= num_rows:
        return
    written = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    added, template = tokenizer.added_tokens_decoder, str(getattr(tokenizer, "chat_template", None) or "")
    beyond = [added.get(index) for index in range(num_rows, num_tokens)]
    is_unused = all(token is not None and token.special and str(token) not in template for token in beyond)
    if not is_unused or any(index is not None and index >= num_rows for index in written):
        raise ValueError(
            f"the tokenizer has {num_tokens} tokens, but the model's embeddings have {num_rows} rows, so tokens from "
            f"{num_rows} on cannot be read; give the model's own tokenizer, or call "
            f"model.resize_token_embeddings({num_tokens}) first"
        )
