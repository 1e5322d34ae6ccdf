"""Models that look to the right are told from those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel

from groupgrad.errors import UnavailableError
from groupgrad.modeling.self_check import check_causal

SIZES: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_bert(**config: Any) -> BertLMHeadModel:
    torch.manual_seed(0)
    return BertLMHeadModel(BertConfig(vocab_size=48, **SIZES, **{"initializer_range": 0.3, **config}))


def test_no_decoder_looks_to_the_right(any_model: Any) -> None:
    """Recurrent, convolutional, in windows, with experts: what follows a text, padding too, changes nothing of it."""
    check_causal(any_model)


def test_an_encoder_is_refused() -> None:
    with pytest.raises(
        UnavailableError, match=r"BertLMHeadModel looks to the right: .* nats a token, as in an encoder"
    ):
        check_causal(make_bert())


def test_an_encoder_that_was_made_a_decoder_is_one() -> None:
    check_causal(make_bert(is_decoder=True))


def test_virtual_tokens_in_front_are_none_of_the_texts(build: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    check_causal(peft.get_peft_model(build("qwen3"), config))


def test_half_precision_and_modes(build: Any) -> None:
    model = build("qwen3").to(torch.bfloat16).train()
    check_causal(model)
    assert all(module.training for module in model.modules())
