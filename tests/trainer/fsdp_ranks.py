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

from groupgrad.modeling.systems.sharding import gather_all

COMMON = {"generation_batch_size": 32, "max_steps": 3, "adam_epsilon": 1e-5}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {**COMMON, "loss_type": "grpo"},
}


def load_ranks() -> Any:
    """The module `ranks`, whose runs these are."""
    spec = importlib.util.spec_from_file_location("ranks", Path(__file__).with_name("ranks.py"))
    assert spec is not None and spec.loader is not None
    ranks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ranks)
    return ranks


def build(ranks: Any, name: str, out: Path, **changes: Any) -> Any:
    """The case's trainer: under FSDP on several processes, plain on one."""
    settings = {**CASES[name], **changes}
    settings.setdefault("fsdp", int(os.environ.get("WORLD_SIZE", "1")) > 1 or None)
    return ranks.build(f"fsdp_{name}", out, **settings)


def whole_weights(ranks: Any, trainer: Any) -> torch.Tensor:
    """Collective."""
    with gather_all(trainer.model):
        return ranks.HELP.weights(trainer.model)


def run(ranks: Any, name: str, out: Path) -> dict[str, Any]:
    trainer = build(ranks, name, out)
    trainer.train()
    return {"weights": whole_weights(ranks, trainer), "log": ranks.HELP.without_times(trainer.state.log_history)}


def main(out: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    ranks = load_ranks()
    for name in names or CASES:
        torch.save(run(ranks, name, out), out / f"{name}_{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
