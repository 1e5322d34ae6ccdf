"""Models of which a rank has a part, by parameters that are put away as DeepSpeed ZeRO-3 puts them away.

What DeepSpeed itself does with them is for `tests/trainer/test_zero.py`.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vlm_batches import make_batch, make_vlm_setup

from groupgrad.errors import UnavailableError
from groupgrad.integrations.sharding import zero3
from groupgrad.integrations.sharding.sharding import ShardSnapshot
from groupgrad.models.reference import Reference, check_sharded_policy
from groupgrad.models.shards import gather_all, gather_per_module, is_sharded, num_parameters
from groupgrad.models.weights import checkpoint_weights
from groupgrad.scoring.forward import ForwardOptions, score_tokens, score_without_gradient
from groupgrad.scoring.self_check import check_layout, random_batch


class Status(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2


class OneRank:
    """A single rank with all shards of a model; `most` is the largest number of elements gathered at once."""

    def __init__(self, model: nn.Module):
        self.now = self.most = 0
        for number, parameter in enumerate(model.parameters()):
            self._put_away(parameter, number)

    def _put_away(self, parameter: Any, number: int) -> None:
        parameter.ds_id, parameter.ds_shape, parameter.ds_numel = number, parameter.shape, parameter.numel()
        parameter.ds_tensor = parameter.detach().flatten().clone()
        parameter.ds_status, parameter.data = Status.NOT_AVAILABLE, torch.empty(0)
        parameter.all_gather, parameter.partition = self.all_gather, self.partition

    def all_gather(self, param_list: list[Any]) -> None:
        for parameter in param_list:
            parameter.data, parameter.ds_status = parameter.ds_tensor.view(parameter.ds_shape), Status.AVAILABLE
            self.now += parameter.ds_numel
        self.most = max(self.most, self.now)

    def partition(self, param_list: list[Any], has_been_updated: bool) -> None:
        assert not has_been_updated
        for parameter in param_list:
            self.now -= parameter.ds_numel
            parameter.data, parameter.ds_status = torch.empty(0), Status.NOT_AVAILABLE


@pytest.fixture
def batch(model: Any) -> Any:
    return random_batch(model)


def test_passes_gather_and_free_the_parameters_of_each_module(model, batch):
    options = ForwardOptions(temperature=0.7)
    expected, size = score_without_gradient(model, batch, options), num_parameters(model)
    rank = OneRank(model)
    actual = score_without_gradient(model, batch, options)
    # A sharded model computes its norms itself.
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    torch.testing.assert_close(actual.entropy, expected.entropy, rtol=0, atol=2e-6)
    assert rank.now == 0 and 0 < rank.most < size / 4
    assert is_sharded(model) and num_parameters(model) == size


def test_the_layout_check_runs_on_a_sharded_model(model):
    expected = check_layout(model, ForwardOptions())
    rank = OneRank(model)
    with gather_per_module(model):
        assert check_layout(model, ForwardOptions()) == expected
    assert rank.now == 0 and expected.tiled_head


def test_the_head_gives_the_scores_and_their_gradient(model, batch):
    """The parameters are gathered for the backward pass, as ZeRO's hooks do."""

    def gradients() -> list[Any]:
        model.zero_grad()
        scores = score_tokens(model, batch, ForwardOptions(entropy_gradient=True))
        (scores.logprobs.sum() + 0.3 * scores.entropy.square().sum()).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients()
    for parameter in model.parameters():
        parameter.ds_id, parameter.ds_status = 0, Status.AVAILABLE
    calls: list[Any] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: calls.append(output.shape))
    actual = gradients()
    handle.remove()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(actual, expected))
    assert calls == [(2, batch.num_tokens)]
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_without_rows_runs_the_model(model, batch, sharded):
    if sharded:
        OneRank(model)
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    scores = score_without_gradient(model, batch.select([]), ForwardOptions())
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    assert passes == [1]


def test_a_snapshot_replaces_later_weights_bitwise(model, batch):
    rank = OneRank(model)
    expected = score_without_gradient(model, batch, ForwardOptions()).logprobs
    reference = Reference(model, adapter_is_fresh=True, is_synced=False)
    assert reference.module is None
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.ds_tensor += 0.5 * torch.randn_like(parameter.ds_tensor)
    later = [parameter.ds_tensor.clone() for parameter in parameters]
    rank.all_gather(parameters[:2])  # ZeRO keeps small parameters gathered between passes
    for _ in range(2):
        with reference.active() as module:
            assert torch.equal(score_without_gradient(module, batch, ForwardOptions()).logprobs, expected)
        assert all(torch.equal(parameter.ds_tensor, own) for parameter, own in zip(parameters, later))
    assert (score_without_gradient(model, batch, ForwardOptions()).logprobs - expected).abs().max() > 0.1


def test_weights_are_put_back_also_on_errors(model):
    OneRank(model)
    shards = ShardSnapshot(model)
    first: Any = next(model.parameters())
    first.ds_tensor.zero_()
    with pytest.raises(ZeroDivisionError), shards.in_place():
        assert first.ds_tensor.any()
        raise ZeroDivisionError
    assert not first.ds_tensor.any()


def test_unsharded_models_are_left_as_they_are(model):
    with gather_all(model), gather_per_module(model):
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_shapes_of_sharded_weights_are_known(model):
    expected = {name: tensor.shape for name, tensor in checkpoint_weights(model)}
    OneRank(model)
    assert {name: tensor.shape for name, tensor in checkpoint_weights(model, shapes_only=True)} == expected


def test_unsupported_policies_are_rejected(model):
    check_sharded_policy(model, None)
    kept: Any = SimpleNamespace(keeps_parameters=True)
    with pytest.raises(ValueError, match=r"ZeRO-3 or FSDP: a reference that is this adapter.*beta=0.0"):
        check_sharded_policy(model, kept)


@pytest.mark.parametrize("rows", [[(1, [22, 23, 24]), (1, [40, 41])], []])
def test_passes_without_images_run_the_vision_tower(rows):
    """Other ranks gather its weights in theirs, forward and backward; scores and gradients of the rows stay."""
    vlm = make_vlm_setup("gemma3")
    batch, plain = make_batch(vlm, rows or [(1, [22])]).select(range(len(rows))), ForwardOptions(temperature=0.7)
    example = zero3.image_of_every_pass(vlm.model, vlm.cases[2].prompt, 0.0)
    expected = score_tokens(vlm.model, batch, plain)
    expected.logprobs.sum().backward() if rows else None
    gradients = {name: p.grad for name, p in vlm.model.named_parameters() if p.grad is not None}
    vlm.model.zero_grad()
    for parameter in vlm.model.parameters():
        parameter.ds_id, parameter.ds_status = 0, Status.AVAILABLE
    towers: list[int] = []
    next(m for n, m in vlm.model.named_modules() if n.endswith("vision_tower")).register_forward_hook(
        lambda *_: towers.append(1)
    )
    scores = score_tokens(vlm.model, batch, replace(plain, image_example=example))
    scores.logprobs.sum().backward()
    torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    assert towers == [1]
    for name, parameter in vlm.model.named_parameters():
        wanted = gradients.get(name, torch.zeros_like(parameter))
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-5)


def test_models_that_cannot_make_such_passes_are_refused(model):
    vlm = make_vlm_setup("gemma3")
    assert zero3.image_of_every_pass(model, None, 0.0) is None
    with pytest.raises(UnavailableError, match=r"Gemma3.* under DeepSpeed ZeRO-3: its processor makes no prompt"):
        zero3.image_of_every_pass(vlm.model, None, 0.0)
    with pytest.raises(UnavailableError, match="load-balancing loss would count the image"):
        zero3.image_of_every_pass(vlm.model, vlm.cases[2].prompt, 0.1)
