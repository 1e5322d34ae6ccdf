"""A pass cut over ranks gives each of them the scores of the whole pass, and together the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked_ranks import FakeGroup, on_ranks
from ragged_rows import assert_same_gradients
from torch import nn

from groupgrad import dist
from groupgrad.batch import Batch, TokenScores
from groupgrad.integrations.sharding.context_split import cut_over_ranks
from groupgrad.objectives import PolicyOptions, policy_loss
from groupgrad.scoring.forward import ForwardOptions, build_batch, layout_for, score_tokens
from groupgrad.scoring.layout import flat_layout
from groupgrad.scoring.tiled_head import PrecomputedGradient

NAMES = (
    *("qwen3", "qwen3-tied", "gemma2 (soft caps)", "mistral (sliding window)", "gpt-oss (experts, sinks)", "gpt2"),
    *("phi (head bias)", "qwen3-moe"),
)
"""Architectures whose attention differs: plain, capped, in windows, with sinks; and experts, heads with a bias."""


def ragged(**fields: Any) -> Batch:
    """Two prompts, five rows, one of them empty and one without loss tokens."""
    stream = torch.Generator().manual_seed(3)
    lengths = (9, 4, 0, 17, 5)
    prompts = [torch.randint(3, 40, (n,), generator=stream).tolist() for n in (6, 11)]
    rows = [torch.randint(3, 40, (n,), generator=stream).tolist() for n in lengths]
    batch = build_batch(prompts, [0, 1, 0, 1, 0], rows)
    batch.trained[:9] = False
    batch.trained[11] = False
    batch.advantages = torch.tensor([0.3, -1.2, 0.4, 0.9, -0.6])
    batch.old_logprobs = -3.0 + torch.rand(batch.num_tokens, generator=stream)
    batch.ref_logprobs = batch.old_logprobs + 0.1
    for name, value in fields.items():
        setattr(batch, name, value)
    return batch


def gradients_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of the loss, or of the mean of the losses of several ranks. Collective."""
    model.zero_grad()
    loss.backward()
    dist.average_gradients(model.parameters())
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_kind_of_attention_scores_as_one_rank_does(build: Callable[..., Any], tmp_path):
    """Two ranks; log-probs and entropies carry gradients."""
    weights = torch.linspace(-1, 2, ragged().num_tokens)

    def loss_of(scores: TokenScores) -> torch.Tensor:
        return (weights * (scores.logprobs + 0.3 * scores.entropy)).sum()

    def action(rank: int) -> list[Any]:
        options = ForwardOptions(entropy_gradient=True, rank_group=dist.consecutive_groups(2, timeout_s=60))
        found = []
        for name in NAMES:
            model = build(name)
            scores = score_tokens(model, ragged(), options)
            found.append((scores.logprobs.detach(), scores.entropy.detach(), gradients_of(model, loss_of(scores))))
        return found

    ranks = on_ranks(action, tmp_path, 2)
    for number, name in enumerate(NAMES):
        model = build(name)
        assert layout_for(model, ForwardOptions()) == "shared", name
        scores = score_tokens(model, ragged(), ForwardOptions(entropy_gradient=True))
        expected = gradients_of(model, loss_of(scores))
        for logprobs, entropy, gradients in (result[number] for result in ranks):
            torch.testing.assert_close(logprobs, scores.logprobs.detach(), rtol=0, atol=1e-5)
            torch.testing.assert_close(entropy, scores.entropy.detach(), rtol=0, atol=1e-5)
            assert_same_gradients(gradients, expected)


OPTIONS = {
    "tokens": PolicyOptions(beta=0.1),
    "sequences": PolicyOptions(loss_type="grpo", importance_sampling_level="sequence", beta=0.1),
    "weights of sequences": PolicyOptions(loss_type="vespo"),
    "micro-batch": PolicyOptions(loss_type="bnpo", beta=0.1),
}


@pytest.mark.slow
def test_four_ranks_have_the_loss_of_one_whatever_it_sums_over(build: Callable[..., Any], tmp_path):
    """Each rank has all scores, so a loss over whole rows is the plain one; some rank has no loss token at all."""
    one_token = torch.zeros(ragged().num_tokens, dtype=torch.bool)
    one_token[-1] = True
    batches = [ragged(), ragged(trained=one_token)]

    def action(rank: int) -> list[Any]:
        options = ForwardOptions(rank_group=dist.consecutive_groups(4, timeout_s=60))
        found = []
        for batch in batches:
            for policy in OPTIONS.values():
                model = build("qwen3")
                loss = policy_loss(score_tokens(model, batch, options), batch, policy).loss
                found.append((float(loss.detach()), gradients_of(model, loss)))
        with torch.no_grad():
            found.append(score_tokens(build("qwen3"), batches[0], options))
        return found

    ranks = on_ranks(action, tmp_path, 4)
    cases = [(batch, policy) for batch in batches for policy in OPTIONS.values()]
    for number, (batch, policy) in enumerate(cases):
        model = build("qwen3")
        loss = policy_loss(score_tokens(model, batch, ForwardOptions()), batch, policy).loss
        value = float(loss.detach())
        expected = gradients_of(model, loss)
        for rank in ranks:
            assert rank[number][0] == pytest.approx(value, rel=1e-5, abs=1e-6)
            assert_same_gradients(rank[number][1], expected, least=0.0)  # some of a single token
    assert not ranks[0][-1].logprobs.requires_grad
    assert all(torch.equal(rank[-1].logprobs, ranks[0][-1].logprobs) for rank in ranks)


def test_a_precomputed_gradient_and_checkpointing_change_nothing(build: Callable[..., Any], tmp_path):
    """The head makes its gradients in the forward pass, and the backward pass runs the ring of each layer once more."""
    batch = ragged(old_logprobs=None, ref_logprobs=None)
    policy = PolicyOptions()
    known = score_tokens(build("qwen3"), batch, ForwardOptions()).logprobs.detach()
    leaf = known.clone().requires_grad_()
    loss = policy_loss(TokenScores(leaf, torch.zeros_like(known)), batch, policy).loss
    precomputed = PrecomputedGradient(known, torch.autograd.grad(loss, leaf)[0])

    def action(rank: int) -> Any:
        options = ForwardOptions(rank_group=dist.consecutive_groups(2, timeout_s=60))
        model = build("qwen3").train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        scores = score_tokens(model, batch, options, precomputed)
        return gradients_of(model, policy_loss(scores, batch, policy).loss)

    model = build("qwen3")
    expected = gradients_of(model, policy_loss(score_tokens(model, batch, ForwardOptions()), batch, policy).loss)
    for found in on_ranks(action, tmp_path, 2):
        assert_same_gradients(found, expected)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_token_is_on_one_rank_and_is_scored_there(num_ranks):
    inputs = flat_layout(ragged())
    parts = [cut_over_ranks(inputs, inputs.predictors, FakeGroup(i, num_ranks)) for i in range(num_ranks)]  # pyright: ignore
    scored = torch.cat([part.scored for part in parts])
    assert sorted(scored.tolist()) == list(range(ragged().num_tokens))
    assert sum(len(part.inputs.ids) for part in parts) == len(inputs.ids)
    sizes = [len(part.inputs.ids) for part in parts]
    assert max(sizes) - min(sizes) <= 2
    for part in parts:
        assert torch.equal(part.inputs.ids[part.predictors], inputs.ids[inputs.predictors[part.scored]])
        assert part.inputs.positions is not None and inputs.positions is not None
        assert torch.equal(part.inputs.positions[part.predictors], inputs.positions[inputs.predictors[part.scored]])
