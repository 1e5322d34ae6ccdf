"""The reductions compute the example numbers that docs/losses.md states beside their formulas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from loss_batches import make_batch

from groupgrad.batch import StepTotals
from groupgrad.objectives.reduce import REDUCTIONS, Reduction

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
STATED = {name: float(value) for name, value in re.findall(r"^\*\*(.+)\*\* \(example: ([\d.]+)", PAGE, re.MULTILINE)}
EXAMPLES: dict[Reduction, tuple[str, float]] = {
    "sequence_mean": ("Mean of each completion, then over completions", (1 + (2 + 3 + 4) / 3) / 2),
    "token_mean": ("Mean over all tokens of the step", (1 + 2 + 3 + 4) / 4),
    "sequence_sum": ("Sum of each completion, mean over completions", (1 + 2 + 3 + 4) / 2),
    "constant": ("Sum of tokens over a constant", (1 + 2 + 3 + 4) / (2 * 5)),
    "local_token_mean": ("Mean over the tokens of a micro-batch", (1 + 2 + 3 + 4) / 4),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_example_of_the_page(reduction: Reduction) -> None:
    title, by_hand = EXAMPLES[reduction]
    batch = make_batch([[True], [True, True, True]], [0.0, 0.0])
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert REDUCTIONS[reduction](losses, batch, 5).item() == pytest.approx(by_hand)
    assert STATED[title] == pytest.approx(by_hand)


def test_bnpo_with_a_micro_batch_for_each_completion() -> None:
    totals = StepTotals(rows=2, tokens=4, micro_batches=2)
    parts = [
        REDUCTIONS["local_token_mean"](torch.tensor(losses), make_batch([[True] * len(losses)], [0.0], totals), 5)
        for losses in ([1.0], [2.0, 3.0, 4.0])
    ]
    assert sum(part.item() for part in parts) == pytest.approx((1 + 3) / 2)
    assert "2 in one for each completion" in PAGE
