"""The direct decode step: the logits of the model's modules, which are used wherever it does not apply."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from known_decoders import CHANGES, make
from noted_calls import note_calls
from sample_checks import assert_same_samples

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, runner
from groupgrad.engines.native.attention_layouts import ProbeLayout
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.engines.native.logits import last_logits
from groupgrad.models.families import CAUSAL_LMS

OPTIONS = SamplingOptions(max_new_tokens=30, eos_ids=(1,), pad_id=0)


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")


def calls(model: Any) -> Any:
    attention, token = ProbeLayout(), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        last_logits(model, token, token, attention, token)
    return attention.calls


def requests() -> list[Request]:
    return [Request([3 + i % 4] * (1 + 5 * (i % 4)), i, 18) for i in range(8)]


def test_every_family_is_tried():
    assert {f"{name}ForCausalLM" for name in CHANGES} == CAUSAL_LMS


@pytest.mark.quick("True")
@pytest.mark.parametrize("family", sorted(CHANGES))
@pytest.mark.parametrize("adapted", [False, True])
def test_direct_steps_give_the_texts_of_the_models_own(family: str, adapted: bool, monkeypatch, caplog):
    model = make(family, adapted=adapted)
    own, direct = note_calls(monkeypatch, runner, "step_logits"), note_calls(monkeypatch, DirectModel, "__call__")
    with caplog.at_level(logging.WARNING):
        native = NativeEngine(model)
        actual = native.sample(requests(), OPTIONS)
    assert not [record for record in caplog.records if record.name.startswith("groupgrad")]
    assert (len(own), len(direct)) == (0, native.statistics.num_steps)
    assert_same_samples(actual, NativeEngine(model, is_plain=True).sample(requests(), OPTIONS))


def test_models_that_it_does_not_fit(build):
    model = make("Llama")
    assert isinstance(direct_model(model, calls(model)), DirectModel)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *arguments: None)
    assert direct_model(model, calls(model)) == "LlamaMLP has a forward hook"
    handle.remove()
    assert isinstance(direct_model(model, {0: calls(model)[0]}), str)
    with torch.autocast("cpu", torch.bfloat16):
        assert "nor all on the CPU in a type" in str(direct_model(model, calls(model)))
    assert "nor all on the CPU in a type" in str(direct_model(model.to(torch.float16), calls(model)))
    for name in ("gemma2 (soft caps)", "gpt2", "qwen3-moe"):
        other = build(name)
        assert direct_model(other, calls(other)) == ""
