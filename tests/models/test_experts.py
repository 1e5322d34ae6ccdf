"""Mixtures of experts: the load-balancing loss, and the same expert choices in sampling and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from groupgrad.batch import Batch
from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.scoring.forward import ForwardOptions, layout_for, score_tokens
from groupgrad.scoring.self_check import build_batch, check_layout

FAMILIES = ("qwen3-moe", "gpt-oss (experts, sinks)")
NUM_EXPERTS, CHOSEN = 4, 2
AUX = ForwardOptions(aux_loss=True)


def routers(model: Any) -> list[nn.Module]:
    return [getattr(layer.mlp, "gate", None) or layer.mlp.router for layer in model.model.layers]


@contextmanager
def router_inputs(model: Any) -> Iterator[list[list[torch.Tensor]]]:
    """Hidden states (T, H) of every call of a layer's router, by layer."""
    seen: list[list[torch.Tensor]] = [[] for _ in routers(model)]

    def note(layer: int) -> Callable[..., None]:
        return lambda module, inputs: seen[layer].append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]).clone())

    handles = [router.register_forward_pre_hook(note(i)) for i, router in enumerate(routers(model))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def router_probabilities(router: Any, hidden: torch.Tensor) -> np.ndarray:
    """(T, E) float64, from the router's weights by NumPy."""
    logits = hidden.double().numpy() @ router.weight.detach().double().numpy().T
    bias = getattr(router, "bias", None)
    logits = logits if bias is None else logits + bias.detach().double().numpy()
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    return odds / odds.sum(-1, keepdims=True)


def rows_of(batch: Batch) -> list[torch.Tensor]:
    """Each row's prompt and completion end to end."""
    prompts = batch.prompt_ids.split(batch.prompt_offsets.diff().tolist())
    completions = batch.completion_ids.split(batch.offsets.diff().tolist())
    return [torch.cat([prompts[q], ids]) for q, ids in zip(batch.prompt_of_row.tolist(), completions)]


def load_balancing(model: Any, batch: Batch) -> float:
    """E * sum over experts of (choices a token) * (mean probability), over the tokens of all rows and layers
    (arXiv:2101.03961, eq. 4); each row by itself, so that there is no padding and nothing is shared."""
    with router_inputs(model) as seen, torch.no_grad():
        for row in rows_of(batch):
            model(input_ids=row[None], use_cache=False)
    actual = np.concatenate(
        [router_probabilities(router, torch.cat(hidden)) for router, hidden in zip(routers(model), seen)]
    )
    ranks = np.argsort(np.argsort(-actual, axis=-1), axis=-1)
    return float(NUM_EXPERTS * ((ranks < CHOSEN).mean(0) * actual.mean(0)).sum())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["dense", "packed", "shared"])
def test_the_balancing_loss_counts_true_tokens_once_a_row(family: str, layout: Any, build: Any, batch: Batch) -> None:
    """Padding does not count, and a shared prompt counts once a row."""
    model = build(family)
    scores = score_tokens(model, batch, replace(AUX, layout=layout))
    assert scores.aux_loss is not None
    assert scores.aux_loss.item() == pytest.approx(load_balancing(model, batch), rel=1e-5)
    plain = score_tokens(model, batch, ForwardOptions(layout="dense"))
    torch.testing.assert_close(scores.logprobs, plain.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_its_gradient_is_the_same_in_every_layout(family: str, build: Any, batch: Batch) -> None:
    gradients = []
    for layout in ("dense", "packed", "shared"):
        model = build(family)
        loss = score_tokens(model, batch, replace(AUX, layout=layout)).aux_loss
        assert loss is not None
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert float(gradients[0].norm()) > 1e-3
    for actual in gradients[1:]:
        assert float((actual - gradients[0]).norm() / gradients[0].norm()) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_shared_with_a_loss_that_uses_the_mask(family: str, build: Any) -> None:
    model = build(family)
    report = check_layout(model, AUX)
    assert (report.layout, report.weighs_balance, report.reason) == ("shared", True, None)
    assert layout_for(model, report.options(AUX)) == "shared"
    assert layout_for(model, AUX) == "packed"
    assert not check_layout(model, ForwardOptions()).weighs_balance


def test_prompts_stay_unshared_with_a_loss_that_ignores_the_mask(build: Any) -> None:
    """A model that ignores the mask in its loss."""
    model = build("qwen3-moe")

    def count(_module: Any, _inputs: Any, output: Any) -> None:
        if output.router_logits is not None:
            output["aux_loss"] = sum(logits.softmax(-1).pow(2).sum() for logits in output.router_logits)

    model.register_forward_hook(count)
    report = check_layout(model, AUX)
    assert (report.layout, report.weighs_balance) == ("shared", False)
    assert layout_for(model, report.options(AUX)) == "packed"


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_and_training_choose_the_same_experts(family: str, build: Any) -> None:
    """For every token and layer, so no choice of the sampler needs a replay; log-probs agree too."""
    model, options = build(family), SamplingOptions(max_new_tokens=6)
    stream = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 48, (length,), generator=stream).tolist() for length in (7, 4)]
    owners = [0, 0, 1, 1]
    engine = NativeEngine(model)
    sampled, chosen = [], []
    for i, q in enumerate(owners):
        with router_inputs(model) as seen:
            sampled += engine.sample([Request(prompts[q], seed=i, max_new_tokens=4 + i % 3)], options)
        # One row alone: its tokens come in their order, first the prompt, then one a step. (The engine's very first
        # call is of one token that belongs to no row.)
        own = [hidden[i == 0 :] for hidden in seen]
        assert [len(part) for part in own[0]] == [len(prompts[q]), *[1] * (len(sampled[-1].ids) - 1)]
        chosen.append([torch.cat(hidden) for hidden in own])
    batch = build_batch(prompts, owners, [sample.ids for sample in sampled])
    model.train()
    with router_inputs(model) as seen:
        scores = score_tokens(model, batch, replace(AUX, layout="packed"))
    starts = np.cumsum([0, *(len(row) for row in rows_of(batch))])
    for row, by_layer in enumerate(chosen):
        for layer, hidden in enumerate(by_layer):
            trained = torch.cat(seen[layer])[starts[row] : starts[row] + len(hidden)]
            actual = [router_probabilities(routers(model)[layer], part) for part in (hidden, trained)]
            np.testing.assert_allclose(actual[0], actual[1], atol=1e-5)
            first, second = (np.sort(np.argsort(-part, axis=-1)[:, :CHOSEN]) for part in actual)
            np.testing.assert_array_equal(first, second)
    known = torch.tensor([value for sample in sampled for value in sample.logprobs or ()])
    torch.testing.assert_close(scores.logprobs.detach(), known, atol=1e-5, rtol=0)
