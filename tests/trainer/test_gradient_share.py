"""Shares of rollouts in a step's gradient, through `train()`, against a backward pass for each token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from groupgrad.objectives.gradient_share import signal_and_noise
from groupgrad.run_folder.run_files import read_lines


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "rollouts" / "step_000001.0.parquet").to_pylist()


def token_gradients(model: Any, prompt: list[int], row: dict[str, Any], count: int) -> list[torch.Tensor]:
    """The gradient of each token's part of the `dapo` loss, of an identity layer before the head, by a pass each."""
    ids = torch.tensor([prompt + row["completion_ids"]])
    hidden = model.model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
    layer = torch.eye(hidden.shape[1], dtype=hidden.dtype, requires_grad=True)
    logprobs = torch.log_softmax(model.lm_head(hidden @ layer.T), -1)
    losses = -row["advantage"] * logprobs[range(len(hidden)), row["completion_ids"]] / count
    return [torch.autograd.grad(loss, layer, retain_graph=True)[0] for loss in losses]


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}])
def test_shares_equal_a_pass_for_each_row(train, make_policy, tokenizer, tmp_path, settings):
    model = make_policy().double()
    before = copy.deepcopy(model)
    train(model=model, max_steps=1, record_gradient_share=True, **settings)
    rows = rows_of(tmp_path / "run")
    count = sum(len(row["completion_ids"]) for row in rows)
    gradients = []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        gradients.append(token_gradients(before, prompt, row, count))
    whole = torch.stack([one for row in gradients for one in row]).sum(0)
    square = whole.square().sum()
    for row, parts in zip(rows, gradients):
        expected = [float((part * whole).sum() / square) for part in parts]
        assert row["gradient_shares"] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert row["gradient_share"] == pytest.approx(sum(expected), rel=1e-4, abs=1e-6)
    assert sum(row["gradient_share"] for row in rows) == pytest.approx(1, abs=1e-5)

    groups = [sum(sum(parts) for parts in gradients[start : start + 4]) for start in range(0, len(rows), 4)]
    signal, noise = signal_and_noise(float(square), sum(float(g.square().sum()) for g in groups), len(groups))
    (line,) = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert line["gradient/signal_to_noise"] == pytest.approx(signal / noise, rel=1e-6)


def test_the_estimates_are_unbiased():
    """Means over many steps equal the true squared norm and variance."""
    generator = np.random.default_rng(0)
    true, num_groups = np.array([0.3, -0.2, 0.5]), 4
    groups = true / num_groups + generator.normal(0, 0.1, (200_000, num_groups, 3))
    whole = groups.sum(1)
    signal, noise = np.mean(
        [signal_and_noise((g**2).sum(), (p**2).sum(), num_groups) for g, p in zip(whole[:50_000], groups)], axis=0
    )
    assert signal == pytest.approx((true**2).sum(), rel=0.01)
    assert noise == pytest.approx(3 * num_groups * 0.01, rel=0.01)
    with pytest.raises(ValueError, match="1 groups"):
        signal_and_noise(1.0, 1.0, 1)


def test_training_is_the_same_with_shares(train, tools, tmp_path):
    weights = []
    for record in (False, True):
        trainer = train(output_dir=str(tmp_path / str(record)), record_gradient_share=record)
        weights.append(tools.weights(trainer.model))
        rows = rows_of(tmp_path / str(record))
        assert all((row["gradient_share"] is not None) == record for row in rows)
    assert torch.equal(*weights)
    idle = [row for row in rows if row["advantage"] == 0]
    assert all(row["gradient_share"] == 0 for row in idle)


def test_rows_of_several_generation_batches_are_told_apart(train, tmp_path):
    """Completions of one token: equal ones stand at the same place of both generation batches of the step."""
    settings = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "generation_batch_size": 8}
    train(max_steps=1, max_completion_length=1, record_gradient_share=True, **settings)
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 16
    assert sum(row["gradient_share"] for row in rows) == pytest.approx(1, abs=1e-4)
