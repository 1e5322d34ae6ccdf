"""FSDP on one process, which holds all shards, and the models that it refuses.

What several processes compute is for `tests/trainer/test_fsdp.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from groupgrad.errors import UnavailableError
from groupgrad.integrations.sharding.fsdp import (
    FSDPOptions,
    decoder_layers,
    is_hook,
    shard,
    whole_parameters,
    whole_state_dict,
)
from groupgrad.integrations.sharding.sharding import ShardSnapshot
from groupgrad.models.load import nonfinite_weights
from groupgrad.models.shards import (
    gather_all,
    is_fully_sharded,
    is_shard,
    is_sharded,
    local_part,
    num_parameters,
)
from groupgrad.scoring.forward import ForwardOptions, score_tokens, score_without_gradient
from groupgrad.scoring.self_check import random_batch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    path: Path = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def sharded(group: None, make_model: Any) -> Any:
    model = make_model(tie_word_embeddings=True)
    shard(model, FSDPOptions(), CPU)
    return model


def hooks(model: nn.Module) -> int:
    found = (
        hook for m in model.modules() for part in (m._forward_pre_hooks, m._forward_hooks) for hook in part.values()
    )
    return sum(is_hook(hook) for hook in found)


def test_a_sharded_model_scores_and_has_the_gradient_of_a_whole_one(sharded, make_model):
    plain, batch = make_model(tie_word_embeddings=True), random_batch(sharded)
    for model in (plain, sharded):
        scores = score_tokens(model, batch, ForwardOptions(entropy_gradient=True))
        (scores.logprobs.sum() + 0.3 * scores.entropy.square().sum()).backward()
    for own, other in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert is_shard(own) and is_shard(own.grad)
        torch.testing.assert_close(local_part(own.grad), other.grad, rtol=1e-5, atol=1e-6)
    assert num_parameters(sharded) == num_parameters(plain)


def test_a_pass_without_gradient_leaves_nothing_gathered(sharded):
    score_without_gradient(sharded, random_batch(sharded), ForwardOptions())
    assert all(is_shard(parameter) for parameter in sharded.parameters())


def test_inside_gather_all_the_model_is_an_ordinary_one(sharded, make_model):
    plain, batch = make_model(tie_word_embeddings=True), random_batch(sharded)
    count, names = hooks(sharded), [name for name, _ in sharded.named_parameters()]
    assert is_fully_sharded(sharded) and count >= 6
    with gather_all(sharded):
        assert [type(module) for module in sharded.modules()] == [type(module) for module in plain.modules()]
        assert hooks(sharded) == 0 and not is_sharded(sharded)
        assert sharded.lm_head.weight is sharded.model.embed_tokens.weight
        inside = score_without_gradient(sharded, batch, ForwardOptions()).logprobs
        assert torch.equal(inside, score_without_gradient(plain, batch, ForwardOptions()).logprobs)
    assert hooks(sharded) == count and is_fully_sharded(sharded)
    assert [name for name, _ in sharded.named_parameters()] == names
    assert all(is_shard(parameter) for parameter in sharded.parameters())


def test_shards_are_put_back_also_on_errors(sharded):
    with pytest.raises(ZeroDivisionError), whole_parameters(sharded):
        assert not is_sharded(sharded)
        raise ZeroDivisionError
    assert is_sharded(sharded)


def test_saved_weights_are_whole_and_tied_ones_are_one_tensor(sharded, make_model):
    state = whole_state_dict(sharded)
    plain = make_model(tie_word_embeddings=True).state_dict()
    assert list(state) == list(plain) and all(torch.equal(state[name], plain[name]) for name in plain)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


def test_a_snapshot_replaces_later_weights_bitwise(sharded):
    batch, snapshot = random_batch(sharded), ShardSnapshot(sharded)
    expected = score_without_gradient(sharded, batch, ForwardOptions()).logprobs
    for parameter in sharded.parameters():
        local_part(parameter).add_(0.5 * torch.randn_like(local_part(parameter)))
    later = score_without_gradient(sharded, batch, ForwardOptions()).logprobs
    with snapshot.in_place():
        assert torch.equal(score_without_gradient(sharded, batch, ForwardOptions()).logprobs, expected)
    assert torch.equal(score_without_gradient(sharded, batch, ForwardOptions()).logprobs, later)
    assert (later - expected).abs().max() > 0.1


def without_layers(model: Any) -> None:
    model._no_split_modules = []


def quantized(model: Any) -> None:
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)


def with_only_a_trained_head(model: Any) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_layers, r"no module of the classes \(none are named\).*transformer_layer_cls_to_wrap"),
        (quantized, "quantized weights are not sharded"),
        (with_only_a_trained_head, "nothing below the output head is trained"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused_before_anything_changes(make_model, change, words):
    model = make_model()
    change(model)
    with pytest.raises(UnavailableError, match=words):
        shard(model, FSDPOptions(), CPU)
    assert not is_fully_sharded(model)


def test_layers_can_be_named(make_model):
    model = make_model()
    assert decoder_layers(model) == list(model.model.layers)
    assert decoder_layers(model, ["Qwen3MLP"]) == [layer.mlp for layer in model.model.layers]
    assert decoder_layers(model, ["Qwen3DecoderLayer", "Qwen3MLP"]) == list(model.model.layers)


def test_trained_shards_that_are_not_finite_are_named(sharded):
    assert nonfinite_weights(sharded, trained_only=True) is None
    parameter = sharded.model.norm.weight
    local_part(parameter)[0] = torch.nan
    found = nonfinite_weights(sharded, trained_only=True)
    assert found == f"1 of {parameter.numel()} numbers of the model's model.norm.weight are NaN or infinite"
    parameter.requires_grad_(False)
    assert nonfinite_weights(sharded, trained_only=True) is None
