"""The runs that `test_fsdp.py` makes under FSDP on several processes (`torch.distributed.run ... fsdp_ranks.py OUT`).

Every rank writes what it ended with to `OUT/<case>_<rank>.pt`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

from groupgrad.modeling.systems.fsdp import local_part
from groupgrad.modeling.systems.sharding import gather_all, is_sharded, num_parameters

TWO_STEPS = {"generation_batch_size": 32, "max_steps": 4}
LARGE = {"optim": "sgd", "learning_rate": 0.3}
SAVED = {**TWO_STEPS, "save_strategy": "steps", "save_steps": 1}

OWN: dict[str, dict[str, Any]] = {
    # A norm of the gradient far above the bound, and trained weights that two modules share.
    "clipped": {**TWO_STEPS, "loss_type": "grpo", "max_grad_norm": 0.1, "tied": True, **LARGE},
    "reference": {**TWO_STEPS, "beta": 0.1, "flat": True, "num_iterations": 2, **LARGE},
    "lora": {**TWO_STEPS, "peft": True, "beta": 0.1, "gradient_checkpointing": True},
    # One evaluation set has one prompt, so that one rank has nothing to measure.
    "saved": {**SAVED, "eval": "sets", "eval_steps": 2, "beta": 0.1},
    # Few groups have a signal and rows stay on their ranks, so that a rank is without a gradient now and then.
    "saved_lora": {**SAVED, "peft": True, "flat": True, "shuffle_rows": "groups", "balance_ranks": False},
}
"""Cases beside those of `ranks.py`."""

REFUSED = ("rows_stay", "lora", "images", "resumed", "saved_behind")
"""Cases of `ranks.py` that ask for what FSDP does not go with, or that are among `OWN` in another form."""


def cases(ranks: Any) -> dict[str, dict[str, Any]]:
    """All cases by name."""
    return {**{name: case for name, case in ranks.CASES.items() if name not in REFUSED}, **OWN}


def load_ranks() -> Any:
    """The module `ranks`, whose runs these are."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None and spec.loader is not None
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    return ranks


def build(ranks: Any, name: str, out: Path, **changes: Any) -> Any:
    """The case's trainer: under FSDP on several processes, plain on one."""
    settings = {**cases(ranks)[name], **changes}
    settings.setdefault("fsdp", int(os.environ.get("WORLD_SIZE", "1")) > 1 or None)
    if settings.pop("flat", False):
        settings["reward"] = lambda completion_ids, row, **_: ranks.few_vary(completion_ids, row)
    if settings.pop("tied", False):
        settings["model"] = ranks.BASE.make_model(0, initializer_range=0.15, tie_word_embeddings=True)
    return ranks.build(f"fsdp_{name}", out, **settings)


def whole_weights(ranks: Any, trainer: Any) -> torch.Tensor:
    """Collective."""
    with gather_all(trainer.model):
        return ranks.HELP.weights(trainer.model)


def run(ranks: Any, name: str, out: Path, **changes: Any) -> dict[str, Any]:
    trainer = build(ranks, name, out, **changes)
    local = sum(local_part(parameter).numel() for parameter in trainer.model.parameters())
    found: dict[str, Any] = {"sharded": (is_sharded(trainer.model), local, num_parameters(trainer.model))}
    trainer.train()
    found |= result(ranks, trainer)
    found |= {"layout": trainer.execution.layout, "engine": trainer.execution.engine.name}
    if name.startswith("saved"):
        trainer.save_model(str(out / "run" / f"fsdp_{name}" / "final"))
        again = build(ranks, name, out, output_dir=str(out / "again" / name))
        again.train(str(out / "run" / f"fsdp_{name}" / "checkpoint-1"))
        found["again"] = result(ranks, again)
    return found


def result(ranks: Any, trainer: Any) -> dict[str, Any]:
    """Collective."""
    return {
        "weights": whole_weights(ranks, trainer),
        "log": ranks.HELP.without_times(trainer.state.log_history),
    }


def main(out: Path, checkpoint: str | None, names: list[str]) -> None:
    """Makes the runs of these cases, by default of all, or continues one from `checkpoint` to its end."""
    torch.set_num_threads(1)
    ranks, rank = load_ranks(), os.environ["RANK"]
    for name in names or cases(ranks):
        if checkpoint is None:
            torch.save(run(ranks, name, out), out / f"{name}_{rank}.pt")
        else:
            trainer = build(ranks, name, out, save_strategy="no")
            trainer.train(checkpoint)
            torch.save(result(ranks, trainer), out / f"{name}_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), None if sys.argv[2] == "from-start" else sys.argv[2], sys.argv[3:])
