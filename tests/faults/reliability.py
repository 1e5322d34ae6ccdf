"""Writes docs/reliability.md from the `fault` marks of the tests: `python tests/faults/reliability.py`."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """\
# Reliability

A run cannot be lost: a checkpoint is whole or not there, and what is damaged is named. This page lists what may go
wrong, what happens then, and what is lost. `python tests/faults/reliability.py` writes it from the marks of the tests,
so that each row has a test that breaks the run on purpose.

## Checkpoints

A checkpoint is written to `output_dir/_groupgrad_unfinished`, synced to the disk, and gets its name by one rename. Its
last file, `manifest.json`, lists every other file with size and SHA-256, the number of processes, versions, the
options that decide results, the trained parameters, the adapter's settings and the reference. A resume verifies all of
them before anything is loaded.

| `resume_from_checkpoint` | takes |
|---|---|
| a path | this checkpoint; an error that names the file if it is damaged |
| `True` | the newest whole checkpoint in `output_dir`; what is skipped is named; an error without one |
| `"auto"` | the same, or a new start where there is no checkpoint |

It is an argument of `trainer.train()`, and a field of the configuration for a call without it. Further fields:

| field | effect |
|---|---|
| `allow_partial_resume` | resume without what is damaged or does not fit: optimizer, schedule, randomness, rollouts |
| `resume_learning_rate` | the configured learning rate replaces the checkpoint's |

A run goes on with the parameters that the checkpoint's run has trained, in the same adapter and model. If some were
added, removed or changed, or if the optimizer holds them in another order, an error says so. With
`allow_partial_resume` other parameters of the same model may train, and the optimizer begins anew. Checkpoints of
older releases and of TRL do not name trained parameters: weights that they lack, and an optimizer's state of other
shapes, are errors while they are loaded. A KL divergence goes on with the reference that the run began with: give that
model as `model`, not the checkpoint, whose weights a resume loads.

Changed options are listed with the value in force. `save_steps`, `eval_steps` and `logging_steps` are those of the new
configuration, or of a callback that sets them when training begins.

An old checkpoint is removed when the new one has its name, so that one whole checkpoint is there at every moment:
`save_total_limit=1` needs room for two checkpoints, and with `load_best_model_at_end` for three.

Under DeepSpeed all ranks write, and wait for each other between files. If the disk of one rank alone refuses, the
others wait until `hang_timeout_s` or `ddp_timeout` ends the run. Older checkpoints stay whole.

`groupgrad train` exits with 0 when all is done, with 2 when a run cannot begin, and with 73 when the disk refused the
last checkpoint or the model (`groupgrad.errors.EXIT_CHECKPOINT_NOT_SAVED`; `trainer.train()` raises
`CheckpointNotSaved`). Files are read once more for their digests, shared out among the processes of a machine.

## The end of a run

| exit code | meaning |
|---|---|
| 0 | all steps were made, and the weights are finite |
| 1 | an exception ended the run: its traceback is on stderr, its last line also in `events.jsonl` as `failed` |
| 2 | the run cannot begin |
| 70 | a phase hung (`hang_timeout_s`) or another rank ended, and this process did not react; stderr names the cause |
| 73 | the disk refused the last checkpoint |
| 75 | SIGTERM, SIGUSR1 or SIGHUP stopped the run after a checkpoint; start again with `resume_from_checkpoint="auto"` |
| 130 | Ctrl-C did |

[examples/slurm.sh](../examples/slurm.sh) queues a job again that a time limit or a preemption has stopped.
`python tests/faults/random_signals.py --tries 100` sends signals at random moments to runs on two ranks and counts what
is lost. `KILLS=200 python -m pytest -m slow -s tests/faults/test_kills_in_training.py` kills runs of eleven kinds,
starts them again, and compares them with undisturbed ones.

Beside the process group each rank has a connection to rank 0. Over it a rank says that it fails or hangs, and its end
shows that its process was killed; then every rank ends within 10 s with a `RankError` that names rank, process and
cause. In a hang every rank writes its stacks to `output_dir`. Rank 0 listens on a port that the system chooses, on this
machine alone if all ranks are there.

## Faults

"""


def rows() -> list[tuple[str, str, str, str]]:
    """Fault, what happens, what is lost and the test, in the order of files and lines."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault(" not in text:
            continue
        for node in ast.parse(text).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    what, then, lost = (ast.literal_eval(argument) for argument in mark.args)
                    found.append((what, then, lost, f"{path.relative_to(ROOT).as_posix()}::{node.name}"))
    return found


def page() -> str:
    """The text of docs/reliability.md."""
    table = ["| fault | what happens | what is lost | test |", "|---|---|---|---|"]
    table += [f"| {what} | {then} | {lost} | `{test}` |" for what, then, lost, test in rows()]
    return HEAD + "\n".join(table) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
