"""A row's value is broadcast to its tokens, and its gradient gathered from them."""

from __future__ import annotations

import torch
from loss_batches import make_batch
from unordered_sums import UnorderedSums

from groupgrad.objectives.ragged import PerRow, broadcast_to_tokens


def test_a_rows_gradient_is_that_of_its_tokens_added_up_in_their_order():
    """In float32 1 is lost beside 2**24: only from left to right do these sum to 1 and 2."""
    batch = make_batch([[1, 1, 1, 1], [], [1, 1, 1]], [0.0, 0.0, 0.0])
    rows = torch.tensor([2.0, 5.0, 3.0], requires_grad=True)
    with UnorderedSums() as sums:
        tokens = broadcast_to_tokens(PerRow(rows), batch)
        tokens.backward(torch.tensor([1.0, 2.0**24, -(2.0**24), 1.0, 2.0**24, -(2.0**24), 2.0]))
    assert tokens.tolist() == [2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert rows.grad is not None and rows.grad.tolist() == [1.0, 0.0, 2.0]
    assert sums.found == []
