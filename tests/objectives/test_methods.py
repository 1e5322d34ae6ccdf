"""Losses of one file each: where they grow, and how one of a user's own is found and set."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_batches import flat, loss_and_gradient, make_batch
from own_loss import METHOD, Settings

from groupgrad.batch import TokenScores
from groupgrad.objectives import (
    ESTIMATORS,
    LOSSES,
    MASKS,
    PolicyOptions,
    PolicyTerms,
    find_method,
    policy_loss,
)
from groupgrad.objectives.ragged import PerToken


def test_nothing_bounds_the_weight_of_gmpo_under_a_negative_advantage():
    """In float32: one log-ratio of 100 nats among five tokens is a weight of e^20, and one alone is infinite."""
    for tokens, weight in ((5, math.exp(20)), (1, math.inf)):
        logprobs, old = torch.full((tokens,), -1.0, requires_grad=True), [[-101.0, *[-1.0] * (tokens - 1)]]
        batch = make_batch([[True] * tokens], [-1.0], old=old)
        batch = replace(batch, advantages=batch.advantages.float(), old_logprobs=flat(old, torch.float32))
        loss = policy_loss(TokenScores(logprobs, torch.zeros(tokens)), batch, PolicyOptions(loss_type="gmpo")).loss
        loss.backward()
        assert loss.item() == pytest.approx(weight)
        assert logprobs.grad.tolist() == pytest.approx([weight / tokens] * tokens)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_loss_grows_with_the_ratio_where_its_method_says(loss_type: str):
    """A ratio of e^60, of one token under A = -1 and of one under A = 1."""
    batch, method = make_batch([[True], [True]], [-1.0, 1.0]), find_method(loss_type)
    zeros, far = torch.zeros(2), torch.full((2,), math.exp(60))
    terms = PolicyTerms(
        *(batch, zeros - 1, zeros, PerToken(far.log()), PerToken(far), batch.trained, None, None),
        token_ratio=far,
        token_advantages=batch.advantages,
    )
    options = PolicyOptions(loss_type=loss_type, settings=method.make_settings({}), epsilon_high=5.0)
    sizes = method.surrogate(terms, options).per_token.abs()
    grows = {"never": [False, False], "negative": [True, False], "always": [True, True]}
    assert (sizes > 1e20).tolist() == grows[method.grows_with_ratio]
    assert sizes[sizes <= 1e20].lt(100).all()


# ------------------------------------------------------------------------------------------------ finding a method


def test_what_is_no_method_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "losses_of_mine").mkdir()
    (tmp_path / "losses_of_mine" / "empty.py").write_text("")
    (tmp_path / "losses_of_mine" / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"'losses_of_mine.empty' has no METHOD of type groupgrad.objectives.Method"):
        find_method("losses_of_mine.empty")
    with pytest.raises(ValueError, match=r"'losses_of_mine.broken' cannot be imported \(ZeroDivisionError"):
        find_method("losses_of_mine.broken")
    with pytest.raises(ValueError, match=r"'losses_of_mine.absent' cannot be imported \(ModuleNotFoundError"):
        find_method("losses_of_mine.absent")
    assert "losses_of_mine.absent" not in sys.modules


def test_a_method_may_be_a_file_of_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loss_in_a_file.py").write_text("from groupgrad.objectives.methods.dapo import METHOD")
    assert find_method("loss_in_a_file") is LOSSES["dapo"]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo", "gmpo"])
def test_with_one_step_a_batch_a_loss_is_the_plain_policy_gradient(loss_type: str):
    """Every ratio is 1, so the gradient of a log-prob is minus the advantage, over the loss's denominator."""
    logprobs = [[math.log(0.5), math.log(0.1)], [math.log(0.9), math.log(0.3)]]
    batch = make_batch([[True] * 2] * 2, [1.0, -2.0], old=logprobs)
    _, gradient = loss_and_gradient(logprobs, batch, PolicyOptions(loss_type=loss_type))
    denominator = -1 / gradient[0]
    assert denominator > 0 and gradient == pytest.approx([-1 / denominator] * 2 + [2 / denominator] * 2, rel=1e-6)


def test_settings_are_checked():
    assert METHOD.make_settings({"factor": 2.0}) == Settings(2.0)
    with pytest.raises(ValueError, match=r"loss_settings has 'factr', but it has factor; did you mean 'factor'\?"):
        METHOD.make_settings({"factr": 2.0})
    with pytest.raises(ValueError, match="loss_settings has factor=-1"):
        METHOD.make_settings({"factor": -1})
    with pytest.raises(ValueError, match="loss_settings has factor='2', which is no number"):
        METHOD.make_settings({"factor": "2"})
    with pytest.raises(ValueError, match=r"advantage_settings has k=4\.0, which is no whole number"):
        ESTIMATORS["pass_at_k"].make_settings({"k": 4.0})
    with pytest.raises(ValueError, match="off_policy_mask_settings has level=True, which is no text"):
        MASKS["k1"].make_settings({"level": True})
    with pytest.raises(ValueError, match="loss_settings has 'x', but this loss_type has none"):
        LOSSES["grpo"].make_settings({"x": 1})
    for name in ("dppo_tv", "dppo_kl", "gmpo"):
        for setting in LOSSES[name].settings.__dataclass_fields__:
            with pytest.raises(ValueError, match=f"loss_settings has {setting}=0"):
                LOSSES[name].make_settings({setting: 0})
