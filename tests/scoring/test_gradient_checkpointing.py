"""The memory of activations, and gradient checkpointing where it does not fit."""

from __future__ import annotations

import logging

import pytest
import torch
from vlm_batches import make_batch, make_vlm_setup

from groupgrad import kernels
from groupgrad.multimodal.vlm_prompts import example_prompt
from groupgrad.scoring import gradient_checkpointing
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.scoring.gradient_checkpointing import FREE_FRACTION, CheckpointingByNeed, activation_bytes_per_token


def test_activations_are_measured_on_the_model(make_model):
    """A layer saves at least its inputs and the MLP's four intermediate values; twice the layers save twice as much."""
    two, four = (activation_bytes_per_token(make_model(num_hidden_layers=n), ForwardOptions()) for n in (2, 4))
    per_layer = (four - two) / 2
    assert per_layer > 4 * (2 * 32 + 4 * 48)
    assert per_layer < 4 * 40 * (32 + 48)
    assert two > 2 * per_layer


@pytest.mark.skipif(kernels.library() is None, reason="without kernels transformers' modules keep more")
def test_activations_are_those_that_training_keeps(make_model):
    """The compiled modules save their inputs alone, also while the saved tensors are counted."""
    two, four = (activation_bytes_per_token(make_model(num_hidden_layers=n).train(), ForwardOptions()) for n in (2, 4))
    hidden, inner, query, key = 32, 48, 4 * 8, 2 * 8
    norms = (hidden + 1) + (query + 4) + (key + 2) + (hidden + 1)  # inputs, and a factor for each vector
    linears = (
        hidden + query + hidden
    )  # inputs of queries to values, of the output, of gate and up; that of down is made anew
    attention = query + key + key + 2 * 4  # and two numbers a query head; its output is the input of a linear layer
    assert (four - two) / 2 == 4 * (norms + linears + attention + 2 * inner)


def test_checkpointing_switches_on_and_off(make_model, batch, monkeypatch, caplog):
    model = make_model().train()
    by_need = CheckpointingByNeed(model, ForwardOptions())
    by_need.prepare(batch)
    assert not model.is_gradient_checkpointing
    tokens = len(batch.prompt_ids) + batch.num_tokens - batch.num_rows
    need = tokens * activation_bytes_per_token(model, ForwardOptions())

    monkeypatch.setattr(gradient_checkpointing, "free_bytes", lambda device: int(0.9 * need / FREE_FRACTION))
    with caplog.at_level(logging.WARNING):
        by_need.prepare(batch)
    assert by_need.is_on
    assert model.is_gradient_checkpointing
    assert "gradient checkpointing is on" in caplog.text
    score_tokens(model, batch, ForwardOptions()).logprobs.sum().backward()
    recomputed = torch.cat([p.grad.flatten() for p in model.parameters()])

    monkeypatch.setattr(gradient_checkpointing, "free_bytes", lambda device: int(1.1 * need / FREE_FRACTION))
    by_need.prepare(batch)
    assert not by_need.is_on
    assert not model.is_gradient_checkpointing
    model.zero_grad()
    score_tokens(model, batch, ForwardOptions()).logprobs.sum().backward()
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), recomputed)


@pytest.mark.parametrize("layout", ["shared", "dense"])
def test_padding_counts_in_the_dense_layout(make_model, batch, monkeypatch, layout):
    by_need = CheckpointingByNeed(make_model(), ForwardOptions(layout=layout))
    asked = []
    monkeypatch.setattr(gradient_checkpointing, "free_bytes", lambda device: asked.append(1) or 1 << 40)
    by_need._bytes_per_token = 2**40 * FREE_FRACTION / (len(batch.prompt_ids) + batch.num_tokens + 1)
    by_need.prepare(batch)
    assert by_need.is_on == (layout == "dense")  # 5 rows of 8 tokens instead of 9 + 14
    assert asked == [1]


def test_copies_of_weights_in_another_precision_are_no_activations(make_model):
    """Under autocast a pass saves bfloat16 copies of the weights, which do not grow with its tokens."""
    model = make_model(hidden_size=128, intermediate_size=512)
    plain = activation_bytes_per_token(model, ForwardOptions())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert activation_bytes_per_token(model, ForwardOptions()) < 1.3 * plain


def test_modes_and_random_streams_are_left_as_they_were(make_model):
    model = make_model().eval()
    model.lm_head.train()
    before = torch.get_rng_state()
    CheckpointingByNeed(model, ForwardOptions())
    assert [name for name, module in model.named_modules() if module.training] == ["lm_head"]
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_are_left_as_they_were_by_a_measurement_that_fails(make_model, monkeypatch):
    def fail(model, options):
        assert model.training
        raise MemoryError("full")

    monkeypatch.setattr(gradient_checkpointing, "activation_bytes_per_token", fail)
    model = make_model().eval()
    model.lm_head.train()
    with pytest.raises(MemoryError, match="full"):
        CheckpointingByNeed(model, ForwardOptions())
    assert [name for name, module in model.named_modules() if module.training] == ["lm_head"]


def test_activations_of_images_are_measured():
    """Two layers of the vision tower save at least their states and their MLPs' values for 16 patches each."""
    vlm = make_vlm_setup("gemma3")
    example = example_prompt(vlm.processor)
    assert sum(tensor.numel() for tensor in example.media.tensors.values()) == 3 * 16 * 16
    per_token = activation_bytes_per_token(vlm.model, ForwardOptions())
    per_value = gradient_checkpointing.activation_bytes_per_value(vlm.model, ForwardOptions(), example, per_token)
    least = 2 * 16 * 4 * (2 * 16 + 2 * 32)
    assert least < 3 * 16 * 16 * per_value < 20 * least


@pytest.mark.parametrize(("layout", "images"), [("shared", 3), ("dense", 7)])
def test_images_count_where_they_are_computed(monkeypatch, layout, images):
    """Prompts with two, one and no image count once in the shared layout, else once for each of their rows."""
    vlm = make_vlm_setup("gemma3")
    by_need = CheckpointingByNeed(vlm.model, ForwardOptions(layout=layout), example=example_prompt(vlm.processor))
    by_need._bytes_per_token, by_need._bytes_per_value = 0.0, 1.0
    need = images * 3 * 16 * 16
    batch = make_batch(vlm, [(0, [20]), (0, [21]), (1, [22]), (2, [23]), (2, [24]), (2, [25])])
    for share, is_on in ((0.99, True), (1.01, False)):
        monkeypatch.setattr(
            gradient_checkpointing,
            "free_bytes",
            lambda device, share=share: share * need / FREE_FRACTION,
        )
        by_need.prepare(batch)
        assert by_need.is_on == is_on
