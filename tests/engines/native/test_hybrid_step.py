"""The compiled decode step of models that have recurrent layers beside attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from base_fixtures import build_family
from known_decoders import SIZES, direct_form
from sample_checks import assert_same_samples, drained
from torch import nn

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.engines.native.cpp_step import CompiledModel, CompiledStep
from groupgrad.engines.native.engine import NativeEngine

WIDTHS = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 512}
COMMON: dict[str, Any] = {**SIZES, **WIDTHS, "head_dim": 16}
OF_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
"""No width is a multiple of a vector's; two heads of values share one of keys; a quarter of a head rotates."""

CHANGES: dict[str, dict[str, Any]] = {
    "odd sizes": {},
    "whole vectors": {"linear_key_head_dim": 64, "linear_value_head_dim": 128, "hidden_size": 64},
    "whole heads rotate": {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}
    },
    "biases": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "five taps": {"linear_conv_kernel_dim": 5},
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronH",
        {
            "layer_types": ["mamba", "mlp", "attention", "mamba", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 20,
            "ssm_state_size": 12,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "bamba": (
        "Bamba",
        {
            "attn_layer_indices": [2],
            "mamba_n_heads": 4,
            "mamba_d_head": 12,
            "mamba_d_state": 20,
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8, "conv_bias": True},
    ),
}
"""Family and settings; as above no width is a multiple of a vector's."""

OPTIONS = SamplingOptions(max_new_tokens=40, eos_ids=(1,), pad_id=0)


def make(**changes: Any) -> Any:
    return build_family("Qwen3_5Text", scale=0.1, **{**COMMON, **OF_DELTA, **changes})


def make_other(name: str) -> Any:
    family, own = OTHERS[name]
    number = {"num_hidden_layers": len(own.get("layer_types", range(4)))}
    return build_family(family, scale=0.1, **{**COMMON, **number, **own})


def requests(keep: bool = False) -> list[Request]:
    lengths = (1, 6, 11, 130)
    return [Request([3 + i % 4] * lengths[i % 4], i, 5 + 3 * (i % 7), keep=keep) for i in range(14)]


def by_modules(model: Any, asked: list[Request]) -> list[Sample]:
    """Samples through the model's modules."""
    return NativeEngine(model, is_plain=True).sample(asked, OPTIONS)


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [*CHANGES, *OTHERS])
def test_compiled_steps_give_the_texts_of_the_models_own(name: str, monkeypatch, caplog) -> None:
    model, counts = make_other(name) if name in OTHERS else make(**CHANGES[name]), {"steps": 0}

    def watch(method: str) -> None:
        original = getattr(CompiledStep, method)

        def counting(*args: Any) -> Any:
            result = original(*args)
            counts["steps"] += len(result) if method == "sample" else 1
            return result

        monkeypatch.setattr(CompiledStep, method, counting)

    watch("sample")
    watch("__call__")
    engine = NativeEngine(model)
    with caplog.at_level(logging.WARNING):
        samples = engine.sample(requests(), OPTIONS)
    assert counts["steps"] == engine.statistics.num_steps
    assert not [record for record in caplog.records if record.name.startswith("groupgrad")]
    assert {sample.finish_reason for sample in samples} == {"eos", "length"}
    assert_same_samples(samples, by_modules(model, requests()), relative=0.0)


@pytest.mark.parametrize("name", ["qwen3_5", *OTHERS])
def test_a_row_has_the_same_bits_whatever_is_sampled_beside_it(name: str, threads: Callable[[int], None]) -> None:
    model = make_other(name) if name in OTHERS else make(**CHANGES["whole vectors"])
    asked = [Request([5, 6, 7, 8, 9], i, 5 + 3 * (i % 7)) for i in range(14)]
    together = NativeEngine(model).sample(asked, OPTIONS)
    threads(2 if torch.get_num_threads() == 1 else 1)
    assert NativeEngine(model).sample(asked, OPTIONS) == together
    for number in (0, 3, 10):
        assert NativeEngine(model).sample([asked[number]], OPTIONS) == [together[number]]


@pytest.mark.parametrize("name", ["qwen3_5", *OTHERS])
def test_rows_that_are_continued_have_the_states_behind_their_last_token(name: str) -> None:
    """Several steps run in one call, and a row may end in the first of them."""
    model, asked, reply = make_other(name) if name in OTHERS else make(), requests(keep=True), [7, 8]
    engine = NativeEngine(model)
    with engine.session(OPTIONS) as session:
        tickets, ended = [session.submit(request) for request in asked], {}
        ended.update(drained(session))
        turns = [ended[ticket] for ticket in tickets]
        contexts = [request.prompt_ids + turn.ids + reply for request, turn in zip(asked, turns)]
        again = [Request(ids, 50 + i, 9, continues=tickets[i]) for i, ids in enumerate(contexts)]
        second = [session.submit(request) for request in again]
        ended.update(drained(session))
    assert any(turn.finish_reason == "eos" for turn in turns)
    alone = [Request(ids, 50 + i, 9) for i, ids in enumerate(contexts)]
    assert_same_samples([ended[ticket] for ticket in second], by_modules(model, alone), relative=0.0)


def test_models_that_it_does_not_fit() -> None:
    assert isinstance(direct_form(make()), CompiledModel)
    model = make()
    model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *_: None)
    assert isinstance(direct_form(model), str)
    model = make()
    model.model.layers[2].linear_attn.norm.variance_epsilon = 1e-3
    assert isinstance(direct_form(model), str)
    model = make()
    model.model.layers[2].linear_attn.activation = "gelu"
    assert isinstance(direct_form(model), str)
    model = make()
    model.model.layers[3].linear_attn.out_proj = nn.Sequential(model.model.layers[3].linear_attn.out_proj)
    assert isinstance(direct_form(model), str)
    assert isinstance(direct_form(make().double()), str)
    assert isinstance(direct_form(make(layer_types=["linear_attention"] * 4)), str)
    model = make_other("nemotron_h")
    model.model.layers[1].mixer.act_fn = nn.ReLU()
    assert isinstance(direct_form(model), str)
    model = make_other("nemotron_h")
    model.model.layers[3].mixer.activation = "gelu"
    assert isinstance(direct_form(model), str)


def test_time_steps_are_bounded_as_in_the_model() -> None:
    model = make_other("bamba")
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mamba.time_step_limit = (0.6, 0.7)
    assert isinstance(direct_form(model), CompiledModel)
    assert_same_samples(NativeEngine(model).sample(requests(), OPTIONS), by_modules(model, requests()), relative=0.0)
