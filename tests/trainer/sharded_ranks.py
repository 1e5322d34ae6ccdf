"""The runs that `test_sharded.py` makes on two processes which share a model.

DeepSpeed reads what a launcher puts into the environment, so ZeRO-3 runs this as a script (arguments: OUT CASES). Every
rank writes what it ended with to `OUT/result_<rank>.pt`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
import ranks

from groupgrad.models.shards import gather_all
from groupgrad.models.weights import checkpoint_weights
from groupgrad.scoring import gradient_checkpointing

SGD = {"optim": "sgd", "learning_rate": 0.3, "max_steps": 2}
PLAIN = {**SGD, "beta": 0.1}

CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "adapter": {**PLAIN, "peft": True, "learning_rate": 1.0},
    # Few groups have a signal, so that a rank has no gradient now and then.
    "no_signal": {**SGD, "reward": ranks.few_vary, "balance_ranks": False},
    # Flat groups give place to others, in a round in which a rank may have no rows.
    "drawn_again": {**SGD, "reward": ranks.few_vary, "dynamic_sampling_rounds": 1},
    "by_need": {**PLAIN, "gradient_checkpointing": None},
    "cut": {**PLAIN, "max_tokens_per_pass": 16},
    "images": {"images": True, "optim": "sgd", "learning_rate": 0.1, "max_steps": 2},
    "images_checkpointing": {"images": True, "gradient_checkpointing": True, "optim": "sgd", "learning_rate": 0.1},
    "offload": {**PLAIN, "max_grad_norm": 0.05, "offload": True},
    "too_large": {**PLAIN, "short": ("middle", (1,), 10)},
}


class _Recomputes(TrainerCallback):
    """Sees at the end of each step whether layers were computed again in the backward pass."""

    def __init__(self, trainer: Any):
        self.trainer, self.at_step_end = trainer, False

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.at_step_end = self.trainer.checkpointing is not None and self.trainer.checkpointing.is_on


def build(name: str, out: Path, kind: str | None) -> Any:
    """The case's trainer; without `kind` the plain one, for one process."""
    settings = dict(CASES[name])
    settings.pop("short", None)
    offload = settings.pop("offload", False)
    if kind == "fsdp2":
        settings |= {"fsdp": True, "fsdp_config": {"cpu_offload": True} if offload else None}
    elif kind == "zero3":
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config
        from zero_ranks import deepspeed_config

        unset_hf_deepspeed_config()  # that of the case before, under which transformers would shard a new model
        settings["deepspeed"] = deepspeed_config(3, False)
    return ranks.build(f"sharded_{name}", out, **settings)


def run(name: str, out: Path, kind: str) -> dict[str, Any]:
    """Trains a case to its end, or to the error that ends it."""
    import oom_ranks

    free_bytes = gradient_checkpointing.free_bytes
    if name == "by_need" and os.environ["RANK"] == "1":
        gradient_checkpointing.free_bytes = lambda device: 1000
    trainer = build(name, out, kind)
    where, on, most = CASES[name].get("short", ("forward", (0, 1), 10**6))
    oom = oom_ranks.SimulatedOom(where, on, most=most)
    oom.put_into(trainer.model)
    trainer.add_callback(recomputes := _Recomputes(trainer))
    try:
        trainer.train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gradient_checkpointing.free_bytes = free_bytes
    with gather_all(trainer.model):
        weights = ranks.HELP.weights(trainer.model)
    if name == "images":
        trainer.save_model(str(out / "final"))
    return {
        "names": [name for name, _ in checkpoint_weights(trainer.model, shapes_only=True)],
        "weights": weights,
        "log": ranks.HELP.without_times(trainer.state.log_history),
        "passes": oom.passes,
        "recomputes": recomputes.at_step_end,
    }


def found(kind: str, names: Iterable[str], out: Path) -> dict[str, Any]:
    """Runs the cases on this rank, and returns what each ended with."""
    return {name: run(name, out, kind) for name in names}


if __name__ == "__main__":
    from zero_ranks import start_deepspeed

    torch.set_num_threads(1)
    start_deepspeed()
    out, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.save(found("zero3", sys.argv[2:], out), out / f"result_{rank}.pt")
    # After `too_large` rank 0 waits in gloo until the process of rank 1 ends, and does not wait for long. The shutdown
    # of an interpreter that has loaded DeepSpeed takes seconds where the machine is busy.
    sys.stderr.flush()
    os._exit(0)
