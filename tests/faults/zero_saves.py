"""The runs that `test_zero_saves.py` makes on two ranks (`torch.distributed.run ... zero_saves.py OUT STAGE WHAT`).

WHAT is `whole` (a run that nothing disturbs, and one where the disk of rank 1 is full at its second save), `killed`
(rank 1 is killed in the middle of its third save) or `again` (the same script once more).
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

_SPEC = importlib.util.spec_from_file_location("zero", Path(__file__).parents[1] / "trainer" / "zero_ranks.py")
assert _SPEC is not None and _SPEC.loader is not None
ZERO = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ZERO)

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "beta": 0.1}


class FullDisk(TrainerCallback):
    """Lets rank 1 write no file at the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        is_full = state.global_step == 2 and os.environ["RANK"] == "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_full else hard, hard))


def kill_rank_1(trainer: Any) -> None:
    """Ends rank 1 behind the first file of its own that it writes for the checkpoint of the third step."""
    write = torch.save

    def killing(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        if trainer.state.global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = killing


def build(ranks: Any, out: Path, stage: int, name: str, **changes: Any) -> Any:
    return ranks.build(name, out, **{**STEPS, **changes}, deepspeed=ZERO.deepspeed_config(stage, persistent=False))


def ending(ranks: Any, trainer: Any, out: Path, name: str) -> None:
    """Writes the weights, the log and the checkpoints of a run that has ended."""
    run = out / "run" / name
    found = {
        "weights": ZERO.whole_weights(trainer),
        "log": ranks.HELP.without_times(trainer.state.log_history)[:-1],
        "folders": sorted(path.name for path in run.glob("checkpoint-*")),
    }
    torch.save(found, out / f"{name}_{os.environ['RANK']}.pt")


def main(out: Path, stage: int, what: str) -> None:
    torch.set_num_threads(1)
    ranks = ZERO.start()
    if what == "whole":
        trainer = build(ranks, out, stage, "whole")
        trainer.train()
        ending(ranks, trainer, out, "whole")
        trainer = build(ranks, out, stage, "full", max_steps=3)
        trainer.add_callback(FullDisk())
        trainer.train()
        ending(ranks, trainer, out, "full")
        return
    trainer = build(ranks, out, stage, "stopped")
    if what == "killed":
        kill_rank_1(trainer)
    trainer.train(resume_from_checkpoint="auto")
    ending(ranks, trainer, out, "stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
