"""The runs that `test_zero_saves.py` makes on two ranks (`torch.distributed.run ... zero_saves.py OUT STAGE WHAT`).

WHAT is `whole` (a run that nothing disturbs), `killed` (rank 1 is killed in the middle of its third save) or `again`
(the same script once more).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
import ranks
import zero_ranks as ZERO

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "beta": 0.1}


def kill_rank_1(trainer: Any) -> None:
    """Ends rank 1 behind the first file of its own that it writes for the checkpoint of the third step."""
    write = torch.save

    def killing(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        if trainer.state.global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = killing


def build(out: Path, stage: int, name: str, **changes: Any) -> Any:
    return ranks.build(name, out, **{**STEPS, **changes}, deepspeed=ZERO.deepspeed_config(stage, persistent=False))


def ending(trainer: Any, out: Path, name: str) -> None:
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
    ZERO.start_deepspeed()
    if what == "whole":
        trainer = build(out, stage, "whole")
        trainer.train()
        ending(trainer, out, "whole")
        return
    trainer = build(out, stage, "stopped")
    if what == "killed":
        kill_rank_1(trainer)
    trainer.train(resume_from_checkpoint="auto")
    ending(trainer, out, "stopped")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
