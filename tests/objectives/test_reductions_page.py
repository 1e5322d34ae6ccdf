"""The reductions compute the example numbers that docs/losses.md states beside their formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from groupgrad.batch import Batch, StepTotals
from groupgrad.objectives.methods import LOSSES
from groupgrad.objectives.reduce import REDUCTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
STATED = {
    name: float(value)
    for names, value in re.findall(r"^\*\*.+\*\* \(((?:`\w+`(?:, )?)+); example: ([\d.]+)", PAGE, re.MULTILINE)
    for name in re.findall(r"\w+", names)
}
BY_HAND = {
    "grpo": (1 + (2 + 3 + 4) / 3) / 2,
    "sapo": (1 + (2 + 3 + 4) / 3) / 2,
    "dapo": (1 + 2 + 3 + 4) / 4,
    "cispo": (1 + 2 + 3 + 4) / 4,
    "vespo": (1 + 2 + 3 + 4) / 4,
    "dppo_tv": (1 + 2 + 3 + 4) / 4,
    "dppo_kl": (1 + 2 + 3 + 4) / 4,
    "gmpo": (1 + (2 + 3 + 4) / 3) / 2,
    "luspo": (1 + 2 + 3 + 4) / 2,
    "dr_grpo": (1 + 2 + 3 + 4) / (2 * 5),
    "bnpo": (1 + 2 + 3 + 4) / 4,
}


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_example_of_the_page(loss_type: str, make_batch: Callable[..., Batch]) -> None:
    batch = make_batch([[True], [True, True, True]], [0.0, 0.0])
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert REDUCTIONS[LOSSES[loss_type].reduction](losses, batch, 5).item() == pytest.approx(BY_HAND[loss_type])
    assert STATED[loss_type] == pytest.approx(BY_HAND[loss_type])


def test_bnpo_with_a_micro_batch_for_each_completion(make_batch: Callable[..., Batch]) -> None:
    totals = StepTotals(rows=2, tokens=4, micro_batches=2)
    parts = [
        REDUCTIONS["local_token_mean"](torch.tensor(losses), make_batch([[True] * len(losses)], [0.0], totals), 5)
        for losses in ([1.0], [2.0, 3.0, 4.0])
    ]
    assert sum(part.item() for part in parts) == pytest.approx((1 + 3) / 2)
    assert "2 in one for each completion" in PAGE
