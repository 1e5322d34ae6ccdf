"""Two processes of `test_processes_memory.py`: runs whose memory runs out on one rank or both, and runs that must be
equal to them; and those of ranks that share a model. A rank imports this module once it is one.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
from step_events import At
from torch import nn

from groupgrad import dist
from groupgrad.models.shards import is_sharded
from groupgrad.scoring import gradient_checkpointing
from groupgrad.scoring.layout import ForwardInputs
from groupgrad.trainer.gradients import GradientSums, GradientSync

RANK = int(os.environ.get("RANK", "0"))
FULL: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.3}
LORA = {**FULL, "max_steps": 2, "peft": True, "beta": 0.1}
# In every other step weights have moved since rows were sampled, and those without a signal are only measured.
FLAT = {**FULL, **ranks.CASES["flat_groups"]}
SAVED = {**FULL, "save_strategy": "steps", "save_steps": 2}


HOPELESS: dict[str, tuple[dict[str, Any], str]] = {
    "middle": (FULL, "middle"),
    # Entropies that the sampler does not know, here since weights have moved, and the log-probs of the reference.
    "entropies": ({**FLAT, "top_entropy_quantile": 0.5}, "scoring"),
    "evaluation": ({**LORA, "eval": "sets", "eval_strategy": "no"}, "scoring"),
}

scoring: list[bool] = []
"""Not empty in passes that score a batch; sampling goes through the model too."""
forward_of = ForwardInputs.run


def watched(*arguments: Any) -> Any:
    scoring.append(True)
    try:
        return forward_of(*arguments)
    finally:
        scoring.pop()


ForwardInputs.run = watched


@dataclass
class SimulatedOom:
    """Memory runs out in passes of more than `most` tokens on the ranks `on`, from the one numbered `first` on, at most
    `times` times."""

    where: str
    """`forward`, in the `middle` of the backward pass, or without a gradient at all (`scoring`)."""
    on: tuple[int, ...]
    most: int = 0
    first: int = 0
    times: int = 10**6
    fails: bool = False
    """Number of the current pass."""
    passes: int = 0
    failures: int = 0
    half_made: int = 0
    """Failures that found gradients of this pass."""

    def put_into(self, model: nn.Module) -> None:
        """Makes passes of the model fail."""
        layer = next(m for name, m in model.named_modules() if name.endswith("layers.0"))
        last = next(m for name, m in model.named_modules() if name.endswith("layers.1"))
        trained = [p for p in last.parameters() if p.requires_grad and not is_sharded(model)]
        before: list[torch.Tensor | None] = []

        def begin(_module: nn.Module, _arguments: Any, options: dict[str, Any]) -> None:
            self.fails = False
            if torch.is_grad_enabled() == (self.where == "scoring") or not scoring or RANK not in self.on:
                return
            before[:] = [None if p.grad is None else p.grad.clone() for p in trained]
            self.passes += 1
            too_large = options["input_ids"].numel() > self.most and self.passes > self.first
            self.fails = too_large and self.failures < self.times
            if self.fails and self.where != "middle":
                self.fail()

        def in_the_middle(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if self.where == "middle" and self.fails:
                hidden = output if isinstance(output, torch.Tensor) else output[0]
                hidden.register_hook(lambda gradient: self.fail(trained, before))

        model.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(in_the_middle)

    def fail(self, trained: list[nn.Parameter] | None = None, before: list[Any] | None = None) -> None:
        self.failures += 1
        for parameter, old in zip(trained or (), before or ()):
            if parameter.grad is not None and (old is None or not torch.equal(parameter.grad, old)):
                self.half_made += 1
                break
        raise MemoryError("there is no more")


CASES: dict[str, tuple[dict[str, Any], SimulatedOom | None]] = {
    "full": (FULL, None),
    "lora": (LORA, None),
    "flat": (FLAT, None),
    "full, forward on one": ({**FULL, "micro_batches": 1}, SimulatedOom("forward", (1,), most=14)),
    "full, forward on both once": (FULL, SimulatedOom("forward", (0, 1), first=3, times=1)),
    "full, middle on one": (SAVED, SimulatedOom("middle", (1,), most=10)),
    "lora, middle on both": (LORA, SimulatedOom("middle", (0, 1), most=10)),
    "lora, scoring on one": (LORA, SimulatedOom("scoring", (1,), most=10)),
    "flat, scoring on one": (FLAT, SimulatedOom("scoring", (0,), most=8)),
}


def folder(name: str) -> str:
    """Folder that a case's trainer writes to; none of the cases of `ranks.py` has such a name."""
    return "short_" + name.replace(", ", "_").replace(" ", "_")


def run(name: str, out: Path) -> dict[str, Any]:
    """Trains one case to its end."""
    settings, oom = CASES[name]
    trainer = ranks.build(folder(name), out, **settings)
    oom = oom or SimulatedOom("forward", ())
    oom.put_into(trainer.model)
    trainer.train()
    return {**outcome(trainer), "failures": oom.failures, "half_made": oom.half_made}


def outcome(trainer: Any) -> dict[str, Any]:
    log = ranks.HELP.without_times(trainer.state.log_history)
    return {"weights": ranks.HELP.weights(trainer.model), "log": log, "limit": trainer.memory.state_dict()["limit"]}


def resume(out: Path) -> dict[str, Any]:
    """Resumes the saved run with its memory limits."""
    oom = SimulatedOom("middle", (1,), most=10)
    trainer = ranks.build(folder("full, middle on one"), out, **SAVED)
    oom.put_into(trainer.model)
    trainer.train(str(out / "run" / folder("full, middle on one") / "checkpoint-2"))
    return {**outcome(trainer), "failures": oom.failures}


def hopeless(where: str, out: Path) -> dict[str, Any]:
    """Not even one row fits on the last rank, from the third pass on; what each rank sees of it, and when."""
    settings, watched = HOPELESS[where]
    trainer = ranks.build("hopeless", out, **settings)
    SimulatedOom(watched, (1,), first=2).put_into(trainer.model)
    started = time.perf_counter()
    try:
        trainer.evaluate() if where == "evaluation" else trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - started}
    return {"error": None, "seconds": 0.0}


def of_a_shared_model(name: str, build: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Trains a case in which rank 1 has too little memory: for one pass (`too_large`), or for activations (`by_need`).

    Returns the trainer, and its error or what was seen of its passes.
    """
    free_bytes, seen = gradient_checkpointing.free_bytes, {}
    if name == "by_need" and RANK == 1:
        gradient_checkpointing.free_bytes = lambda device: 1000
    trainer = build()
    oom = SimulatedOom("middle", (1,), most=10) if name == "too_large" else SimulatedOom("forward", (0, 1), most=10**6)
    oom.put_into(trainer.model)
    checkpointing = lambda _: seen.update(recomputes=trainer.checkpointing is not None and trainer.checkpointing.is_on)  # noqa: E731
    trainer.add_callback(At("on_step_end", checkpointing))
    try:
        trainer.train()
    except Exception as error:
        return trainer, {"error": f"{type(error).__name__}: {error}"}
    finally:
        gradient_checkpointing.free_bytes = free_bytes
    return trainer, {**seen, "passes": oom.passes}


def joined(out: Path) -> dict[str, Any]:
    """The gradients that this rank had when it met the others, and those that all left with. Rank 1 starts with other
    weights, and training follows an evaluation."""
    found: dict[str, Any] = {"before": [], "after": []}
    average = dist.average_gradients

    def watched(parameters: Any, **options: Any) -> None:
        parameters = list(parameters)
        found["options"] = options
        found["before"].append([None if p.grad is None else p.grad.clone() for p in parameters])
        average(parameters, **options)
        found["after"].append([None if p.grad is None else p.grad.clone() for p in parameters])

    model = ranks.first_model()
    model.register_buffer("own", torch.tensor(float(RANK)), persistent=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * RANK
    settings = {**FULL, "eval": "sets", "eval_strategy": "no"}
    settings["gradient_checkpointing_kwargs"] = {"use_reentrant": True}  # so that gradients are averaged after the pass
    trainer = ranks.build("joined", out, model=model, ddp_bucket_cap_mb=1, ddp_broadcast_buffers=False, **settings)
    trainer.evaluate()
    dist.average_gradients = watched
    try:
        trainer.train()
    finally:
        dist.average_gradients = average
    return {**found, **outcome(trainer), "own": float(model.own)}


def half_precision_sum() -> torch.Tensor:
    """The gradient of a bfloat16 weight after each rank has made five passes."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    sums = GradientSums(model, in_float32=True)
    sync = GradientSync(model, sums)
    sync.begin()
    for number in range(5):
        with sums.passes(is_last=number == 4), sync.micro_batch(is_last=number == 4):
            factor = 256.0 if number == 0 else (0.75, 0.5)[RANK]
            (factor * model(torch.ones(1, 1, dtype=torch.bfloat16))).sum().backward()
    return model.weight.grad.float()


class Stack(nn.Module):
    """Layers of different sizes, one of which only rank 0 runs and one none, over inputs that differ between ranks."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.of_rank_0 = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.unused = nn.Linear(6, 6)
        self.to(dtype)

    def backward(self, number: int, full_at: int | None = None) -> None:
        """A pass; with `full_at` memory runs out in the backward pass of this layer."""
        generator = torch.Generator().manual_seed(10 * number + RANK)
        states = torch.randn(3, 6, generator=generator).to(self.unused.weight.dtype)
        for place, layer in enumerate([self.of_rank_0] * (RANK == 0) + list(self.layers)):
            states = layer(states)
            if place == full_at:
                states.register_hook(self.fail)
        states.square().sum().backward()

    @staticmethod
    def fail(_gradient: torch.Tensor) -> None:
        raise MemoryError("there is no more")


def sent_early(dtype: torch.dtype, *, overlaps: bool) -> dict[str, Any]:
    """The averaged gradients of some steps, and how many buckets were sent before a step's last pass was over."""
    model = Stack(dtype)
    sums = GradientSums(model, in_float32=True)
    sync = GradientSync(model, sums, bucket_bytes=200, overlaps=overlaps)
    sync.begin()
    found: dict[str, Any] = {"gradients": [], "sent": []}
    for step in ("first", "plain", "full on rank 1", "no last pass on rank 1", "plain again"):
        for last in (False, True):
            with sums.passes(is_last=last), sync.micro_batch(is_last=last):
                if last and RANK == 1 and step == "no last pass on rank 1":
                    continue
                try:
                    with sync.backward_pass(is_last=True):
                        model.backward(last, 1 if last and RANK == 1 and step == "full on rank 1" else None)
                except MemoryError:
                    sums.clear()
                    model.backward(0)
                    with sync.backward_pass(is_last=True):
                        model.backward(1)
                found["sent"].append(len(sync._ahead._sent))
                sync.unsent()
        found["gradients"].append([None if p.grad is None else p.grad.float() for p in model.parameters()])
        sums.clear()
    try:
        for last in (False, True):
            with sums.passes(is_last=last), sync.micro_batch(is_last=last), sync.backward_pass(is_last=True):
                model.backward(last)
                if RANK == 1:
                    raise ValueError("no luck")
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


OTHERS: dict[str, Callable[[Path], Any]] = {
    "resumed": resume,
    "joined": joined,
    "half_precision_sum": lambda out: half_precision_sum(),
    **{
        f"sent_early_{dtype}": lambda out, dtype=dtype: [sent_early(dtype, overlaps=x) for x in (True, False)]
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{f"hopeless_{where}": partial(hopeless, where) for where in HOPELESS},
}
"""Runs beside `CASES`, which need more than settings."""


def found(names: Iterable[str], out: Path) -> dict[str, Any]:
    """Runs the cases on this rank, and returns what each ended with."""
    gc.freeze()  # what was imported need not be looked through after each failure
    return {name: OTHERS[name](out) if name in OTHERS else run(name, out) for name in names}
