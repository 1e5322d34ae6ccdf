"""`cast_lm_head_to_fp32` on a model whose head is tied to its embedding: every score is a float32 product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from groupgrad.scoring import head_hook


def float64_logits(hidden: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """The product of bfloat16 hidden states (..., H) and a bfloat16 weight (V, H) in float64."""
    return hidden.detach().double().numpy() @ weight.detach().double().numpy().T


def float64_logprobs(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    normalised = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(normalised, tokens[:, None], -1)[:, 0]


@pytest.fixture
def head_errors(monkeypatch):
    """`head_errors(policy)`: largest differences from float64 by where the head computed, filled in as a run goes."""

    def watch(policy):
        errors: dict[str, float] = {}

        def note(name, actual, expected):
            assert actual.dtype == torch.float32
            errors[name] = max(errors.get(name, 0.0), float(np.abs(actual.detach().numpy() - expected).max()))

        def on_head(module, inputs, output):
            assert inputs[0].dtype == torch.bfloat16
            note("logits", output, float64_logits(inputs[0], module.weight))

        plain = head_hook.HeadHook.tiled_scores

        def tiled_scores(self, head, hidden, transform):
            scores = plain(self, head, hidden, transform)
            assert hidden.dtype == torch.bfloat16
            expected = float64_logprobs(float64_logits(hidden, head.weight), self.tokens.numpy())
            note("training" if torch.is_grad_enabled() else "reference", scores.logprobs, expected)
            return scores

        policy.lm_head.register_forward_hook(on_head)
        monkeypatch.setattr(head_hook.HeadHook, "tiled_scores", tiled_scores)
        return errors

    return watch


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_scores_with_a_tied_head_are_float32_products(train, make_policy, head_errors, tmp_path, engine):
    """A bfloat16 model through training: scores, sampled logits and the reference's agree with float64 NumPy. The one
    weight stays bfloat16 and tied, learns, and is saved once."""
    policy = make_policy(tie_word_embeddings=True).to(torch.bfloat16)
    start = policy.lm_head.weight.detach().clone()
    errors = head_errors(policy)
    trainer = train(model=policy, cast_lm_head_to_fp32=True, rollout_engine=engine, beta=0.1, max_steps=2, optim="sgd")
    assert set(errors) == {"logits", "training", "reference"}
    assert max(errors.values()) < 2e-5
    assert policy.lm_head.weight is policy.get_input_embeddings().weight
    assert policy.lm_head.weight.dtype == torch.bfloat16
    assert not torch.equal(policy.lm_head.weight, start)
    trainer.save_model(str(tmp_path / "saved"))
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.lm_head.weight, policy.lm_head.weight)
