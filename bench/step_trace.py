"""Lists the functions of groupgrad that one optimizer step of a text run calls, on the default path.

    python bench/step_trace.py [--all]

Each line is `file:function (lines)`, in the order of the first call. A function's lines include its docstring and
comments. Left out, unless `--all` is given, is what the reader of a step does not read: the engines' internals, the
kernels, the model's forward pass (attention and layout) and the arithmetic of the output head. The step that is traced
samples, scores and trains 8 completions of 2 prompts on a CPU; the step before it has run, so that nothing is set up.
The last two lines are sums: of the functions from `training_step` to the optimizer, and of the whole list, which has
what begins and ends a step too.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

import groupgrad
from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo import task as tiny_task

ROOT = Path(groupgrad.__file__).parent
INTERNALS = (
    "kernels/",
    "engines/native/",
    "engines/transformers.py",
    "engines/stop_strings.py",
    "scoring/fused_modules.py",
    "models/families.py",
    "scoring/vlm.py",
    "scoring/attention.py",
    "integrations/recurrent/recurrent_layers.py",
    "scoring/blocks.py",
    "scoring/block_attention.py",
    "scoring/early_gradients.py",
    "scoring/flex_attention.py",
    "scoring/tiled_head.py",
    "scoring/head_tiles.py",
    "scoring/layout.py",
    "scoring/logit_transform.py",
)
"""Engine internals, the model's forward pass and the head's arithmetic."""
Row = tuple[str, str, int]
"""A function: its file, relative to the package, its name, and its number of lines."""


class StepTracer(TrainerCallback):
    """Records every function of groupgrad that the second optimizer step calls."""

    def __init__(self) -> None:
        self.called: dict[CodeType, None] = {}
        self.before_optimizer: dict[CodeType, None] = {}
        """Those of them that `training_step` calls, and what follows it up to the optimizer."""
        self._is_before_optimizer = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Switch recording on before the second step."""
        if state.global_step == 1:
            sys.setprofile(self._record)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The gradients are complete."""
        self._is_before_optimizer = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Switch recording off."""
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            self.called.setdefault(frame.f_code)
            self._is_before_optimizer |= frame.f_code is GRPOTrainer.training_step.__code__
            if self._is_before_optimizer:
                self.before_optimizer.setdefault(frame.f_code)


@lru_cache
def functions_of(path: str) -> dict[int, tuple[str, int]]:
    """Name and number of lines of each function in a file, by its first line and by the line of its `def`."""
    found: dict[int, tuple[str, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef) and child.end_lineno is not None:
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    entry = name, child.end_lineno - first + 1
                    found[first] = found[child.lineno] = entry
                name += "."
            visit(child, name)

    visit(ast.parse(Path(path).read_text()), "")
    return found


def traced_functions(*, everything: bool) -> tuple[list[Row], list[Row]]:
    """Functions that a step calls, by first call, and those of them from `training_step` to the optimizer."""
    tracer = StepTracer()
    tokenizer = tiny_task.make_tokenizer()
    problems = tiny_task.make_splits(0).grpo[:8]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=2,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=tiny_task.make_model(tokenizer, 0),
            reward_funcs=length_reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": problem.prompt} for problem in problems]),
            processing_class=tokenizer,
            callbacks=[tracer],
        )
        trainer.train()
    return _rows(tracer.called, everything=everything), _rows(tracer.before_optimizer, everything=everything)


def _rows(called: Iterable[CodeType], *, everything: bool) -> list[Row]:
    rows: dict[tuple[str, str], int] = {}
    for code in called:
        file = str(Path(code.co_filename).relative_to(ROOT))
        name, lines = functions_of(code.co_filename).get(code.co_firstlineno, ("", 0))
        # Comprehensions and lambdas are part of the function that they stand in; a nested function counts with its own.
        if lines and (everything or not file.startswith(INTERNALS)):
            rows.setdefault((file, name), lines)
    return [(file, name, lines) for (file, name), lines in rows.items()]


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Rewards that differ within a group."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def main() -> None:
    """Print the list and its sums."""
    parser = argparse.ArgumentParser(description="Lists the functions that one optimizer step calls.")
    parser.add_argument("--all", action="store_true", help="count engine internals, forward pass and head too")
    rows, before_optimizer = traced_functions(everything=parser.parse_args().all)
    for file, name, lines in rows:
        print(f"{file}:{name} ({lines})")
    print(f"from training_step to the optimizer: {_sums(before_optimizer)}")
    print(_sums(rows))


def _sums(rows: list[Row]) -> str:
    files = {file for file, *_ in rows}
    return f"{sum(lines for *_, lines in rows)} lines in {len(rows)} functions of {len(files)} files"


if __name__ == "__main__":
    main()
