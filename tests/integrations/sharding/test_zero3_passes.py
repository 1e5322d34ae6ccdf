"""The engine's state is restored after a failed pass, on a stand-in for DeepSpeed's engine.

`tests/trainer/test_sharded.py` tests the numbers of several ranks with DeepSpeed itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from groupgrad.integrations.sharding.pass_collectives import PassCollectives
from groupgrad.integrations.sharding.zero3_passes import _Attributes, _CountedBackend


class Backend:
    """Gives ones, and 7 as the other ranks' integer."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def all_gather_into_tensor(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **_: Any) -> Any:
        self.made.append("gather")
        output_tensor.fill_(1.0)
        return "handle"

    def broadcast(self, tensor: torch.Tensor, **_: Any) -> None:
        self.made.append("broadcast")
        tensor.fill_(7)

    def get_rank(self) -> int:
        return 3


def test_collectives_of_the_failed_pass_are_left_out_and_their_integers_given_again():
    backend = Backend()
    counted, collectives = _CountedBackend(backend), PassCollectives()
    counted.collectives = collectives

    def gather() -> tuple[float, Any]:
        output = torch.full((2,), 5.0)
        handle = counted.all_gather_into_tensor(output_tensor=output, input_tensor=torch.ones(1), async_op=True)
        return float(output.sum()), handle

    def integer() -> int:
        counted.broadcast(tensor=(tensor := torch.tensor([-1])), src=0, async_op=False)
        return int(tensor)

    collectives.begin_pass()
    assert (integer(), gather()) == (7, (2.0, "handle"))
    collectives.begin_rest()
    assert integer() == 7 and backend.made == ["broadcast", "gather"]
    left_out, handle = gather()
    assert left_out == 0.0 and handle.wait() and handle.is_completed()
    assert gather() == (2.0, "handle") and backend.made == ["broadcast", "gather", "gather"]
    assert counted.get_rank() == 3


def test_attributes_get_their_values_and_contents_back():
    class Owner:
        def __init__(self) -> None:
            self.step, self.order, self.queue, self.of_id, self.active = 1, [1], deque([1, 2]), {1: 2}, {3}
            self.nested = {5: deque([6])}

    owner = Owner()
    order, saved = owner.order, _Attributes(owner)
    owner.step = 5
    owner.order.append(2)
    owner.queue.popleft()
    owner.of_id[1] = 0
    owner.nested[5].popleft()
    owner.nested[7] = deque()
    owner.active = set()
    saved.restore()
    assert vars(owner) == vars(Owner()) and owner.order is order
