"""Updates below half the spacing of bfloat16 are kept on average, and runs with one seed round alike."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groupgrad.trainer import stochastic_adamw
from groupgrad.trainer.stochastic_adamw import StochasticAdamW, round_stochastically


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("value", "below", "above"),
    [(-1.001, -1.0, -1.0078125), (3.3e-5, 3.2901764e-5, 3.3140182e-5), (300.5, 300.0, 302.0)],
)
def test_rounding_gives_a_neighbour_and_on_average_the_value(value: float, below: float, above: float):
    """bfloat16 has 7 mantissa bits: its spacing is 1/128 between 1 and 2, and 2 between 256 and 512."""
    actual = round_stochastically(torch.full((200_000,), value), stream()).float()
    low, high = (torch.tensor(x).bfloat16().float() for x in (below, above))
    assert set(actual.unique().tolist()) == {low.item(), high.item()}
    share = float((actual == high).double().mean())
    chance = (value - low.item()) / (high - low).item()
    assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 200_000) + 1e-4)
    assert float(actual.double().mean()) == pytest.approx(value, rel=2e-5)


def test_bfloat16_values_stay():
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e30, math.inf, -math.inf, math.nan]).bfloat16().float()
    for seed in range(20):
        actual = round_stochastically(values, stream(seed)).float()
        assert torch.equal(actual.nan_to_num(7.0), values.nan_to_num(7.0))
        assert bool(actual[-1].isnan())


def weight(dtype: torch.dtype, size: int = 4096) -> nn.Parameter:
    return nn.Parameter(torch.linspace(0.5, 1.5, size).bfloat16().to(dtype))


def step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_step_is_that_of_adamw_rounded(decay: float):
    """Within one bfloat16 spacing of the update of float32 weights, on either side."""
    gradient = torch.linspace(-1, 1, 4096)
    ours, plain = weight(torch.bfloat16), weight(torch.float32)
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": decay}
    first, second = StochasticAdamW([ours], **settings), torch.optim.AdamW([plain], **settings)
    for _ in range(3):
        plain.data.copy_(ours.float())
        step(first, ours, gradient)
        step(second, plain, gradient.bfloat16())
        gap = ours.float() - plain
        assert float(gap.abs().max()) <= 2**-7
        assert 0.2 < float((gap > 0).float().mean()) < 0.8
        assert float(gap.double().mean()) == pytest.approx(0.0, abs=2e-4)
    for name in ("exp_avg", "exp_avg_sq"):
        assert first.state[ours][name].dtype == torch.float32
        torch.testing.assert_close(first.state[ours][name], second.state[plain][name])


def test_the_noise_follows_from_seed_parameter_and_step():
    """Other random numbers do not matter; a resumed run with float32 moments is bitwise equal."""

    def run(seed: int, resume: bool = False) -> list[torch.Tensor]:
        parameters = [weight(torch.bfloat16), weight(torch.bfloat16)]
        optimizer = StochasticAdamW(parameters, lr=1e-2, seed=seed)
        for number in range(4):
            if resume and number == 2:
                state, torch_state = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
                parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
                optimizer = StochasticAdamW(parameters, lr=1e-2, seed=seed)
                optimizer.load_state_dict(state)
                torch.set_rng_state(torch_state)
            torch.rand(number + seed)
            for parameter in parameters:
                parameter.grad = torch.linspace(-1, 1, 4096).bfloat16() * (number + 1)
            optimizer.step()
        assert {optimizer.state[p][n].dtype for p in parameters for n in ("exp_avg", "exp_avg_sq")} == {torch.float32}
        return [p.detach() for p in parameters]

    first, again, resumed, other = run(1), run(1), run(1, resume=True), run(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[0], resumed[0]) and torch.equal(first[1], resumed[1])
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1]), "each parameter has noise of its own"


class Temporaries(TorchDispatchMode):
    """Counts the bytes of tensors that operations have made and that are still in use."""

    def __init__(self, *existing: torch.Tensor):
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (place := tensor.untyped_storage().data_ptr()) not in self._known:
                self._known.add(place)
                self.live += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(tensor, self._free, place, tensor.untyped_storage().nbytes())
        return result

    def _free(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.live -= size


def three_steps() -> dict[str, torch.Tensor]:
    """Weights and moments of a (300, 70) parameter after three steps."""
    parameter = nn.Parameter(torch.linspace(0.5, 1.5, 21_000).bfloat16().view(300, 70))
    optimizer = StochasticAdamW([parameter], lr=1e-2, weight_decay=0.1)
    for number in range(3):
        parameter.grad = torch.linspace(-1, 1, 21_000).bfloat16().view(300, 70) * (number + 1)
        optimizer.step()
    return {"weights": parameter.detach(), **{n: optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq")}}


@pytest.mark.parametrize("size", [64, 20_999])
def test_the_size_of_chunks_changes_nothing_on_a_cpu(monkeypatch, size: int):
    expected = three_steps()
    monkeypatch.setattr(stochastic_adamw, "CHUNK", size)
    for name, actual in three_steps().items():
        assert torch.equal(actual, expected[name]), name


def test_temporaries_are_those_of_a_chunk(monkeypatch):
    """16 bytes an element of a chunk, where an update of the whole parameter at once takes them for each element."""
    parameter = weight(torch.bfloat16, 1 << 18)
    parameter.grad = torch.ones_like(parameter)
    optimizer = StochasticAdamW([parameter], lr=1e-2)
    optimizer.step()
    kept = (parameter.data, parameter.grad, *(optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq")))
    peaks = {}
    for size in (1 << 12, 1 << 18):
        monkeypatch.setattr(stochastic_adamw, "CHUNK", size)
        with Temporaries(*kept) as temporaries:
            optimizer.step()
        peaks[size] = temporaries.peak
        assert temporaries.live == 0
    assert 12 * (1 << 18) <= peaks[1 << 18] <= 16 * (1 << 18)
    assert peaks[1 << 12] <= 16 * (1 << 12)


def test_parameters_without_a_gradient_and_a_closure():
    used, unused = weight(torch.bfloat16, 8), weight(torch.bfloat16, 8)
    optimizer = StochasticAdamW([{"params": [used], "lr": 0.1}, {"params": [unused], "lr": 0.1}])

    def closure() -> torch.Tensor:
        loss = used.float().sum()
        loss.backward()
        return loss

    before = unused.detach().clone()
    assert float(optimizer.step(closure)) == pytest.approx(8.0, abs=0.1)
    assert torch.equal(unused, before)
    assert float((used - weight(torch.bfloat16, 8)).float().max()) < -0.09
