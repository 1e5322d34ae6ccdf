"""AdamW for bfloat16 weights with stochastic rounding, without float32 copies of the weights.

At a small learning rate most updates are smaller than half the spacing of bfloat16 values, so rounding to nearest would
undo them. Rounding up with a probability that grows with the remainder keeps them on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_LOW_BITS = 16
"""Bits of a float32 that bfloat16 lacks."""

CHUNK = 1 << 22
"""Elements of a parameter that are updated at a time. Their float32 temporaries take at most 16 bytes each, 64 MiB."""


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rounds float32 `values` to one of the two neighbours in bfloat16, with the value as expectation.

    The probability of a neighbour grows linearly with its nearness (arXiv:1502.02551, eq. 2). Values that bfloat16
    represents, infinities and NaN stay.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << _LOW_BITS, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def check_parameters(model: nn.Module) -> None:
    """ValueError if a trained parameter of `model` is not bfloat16."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.bfloat16:
            raise ValueError(
                f"stochastic_rounding=True rounds to bfloat16, but {name} is {str(parameter.dtype).split('.')[-1]}, "
                "which needs no such rounding; load the model with model_init_kwargs={'dtype': 'bfloat16'} (adapters: "
                "pass a PeftModel made with autocast_adapter_dtype=False), or set stochastic_rounding=False"
            )


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101, algorithm 2) in float32 for bfloat16 parameters, with stochastic rounding.

    Moments are float32; with weights and gradients that is 12 bytes a parameter, float32 weights need 16. The noise
    depends on `seed`, the parameter's index and its step alone, so a resumed run is bitwise equal and all ranks round
    alike.

    A contiguous parameter is updated in chunks of `CHUNK` elements, so that no temporary tensor has its size. A CPU
    draws the same noise for any size of chunks; a GPU draws other noise for another size, so the size is a constant.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        seed: int = 0,
    ):
        self._seed = seed
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates every parameter that has a gradient; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators: dict[torch.device, torch.Generator] = {}
        parameters = ((group, p) for group in self.param_groups for p in group["params"])
        for index, (group, parameter) in enumerate(parameters):
            if parameter.grad is None:
                continue
            state = self._state_of(parameter)
            state["step"] += 1
            device = parameter.device
            generator = generators.setdefault(device, torch.Generator(device))
            generator.manual_seed(_noise_seed(self._seed, index, state["step"]))
            tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
            for weights, gradient, mean, square in _chunks(tensors, CHUNK):
                updated = _updated(weights, gradient.float(), mean, square, group, state["step"])
                weights.copy_(round_stochastically(updated, generator))
        return loss

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores float32 moments; the base class would round them to the parameters' dtype."""
        super().load_state_dict(state_dict)
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, parameter in zip(indices, parameters):
            saved = state_dict["state"].get(index, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in saved:
                    self.state[parameter][name] = saved[name].to(parameter.device, torch.float32, copy=True)


def _chunks(tensors: Sequence[torch.Tensor], size: int) -> Iterator[Sequence[torch.Tensor]]:
    """Cuts tensors of one shape alike into views of at most `size` elements; those with gaps in memory stay whole."""
    if all(tensor.is_contiguous() for tensor in tensors):
        yield from zip(*(tensor.view(-1).split(size) for tensor in tensors))
    else:
        yield tensors


def _updated(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    group: dict[str, Any],
    step: int,
) -> torch.Tensor:
    """Updates the moments `mean` and `square` and returns the weights after their step, in float32."""
    rate, (beta1, beta2) = group["lr"], group["betas"]
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    decayed = weights.float().mul_(1 - rate * group["weight_decay"])
    return decayed.addcdiv_(mean, scale, value=-rate / (1 - beta1**step))


def _noise_seed(seed: int, index: int, step: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{index}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
