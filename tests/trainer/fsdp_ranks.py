"""The runs that `test_fsdp.py` makes under FSDP on several processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
from rank_cases import LARGE
from transformers import TrainerCallback

from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.models.shards import gather_all, is_sharded, local_part, num_parameters
from groupgrad.models.weights import checkpoint_weights

TWO_STEPS = {"generation_batch_size": 32, "max_steps": 4}
SAVED = {**TWO_STEPS, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}

BOUNDED = {**LARGE, "max_steps": 2, "beta": 0.1}

OWN: dict[str, dict[str, Any]] = {
    # A norm of the gradient far above the bound, and trained weights that two modules share.
    "clipped": {**TWO_STEPS, "loss_type": "grpo", "max_grad_norm": 0.1, "tied": True, **LARGE},
    "reference": {**TWO_STEPS, "beta": 0.1, "reward": ranks.few_vary, "num_iterations": 2, **LARGE},
    "lora": {**TWO_STEPS, "peft": True, "beta": 0.1, "gradient_checkpointing": True},
    # One evaluation set has one prompt, so that one rank has nothing to measure.
    "saved": {**SAVED, "eval": "sets", "eval_steps": 2, "beta": 0.1},
    # Few groups have a signal and rows stay on their ranks, so that a rank is without a gradient now and then.
    "saved_lora": {**SAVED, "peft": True, "reward": ranks.few_vary, "shuffle_rows": "groups", "balance_ranks": False},
    "images without checkpointing": {"images": True, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2},
    "offload": {**BOUNDED, "max_grad_norm": 0.05, "fsdp_config": {"cpu_offload": True}},
    "cut": {**BOUNDED, "max_tokens_per_pass": 16},
    "by_need": {**BOUNDED, "gradient_checkpointing": None},
    "too_large": BOUNDED,
}
"""Cases beside those of `ranks.py`."""

REFUSED = ("rows_stay", "lora", "resumed")
"""Cases of `ranks.py` that ask for what FSDP does not go with, or that are among `OWN` in another form."""


ROUNDING = ("entropy", "dynamic_sampling")
"""Cases that train with SGD, since AdamW blows up rounding in gradients that are almost zero.

With AdamW all weights of `entropy` differed by 1.3e-5, relatively, and one of the 1,536 numbers of a weight of
`dynamic_sampling` by 4.6e-5.
"""


CASES = {name: case for name, case in ranks.CASES.items() if name not in REFUSED}
CASES |= {name: {**CASES[name], **LARGE} for name in ROUNDING} | OWN
"""All cases by name."""


def build(name: str, out: Path, **changes: Any) -> Any:
    """The case's trainer: under FSDP on several processes, plain on one."""
    settings = {**CASES[name], **changes}
    settings.setdefault("fsdp", int(os.environ.get("WORLD_SIZE", "1")) > 1 or None)
    if not settings["fsdp"]:
        settings.pop("fsdp_config", None)
    if settings.pop("tied", False):
        settings["model"] = ranks.BASE.make_model(0, initializer_range=0.15, tie_word_embeddings=True)
    return ranks.build(f"fsdp_{name}", out, **settings)


def whole_weights(trainer: Any) -> torch.Tensor:
    """Collective."""
    with gather_all(trainer.model):
        return ranks.HELP.weights(trainer.model)


def run(name: str, out: Path) -> dict[str, Any]:
    trainer = build(name, out)
    local = sum(local_part(parameter).numel() for parameter in trainer.model.parameters())
    found: dict[str, Any] = {"sharded": (is_sharded(trainer.model), local, num_parameters(trainer.model))}
    trainer.train()
    found |= result(trainer)
    found |= {"layout": trainer.execution.layout_report, "engine": trainer.execution.engine_choice.name}
    if name.startswith(("saved", "images")):
        trainer.save_model(str(out / "run" / f"fsdp_{name}" / "final"))
    if name.startswith("saved"):
        again = build(name, out, output_dir=str(out / "again" / name))
        again.train(str(out / "run" / f"fsdp_{name}" / "checkpoint-1"))
        found["again"] = result(again)
    return found


def result(trainer: Any) -> dict[str, Any]:
    """Collective."""
    return {
        "weights": whole_weights(trainer),
        "pushed": {name: tensor.clone() for name, tensor in checkpoint_weights(trainer.model)},
        "log": ranks.HELP.without_times(trainer.state.log_history),
    }


def bounded(name: str, out: Path) -> dict[str, Any]:
    """A case in which the passes of one rank are bounded, or do not fit."""
    import oom_ranks

    trainer, seen = oom_ranks.of_a_shared_model(name, lambda: build(name, out))
    return seen if "error" in seen else {**result(trainer), **seen}


class Gradients(TrainerCallback):
    """Notes dtypes of gradients, and how many of their numbers bfloat16 has."""

    def __init__(self, model: Any):
        self._model, self.dtypes, self.in_bf16 = model, set(), []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parts = [local_part(p.grad).flatten() for p in self._model.parameters() if p.grad is not None]
        self.dtypes |= {part.dtype for part in parts}
        values = torch.cat(parts)
        values = values[values != 0]
        self.in_bf16.append(float((values == values.bfloat16().float()).float().mean()))


def half_precision(out: Path) -> dict[str, Any]:
    """A run that computes in bfloat16 on float32 weights."""
    settings = {"max_steps": 2, "micro_batches": 1, "max_grad_norm": 0.0, "bf16": True, **LARGE}
    trainer = build("lora", out, **{**settings, "peft": False, "gradient_checkpointing": False, "beta": 0.0})
    gradients = Gradients(trainer.model)
    trainer.add_callback(gradients)
    trainer.train()
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    return {**result(trainer), "gradients": gradients.dtypes, "in_bf16": gradients.in_bf16, "dtypes": dtypes}


def full_disk(out: Path) -> dict[str, Any]:
    """Three steps, of which rank 1 cannot save the second; returns the checkpoints."""
    trainer = build("saved", out, max_steps=3, output_dir=str(out / "full"), eval=None)
    trainer.add_callback(ranks.FullDisk())
    trainer.train()
    names = sorted(path.name for path in (out / "full").iterdir() if path.name.startswith(("checkpoint", "_group")))
    return {"found": names, "weights": whole_weights(trainer)}


def served(out: Path) -> dict[str, Any]:
    """The case `lora`, sampled by an engine with weights of its own, which are pushed to it with adapters merged."""
    import zero_ranks

    zero_ranks.FIRST.append(ranks.first_model())
    own = vllm_setup.serve_policy
    zero_ranks.serve_copies()
    try:
        trainer = build("lora", out, use_vllm=True, vllm_mode="server")
        trainer.train()
    finally:
        vllm_setup.serve_policy = own
    return {"weights": whole_weights(trainer)}


def weights_only(out: Path) -> dict[str, Any]:
    """A checkpoint without optimizer, and a run of as many steps that loads it."""
    settings = {"max_steps": 1, "save_only_model": True, "output_dir": str(out / "weights_only"), "eval": None}
    trainer = build("saved", out, **settings)
    trainer.train()
    again = build("saved", out, **{**settings, "save_strategy": "no"})
    first = whole_weights(again)
    again.train(str(out / "weights_only" / "checkpoint-1"))
    return {"weights": whole_weights(trainer), "first": first, "again": whole_weights(again)}


EXTRA: dict[str, Callable[[Path], dict[str, Any]]] = {
    "half_precision": half_precision,
    "full_disk": full_disk,
    "served": served,
    "weights_only": weights_only,
    **{name: partial(bounded, name) for name in ("cut", "by_need", "too_large")},
}
"""Runs of a kind of their own."""


def found(names: list[str], out: Path, checkpoint: Path | None = None) -> dict[str, Any]:
    """Runs the cases on this rank, and returns what each ended with; with `checkpoint` the case goes on from there."""
    results = {}
    for name in names:
        if name in EXTRA:
            results[name] = EXTRA[name](out)
        elif checkpoint is None:
            results[name] = run(name, out)
        else:
            trainer = build(name, out, save_strategy="no")
            trainer.train(str(checkpoint))
            results[name] = result(trainer)
    return results
