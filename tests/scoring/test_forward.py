"""Scores of ragged batches equal those of plain, unpadded forward passes, one a row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged_rows import assert_same_gradients, gradients
from torch import nn
from unordered_sums import UnorderedSums

from groupgrad.models.unwrapping import output_head, unwrap
from groupgrad.scoring.forward import ForwardOptions, evaluation_mode, score_tokens, score_without_gradient

TOLERANCE: dict[str, float] = {"rtol": 0, "atol": 1e-5}


def plain(logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies in float64."""
    distribution = torch.log_softmax(logits.double() / temperature, -1)
    logprobs = distribution.gather(-1, tokens[:, None]).squeeze(-1)
    return logprobs.float(), -(distribution.exp() * distribution).sum(-1).float()


def test_every_architecture_scores_as_row_by_row(any_model, batch, row_logits):
    """Log-probs, entropies and gradients."""
    logprobs, entropy = plain(row_logits(any_model, batch), batch.completion_ids)
    assert float(logprobs.detach().std()) > 0.05
    scores = score_tokens(any_model, batch, ForwardOptions())
    torch.testing.assert_close(scores.logprobs, logprobs, **TOLERANCE)
    torch.testing.assert_close(scores.entropy, entropy, **TOLERANCE)
    assert scores.logprobs.shape == scores.entropy.shape == (batch.num_tokens,)
    assert scores.aux_loss is None
    weights = torch.linspace(-1, 2, batch.num_tokens)
    assert_same_gradients(*(gradients(any_model, (weights * values).sum()) for values in (scores.logprobs, logprobs)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(attention: str, build, batch, row_logits):
    model = build("mistral (sliding window)", attn_implementation=attention)
    logprobs, _ = plain(row_logits(model, batch), batch.completion_ids)
    torch.testing.assert_close(score_tokens(model, batch, ForwardOptions()).logprobs, logprobs, **TOLERANCE)


@pytest.mark.parametrize("tiled_head", [True, False])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.0])
def test_temperature_divides_the_logits(temperature: float, tiled_head: bool, build, batch, row_logits):
    model = build("gemma2 (soft caps)")
    logprobs, entropy = plain(row_logits(model, batch), batch.completion_ids, temperature)
    scores = score_tokens(model, batch, ForwardOptions(temperature=temperature, tiled_head=tiled_head))
    torch.testing.assert_close(scores.logprobs, logprobs, **TOLERANCE)
    torch.testing.assert_close(scores.entropy, entropy, **TOLERANCE)


def test_tokens_may_have_temperatures_of_their_own(any_model, batch, row_logits):
    """Log-probs, entropies and gradients; also behind heads with caps and biases."""
    own = torch.tensor([math.nan, 0.4, 2.5]).repeat(batch.num_tokens)[: batch.num_tokens]
    of_tokens = own.nan_to_num(nan=0.8)[:, None]
    logprobs, entropy = plain(row_logits(any_model, batch), batch.completion_ids, of_tokens)
    masked = replace(batch, temperatures=own, trained=torch.arange(batch.num_tokens) % 5 != 4)
    scores = score_tokens(any_model, masked, ForwardOptions(temperature=0.8))
    kept = masked.trained.float()
    torch.testing.assert_close(scores.logprobs, logprobs * kept, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(scores.entropy, entropy * kept, rtol=1e-5, atol=2e-5)
    weights = torch.linspace(-1, 2, batch.num_tokens) * kept
    assert_same_gradients(*(gradients(any_model, (weights * values).sum()) for values in (scores.logprobs, logprobs)))


def test_what_fills_short_rows_is_never_looked_at(build, batch):
    model = build("qwen3")
    expected, *others = (
        score_tokens(model, batch, ForwardOptions(layout="dense", pad_id=pad_id)).logprobs for pad_id in (0, 1, 47)
    )
    assert all(torch.equal(scores, expected) for scores in others)


@pytest.mark.parametrize("tiled_head", [True, False])
def test_entropy_carries_a_gradient_only_if_asked_for(tiled_head: bool, build, batch, row_logits):
    model, options = build("qwen3"), ForwardOptions(temperature=0.8, tiled_head=tiled_head)
    assert not score_tokens(model, batch, options).entropy.requires_grad
    scores = score_tokens(model, batch, replace(options, entropy_gradient=True))
    expected = plain(row_logits(model, batch), batch.completion_ids, 0.8)[1]
    weights = torch.linspace(0, 1, batch.num_tokens)
    assert_same_gradients(
        gradients(model, (weights * scores.entropy).sum()), gradients(model, (weights * expected).sum())
    )


def test_entropies_of_more_tokens_than_one_piece(build, make_batch, row_logits, monkeypatch):
    monkeypatch.setattr("groupgrad.scoring.head_hook.ENTROPY_TOKENS", 3)
    model, batch = build("qwen3"), make_batch()
    expected = plain(row_logits(model, batch), batch.completion_ids)[1]
    torch.testing.assert_close(score_tokens(model, batch, ForwardOptions()).entropy, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [((0, []), (1, [])), ((2, []),)])
def test_completions_without_a_token(rows: Any, build, make_batch):
    model = build("qwen3")
    scores = score_tokens(model, make_batch(rows), ForwardOptions(entropy_gradient=True))
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    assert all(float(g.abs().sum()) == 0.0 for g in gradients(model, scores.logprobs.sum()).values())


@pytest.mark.parametrize("rows", [((0, []), (1, [20, 1])), ((1, [20, 1]), (0, []))])
def test_an_empty_row_first_or_last(rows: Any, build, make_batch, row_logits):
    """The model's head computes logits of the completion tokens alone."""
    model, batch, seen = build("qwen3"), make_batch(rows), []
    expected = plain(row_logits(model, batch), batch.completion_ids)[0]
    torch.testing.assert_close(score_tokens(model, batch, ForwardOptions()).logprobs, expected, **TOLERANCE)
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    score_tokens(model, batch, ForwardOptions(tiled_head=False))
    assert seen == [(1, batch.num_tokens, 48)]


def test_the_model_is_left_without_hooks_even_after_an_error(build, batch):
    model = build("qwen3")
    score_tokens(model, batch, ForwardOptions())
    with pytest.raises(IndexError):
        score_tokens(model, replace(batch, prompt_ids=batch.prompt_ids + 100), ForwardOptions())
    assert not model.lm_head._forward_pre_hooks


def test_half_precision_models_give_float32_scores(build, batch):
    scores = score_tokens(build("qwen3").to(torch.bfloat16), batch, ForwardOptions(temperature=0.5))
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32


HEADS = {
    "LoRA": {"target_modules": ["q_proj", "lm_head"], "use_rslora": True},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
}


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_an_adapted_head_is_tiled_exactly(kind: str, entropy: bool, build, batch):
    """Log-probs, entropies and every gradient; with the adapter off too. A head with DoRA computes its own logits."""
    peft = pytest.importorskip("peft")
    model = adapted(build, peft.LoraConfig(r=4, init_lora_weights=False, **HEADS[kind]))
    actual, expected = (
        score_tokens(model, batch, ForwardOptions(temperature=0.7, entropy_gradient=entropy, tiled_head=tiled))
        for tiled in (True, False)
    )
    torch.testing.assert_close(actual.logprobs, expected.logprobs, **TOLERANCE)
    torch.testing.assert_close(actual.entropy, expected.entropy, **TOLERANCE)
    losses = [x.logprobs.square().sum() + (x.entropy.sum() if entropy else 0.0) for x in (actual, expected)]
    assert_same_gradients(gradients(model, losses[0]), gradients(model, losses[1]))
    with model.disable_adapter(), torch.no_grad():
        actual, expected = (score_tokens(model, batch, ForwardOptions(tiled_head=tiled)) for tiled in (True, False))
    torch.testing.assert_close(actual.logprobs, expected.logprobs, **TOLERANCE)


def test_dropout_of_an_adapted_head_is_that_of_the_module(build, batch):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False)
    model = adapted(build, config).train()
    scores = []
    for tiled in (True, False):
        torch.manual_seed(3)
        scores.append(score_tokens(model, batch, ForwardOptions(layout="packed", tiled_head=tiled)).logprobs)
    torch.testing.assert_close(scores[0], scores[1], **TOLERANCE)
    calm = score_tokens(model.eval(), batch, ForwardOptions()).logprobs
    assert float((calm - scores[0]).abs().max()) > 1e-3


def adapted(build: Any, config: Any) -> Any:
    import peft

    torch.manual_seed(1)
    config.task_type = "CAUSAL_LM"
    return peft.get_peft_model(build("qwen3"), config).eval()


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_do_not_shift_the_scores(kind: str, build, batch, row_logits):
    peft = pytest.importorskip("peft")
    model = adapted(build, getattr(peft, kind)(num_virtual_tokens=3))
    expected = plain(row_logits(model, batch), batch.completion_ids)[0]
    scores = score_tokens(model, batch, ForwardOptions())
    torch.testing.assert_close(scores.logprobs, expected, **TOLERANCE)
    assert_same_gradients(gradients(model, scores.logprobs.sum()), gradients(model, expected.sum()))


def test_scoring_without_gradient_has_no_dropout_and_leaves_the_modes(build, batch):
    model = build("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    expected = score_tokens(model, batch, ForwardOptions()).logprobs
    model.train()
    noisy = score_tokens(model, batch, ForwardOptions()).logprobs
    assert float((noisy - expected).abs().max()) > 1e-2
    scores = score_without_gradient(model, batch, ForwardOptions(entropy_gradient=True))
    torch.testing.assert_close(scores.logprobs, expected, **TOLERANCE)
    assert not scores.logprobs.requires_grad
    assert all(module.training for module in model.modules())


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.on, self.off = nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))


def test_evaluation_mode_restores_a_mix_of_modes_also_on_errors():
    model = Failing()
    model.off.eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert sorted(before.values()) == [False, False, False, True, True]
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert {name: module.training for name, module in model.named_modules()} == before
    with pytest.raises(RuntimeError, match="stop"), evaluation_mode(model):
        raise RuntimeError("stop")
    assert {name: module.training for name, module in model.named_modules()} == before


def test_a_compiled_model_is_unwrapped_to_itself(build):
    model = build("qwen3")
    assert unwrap(torch.compile(model)) is model  # pyright: ignore[reportArgumentType]
    assert output_head(model) is model.lm_head
    assert output_head(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("layout", ["shared", "dense"])
@pytest.mark.parametrize("tiled", [True, False])
def test_only_loss_tokens_are_scored(layout: Any, tiled: bool, build, batch, monkeypatch):
    """A tool's words cost no logits; scores and gradients of the others stay what they were."""
    model = build("qwen3")
    options = ForwardOptions(layout=layout, tiled_head=tiled)
    trained = torch.arange(batch.num_tokens) % 3 != 1
    weights = torch.linspace(-1, 2, batch.num_tokens) * trained
    expected = score_tokens(model, replace(batch, trained=torch.ones_like(trained)), options)
    reference = gradients(model, (weights * expected.logprobs).sum())
    heights: list[int] = []
    head = output_head(model)
    assert head is not None
    with torch.no_grad():
        actual = score_tokens(model, replace(batch, trained=torch.zeros_like(trained)), options)
    assert actual.logprobs.count_nonzero() <= 1
    handle = head.register_forward_hook(lambda module, inputs, output: heights.append(output.shape[-2]))
    actual = score_tokens(model, replace(batch, trained=trained), options)
    handle.remove()
    assert heights == [1 if tiled else int(trained.sum())]
    torch.testing.assert_close(actual.logprobs, expected.logprobs * trained, **TOLERANCE)
    torch.testing.assert_close(actual.entropy, expected.entropy * trained, **TOLERANCE)
    assert_same_gradients(gradients(model, (weights * actual.logprobs).sum()), reference)


@pytest.mark.parametrize("layout", ["shared", "packed", "dense"])
@pytest.mark.parametrize("tiled", [True, False])
def test_gradients_are_added_up_in_a_fixed_order(layout: Any, tiled: bool, build, batch):
    """The last token of a shared prompt predicts the first of every row; a run that is resumed adds up as before."""
    model = build("qwen3")
    with UnorderedSums() as sums:
        scores = score_tokens(model, batch, ForwardOptions(layout=layout, tiled_head=tiled, entropy_gradient=True))
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert sums.found == []


def test_gradients_are_added_up_in_a_fixed_order_where_the_head_is_not_known(build, batch, monkeypatch):
    monkeypatch.setattr("groupgrad.scoring.forward.output_head", lambda model: None)
    with UnorderedSums() as sums:
        score_tokens(build("qwen3"), batch, ForwardOptions(tiled_head=False)).logprobs.sum().backward()
    assert sums.found == []
