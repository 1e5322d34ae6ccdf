"""A run of 2,000 steps ends with the memory, file descriptors, threads and child processes that it had at step 210.

    python tests/faults/test_long_run.py --steps 2000

prints what the run of the test has at every 200th step, ten steps after a save.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from datasets import Dataset
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import repeatable_runs

EVERY, BEHIND_A_SAVE = 200, 10
LARGEST_GROWTH = 6 * 2**20
"""Bytes of resident memory by which a run may grow from step 210 to its end; `log_history` takes some of them."""


class Usage(TrainerCallback):
    """The process's resources at steps 210, 410, ..., and at the end."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, int]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > EVERY and state.global_step % EVERY == BEHIND_A_SAVE:
            self.note(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.note(state.global_step)

    def note(self, step: int) -> None:
        gc.collect()
        process = psutil.Process()
        self.seen[step] = {
            "rss": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "children": len(process.children(recursive=True)),
        }


def shout(word: str) -> str:
    """Says a word aloud.

    Args:
        word: What to say.
    """
    return word[:2]


def read_call(text: str, ids: list[int]) -> dict[str, Any]:
    """Makes every third turn a tool call."""
    call = {"name": "shout", "arguments": {"word": text}}
    return {"role": "assistant", "content": text, "tool_calls": [call] if ids[0] % 3 == 0 else []}


async def slow_length(completion_ids: list[list[int]], log_metric: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    log_metric("length", float(len(completion_ids[0])))
    log_extra("first", [ids[0] for ids in completion_ids])
    return [float(len(ids) % 3) for ids in completion_ids]


def sum_of_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def run(folder: Path, num_steps: int) -> dict[int, dict[str, int]]:
    """Trains with all that could leave something behind, and returns what the process had by step."""
    usage = Usage()
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{letter}!"}] for letter in "abcdefgh"]})
    trainer = repeatable_runs.make_trainer(
        folder,
        reward=[slow_length, sum_of_tokens],
        callbacks=[usage],
        dataset=rows,
        eval_dataset=rows.select(range(2)),
        tools=[shout],
        response_parser=read_call,
        max_steps=num_steps,
        per_device_train_batch_size=4,
        max_completion_length=32,
        max_tool_calling_iterations=1,
        learning_rate=1e-4,
        logging_steps=10,
        log_completions=True,
        num_completions_to_print=0,
        save_steps=20,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=50,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    return usage.seen


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_steps_leave_nothing_behind(tmp_path):
    check(run(tmp_path, 2000))


def check(seen: dict[int, dict[str, int]]) -> None:
    """AssertionError if something has grown; a file and a thread may be in use."""
    first, last = seen[min(seen)], seen[max(seen)]
    assert last["rss"] - first["rss"] <= LARGEST_GROWTH, seen
    assert max(found["threads"] for found in seen.values()) <= first["threads"] + 1, seen
    assert max(found["descriptors"] for found in seen.values()) <= first["descriptors"] + 2, seen
    assert max(found["children"] for found in seen.values()) == first["children"], seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    with tempfile.TemporaryDirectory() as folder:
        seen = run(Path(folder), parser.parse_args().steps)
        for step, found in seen.items():
            numbers = ", ".join(f"{name} {number}" for name, number in found.items() if name != "rss")
            print(f"step {step}: {found['rss'] / 2**20:.1f} MiB, {numbers}")
        check(seen)


if __name__ == "__main__":
    sys.exit(main())
