"""A script as a launcher or a shell starts it: `launched_ranks.py MODE OUT`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
import ranks


class Tell(TrainerCallback):
    """Writes process and steps down; in mode `lives_on` rank 1 fails after the first step."""

    def __init__(self, mode: str, out: Path):
        self._mode, self._file = mode, out / f"rank_{os.environ.get('RANK', '0')}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._file.write_text(f"{os.getpid()} {state.global_step}")
        if self._mode == "lives_on" and os.environ["RANK"] == "1":
            raise ValueError("no luck")


def main(mode: str, out: Path) -> None:
    torch.set_num_threads(1)
    # By hand a run is short, but longer than its parent.
    trainer = ranks.build("launched", out, max_steps=20 if mode == "by_hand" else 10**6)
    trainer.add_callback(Tell(mode, out))
    try:
        trainer.train()
    except ValueError:
        time.sleep(60)
    (out / "finished").touch()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
