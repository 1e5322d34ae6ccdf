"""The start-up check of the user's model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mixed_tokens import mixing
from noted_calls import note_calls
from simulated_cuda import to_cuda
from transformers import BertConfig, BertLMHeadModel

from groupgrad.errors import UnavailableError
from groupgrad.scoring import flex_attention as flex
from groupgrad.scoring import self_check as startup
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.layout import flat_layout
from groupgrad.scoring.rounding import TOLERANCE_FLOAT32, TOLERANCE_HALF, Rounding
from groupgrad.scoring.self_check import check_causal, check_layout, random_batch


def test_every_architecture_is_causal_and_gets_its_fastest_layout(any_model):
    """Appended tokens, padding too, change no logits: recurrent, convolutional, sliding-window and expert models."""
    check_causal(any_model)
    report = check_layout(any_model, ForwardOptions())
    name = type(any_model).__name__
    own_attention = {"BloomForCausalLM", "FalconForCausalLM", "GPTNeoForCausalLM", "MptForCausalLM", "XGLMForCausalLM"}
    dense = {"RecurrentGemmaForCausalLM", "MambaForCausalLM", *own_attention}
    assert report.layout == ("dense" if name in dense else "shared"), report
    assert report.tiled_head
    assert (report.reason is None) == (name not in dense)
    assert report.difference is not None
    assert report.difference < 1e-4


def test_a_model_with_unknown_attention_is_run_dense(build):
    """A layer that mixes neighbouring tokens is right in the dense layout and wrong for packed rows."""
    model = mixing(build("llama"))
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head) == ("dense", True)
    assert report.reason is not None
    assert "log-probs of the shared layout with the tiled head differ by" in report.reason
    assert report.options(ForwardOptions()).layout == "dense"


def _scaled(logits):
    return logits * 1.5


def _one_forbidden(logits):
    return torch.cat([torch.full_like(logits[..., :1], float("-inf")), logits[..., 1:]], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [_scaled, _one_forbidden])
def test_a_model_that_changes_its_logits_keeps_its_own_head(build, change, dtype):
    """One forbidden token of many changes the log-probs of the others by less than a tolerance."""
    model = build("llama").to(dtype)
    model.lm_head.register_forward_hook(lambda module, inputs, output: change(output))
    report = check_layout(model, ForwardOptions())
    assert (report.layout, report.tiled_head) == ("shared", False)
    assert (
        report.reason == "code changes its logits behind the output head, in a way that its configuration does not say"
    )


def test_a_failing_flat_pass_falls_back_to_dense(build, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(startup, "flat_obstacle", lambda model: None)
    attention = model.model.layers[0].self_attn
    plain = attention.forward

    def forward(hidden_states, **kwargs):
        if hidden_states.shape[0] == 1:
            raise RuntimeError("rows only")
        return plain(hidden_states, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    report = check_layout(model, ForwardOptions())
    assert report.layout == "dense"
    assert "failed: RuntimeError: rows only" in str(report.reason)


def test_the_check_changes_no_state(build):
    model = build("qwen3").train()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    check_layout(model, ForwardOptions())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_differences_are_measured_by_precision(build):
    model = build("qwen3")
    actual, expected = torch.tensor([0.0, 0.5]), torch.tensor([0.0, 0.25])
    rounding = Rounding.of(model)
    assert (rounding.gap(actual, expected), rounding.tolerance) == (0.25, TOLERANCE_FLOAT32)
    rounding = Rounding.of(model.to(torch.float16))
    assert (rounding.gap(actual, expected), rounding.tolerance) == (0.125, TOLERANCE_HALF)
    assert rounding.gap(torch.tensor([float("nan"), 0.0]), expected) == float("inf")


@pytest.mark.parametrize(("dtype", "name", "eps"), [(torch.bfloat16, "bf16", 2**-7), (torch.float16, "fp16", 2**-10)])
def test_mixed_precision_has_the_tolerance_of_half_precision(build, dtype, name, eps):
    """The rounding is that of the contexts in which a check computes, wherever it is asked for."""
    model = build("qwen3")
    mixed = Rounding.of(model, lambda: torch.autocast("cpu", dtype=dtype))
    assert (mixed.eps, mixed.tolerance) == (eps, TOLERANCE_HALF)
    assert Rounding.of(model, mixed_precision=name) == mixed
    assert Rounding.of(model).tolerance == TOLERANCE_FLOAT32


def test_integer_parameters_do_not_round():
    model = torch.nn.Linear(2, 2)
    model.register_parameter("codes", torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False))
    assert Rounding.of(model).eps == 2**-23


def test_tf32_has_the_tolerance_of_half_precision_on_a_gpu(build, tf32):
    model = build("qwen3")
    assert Rounding.of(model).tolerance == TOLERANCE_FLOAT32
    assert Rounding.of(to_cuda(model)) == Rounding(2**-10)


@pytest.mark.parametrize("temperature", [0.01, 5.0])
def test_a_temperature_changes_no_layout(build, temperature, monkeypatch):
    """A low one multiplies rounding by its inverse, which is no difference between layouts."""
    model = build("qwen3")
    seen = note_calls(monkeypatch, startup, "score_tokens", lambda model, batch, options: options.temperature)
    report = check_layout(model, ForwardOptions(temperature=temperature))
    assert set(seen) == {1.0}
    assert report.options(ForwardOptions(temperature=temperature)).temperature == temperature


def test_bfloat16_models_pass(build):
    assert check_layout(build("qwen3").to(torch.bfloat16), ForwardOptions()).layout == "shared"


def test_the_random_batch_is_ragged_and_shares_prompts(build):
    batch = random_batch(build("qwen3"))
    assert batch.offsets.diff().unique().numel() > 2
    assert len(batch.prompt_of_row) > len(batch.prompt_offsets) - 1
    assert int(batch.completion_ids.max()) < 48
    assert not bool((batch.completion_ids == 0).any())


def test_a_gpu_is_checked_with_long_inputs(build, monkeypatch):
    """The prompts and rows of a GPU check fill two tiles of flex attention."""
    copies = startup._copies(torch.device("cuda", 1))
    monkeypatch.setattr(startup, "_copies", lambda device: copies)
    model = build("qwen3")
    batch = random_batch(model)
    assert len(flat_layout(batch).ids) > 2 * flex._BLOCK
    assert batch.num_prompts == len(batch.prompt_of_row.unique())
    assert check_layout(model, ForwardOptions()).layout == "shared"


@pytest.mark.parametrize("pad", [None, 47])
def test_the_padding_token_is_not_drawn(build, pad):
    batch = random_batch(build("qwen3", pad_token_id=pad))
    assert pad is None or not bool((batch.prompt_ids == pad).any())


BERT_SIZES: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_bert(**config: Any) -> BertLMHeadModel:
    torch.manual_seed(0)
    return BertLMHeadModel(BertConfig(vocab_size=48, **BERT_SIZES, **{"initializer_range": 0.3, **config}))


def test_an_encoder_is_rejected() -> None:
    with pytest.raises(
        UnavailableError, match=r"BertLMHeadModel looks to the right: .* nats a token, as in an encoder"
    ):
        check_causal(make_bert())


def test_an_encoder_with_is_decoder_is_causal() -> None:
    check_causal(make_bert(is_decoder=True))


def test_virtual_tokens_are_left_out(build: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    check_causal(peft.get_peft_model(build("qwen3"), config))


def test_causality_in_half_precision_and_modes(build: Any) -> None:
    model = build("qwen3").to(torch.bfloat16).train()
    check_causal(model)
    assert all(module.training for module in model.modules())
