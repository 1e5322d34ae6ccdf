"""A run folder of any size, made by the writers of a real run from invented rollouts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from groupgrad.data.images import digest
from groupgrad.run_folder import run_files
from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.rollout_table import StoredRows, images_by_name, to_table
from groupgrad.run_folder.run_files import LineFile
from groupgrad.types import Media, Prompt, RewardTable, Rollout, ToolUse, Trace

WORDS = ["the", "answer", "is", "carried", "over", "since", "seven", "times", "eight", "makes", "fifty", "six"]
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"


def write_run(
    folder: Path,
    *,
    steps: int,
    rows: int = 64,
    tokens: int = 60,
    seed: int = 0,
    hostile: bool = False,
    ended: bool = True,
    evaluated: Collection[int] = (),
    eval_rows: int = 8,
    turns: int = 0,
    settings: dict[str, Any] | None = None,
    images: bool = False,
) -> Path:
    """Writes a run that learns: its rewards rise, its entropy falls. `rows` a step, in groups of 8.

    At the steps `evaluated` there are `eval_rows` rollouts of an evaluation, at step 0 nothing else. With `turns`
    prompts and completions are conversations of so many turns each. With `images` each prompt has one, and the first
    and the sixth row of each group have one more, which a tool has returned.
    """
    folder.mkdir(parents=True)
    generator, numbers = random.Random(seed), np.random.default_rng(seed)
    config = {
        "format": 1, "started": 1.7e9, "max_steps": steps, "processes": 1, "model": "tiny/demo",
        "rewards": ["correct", "short"], "versions": {},
        "settings": {"learning_rate": 1e-6, "num_generations": 8, "loss_type": "dapo", **(settings or {})},
    }  # fmt: skip
    (folder / run_files.CONFIG).write_text(json.dumps(config))
    metrics, events = LineFile(folder / run_files.METRICS), LineFile(folder / run_files.EVENTS)
    events.append({"time": 1.7e9, "step": 0, "event": "started", "host": "here", "pid": 1, "processes": 1})
    files = RolloutFiles(folder / run_files.ROLLOUTS, rank=0, keep_bytes=10**9, seed=seed)
    for step in range(steps + 1):
        if step in evaluated:
            held_out = RolloutFiles(folder / run_files.EVAL_ROLLOUTS / "eval", rank=0, keep_bytes=10**9, seed=seed)
            part = _rows(step / steps, eval_rows, tokens, generator, numbers, hostile=False)
            part.phase = "eval"
            held_out.write(step, [to_table(step, part)], max_steps=steps)
        if step == 0:
            continue
        part = _rows(step / steps, rows, tokens, generator, numbers, hostile, turns)
        if images:
            part.rollouts = [_with_images(rollout) for rollout in part.rollouts]
        metrics.append({"step": step, "time": 1.7e9 + 5 * step, **_metrics(step, steps, part, numbers)})
        table = to_table(step, part)
        files.write(step, [table], max_steps=steps, images=images_by_name(part, table))
        if step % max(2, steps // 4) == 0:
            saved = {"event": "checkpoint", "folder": f"checkpoint-{step}"}
            events.append({"time": 1.7e9 + 5 * step, "step": step, **saved})
    text = "73 completions got no reward" + (HOSTILE if hostile else "")
    events.append({"time": 1.7e9 + 9, "step": 2, "event": "warning", "source": "groupgrad.rewards", "text": text})
    if ended:
        events.append({"time": 1.7e9 + 5 * steps, "step": steps, "event": "ended"})
    return folder


def _rows(
    progress: float,
    rows: int,
    tokens: int,
    generator: random.Random,
    numbers: np.random.Generator,
    hostile: bool,
    turns: int = 0,
) -> StoredRows:
    rollouts, texts, lengths = [], [], []
    for row in range(rows):
        group = row // 8
        words = [" " + generator.choice(WORDS) for _ in range(generator.randint(tokens // 3, tokens))]
        if hostile and row == 0:
            words[0] = HOSTILE
        question, answer = f"What is {group} times {group + 3}?", "".join(words)
        given = _conversation(question, answer, turns) if turns else question
        prompt = Prompt([1, 2, 3], {"prompt": given, "answer": group}, group)
        has_tool = row % 16 == 5
        uses = [ToolUse("calculator", failed=row % 32 == 5, timed_out=False, seconds=0.2)] if has_tool else []
        rollouts.append(
            Rollout(
                prompt=prompt,
                index=row,
                completion_ids=list(range(len(words))),
                finish_reason="eos" if generator.random() < 0.5 + progress / 2 else "length",
                completion=_calls(answer, turns) if turns else answer,
                text=answer,
                sampled=[not (has_tool and 5 <= place < 10) for place in range(len(words))] if has_tool else None,
                trace=Trace(2, uses, 0.2) if has_tool else None,
            )
        )
        texts += words
        lengths.append(len(words))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    correct = [1.0 if generator.random() < 0.2 + 0.7 * progress else 0.0 for _ in range(rows)]
    short = [1 - length / tokens for length in lengths]
    combined = [one + 0.2 * two for one, two in zip(correct, short)]
    by_turn = {
        row: torch.tensor([[torch.nan, 0.5], [correct[row], short[row] - 0.5]], dtype=torch.float64)
        for row, rollout in enumerate(rollouts)
        if len(rollout.turns) == 2
    }
    means = [np.mean(combined[row // 8 * 8 : row // 8 * 8 + 8]) for row in range(rows)]
    return StoredRows(
        rollouts=rollouts,
        ids=numbers.integers(0, 30_000, offsets[-1]),
        offsets=offsets,
        texts=texts,
        advantages=[float(value - mean) for value, mean in zip(combined, means)],
        table=RewardTable(
            torch.tensor([correct, short], dtype=torch.float64).T,
            ["correct", "short"],
            {"extracted": [str(row) for row in range(rows)]},
            seconds={"correct": 0.3, "short": 0.001},
            by_turn=by_turn,
        ),
        combined=combined,
        num_generations=8,
        turn_advantages=[[-0.25, 0.5][: len(rollout.turns)] for rollout in rollouts],
        logprobs=-numbers.exponential(1.2 - progress, offsets[-1]).astype(np.float32),
        entropy=numbers.exponential(1.2 - progress, offsets[-1]).astype(np.float32),
    )


def change_columns(path: Path, columns: dict[str, Any]) -> None:
    """Gives columns of a file of rollouts other values: a list of all, or those of some rows by their places."""
    table = pq.read_table(path)
    for name, values in columns.items():
        if isinstance(values, dict):
            values = [values.get(place, value) for place, value in enumerate(table[name].to_pylist())]
        kind = table.field(name)
        table = table.set_column(table.column_names.index(name), kind, pa.array(values, kind.type))
    pq.write_table(table, path)


def _with_images(rollout: Rollout) -> Rollout:
    """The rollout with a red image of its prompt and, in some rows, one of a colour of its own that a tool returned."""
    own = [(0, 40 * (rollout.index % 8 + 1), 200)] if rollout.index % 8 in (0, 5) else []
    red, *more = (Image.new("RGB", (60, 40), color) for color in ["red", *own])
    prompt = replace(rollout.prompt, media=Media((red,), {}, {}, digest([red])))
    return replace(rollout, prompt=prompt, media=Media((red, *more), {}, {}, digest([red, *more])) if more else None)


def _conversation(question: str, answer: str, turns: int) -> list[dict[str, Any]]:
    """A prompt in which the question is asked after earlier questions and their answers."""
    earlier = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] * (turns - 1)
    return [{"role": "system", "content": "Be brief."}, *earlier, {"role": "user", "content": question}]


def _calls(answer: str, turns: int) -> list[dict[str, Any]]:
    """A completion that calls a tool in each turn but the last."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"text": answer}}}
    asked = {"role": "assistant", "content": answer, "tool_calls": [call]}
    return [*[asked, {"role": "tool", "content": "56"}] * (turns - 1), {"role": "assistant", "content": answer}]


def _metrics(step: int, steps: int, part: StoredRows, numbers: np.random.Generator) -> dict[str, float]:
    progress, noise = step / steps, float(numbers.normal(0, 0.02))
    lengths = np.diff(part.offsets)
    truncated = [rollout.is_truncated for rollout in part.rollouts]
    metrics = {
        "loss": noise,
        "grad_norm": 0.5 + abs(noise),
        "learning_rate": 1e-6 * (1 - progress),
        "reward": float(np.mean(part.combined)),
        "reward_std": float(np.std(part.combined)),
        "rewards/correct/mean": float(part.table.rewards[:, 0].mean()),
        "rewards/short/mean": float(part.table.rewards[:, 1].mean()),
        "frac_reward_zero_std": 0.1 + 0.7 * progress,
        "entropy": 1.2 - progress + noise,
        "kl": 0.01 * math.sqrt(step),
        "clip_ratio/low_mean": abs(noise) / 2,
        "clip_ratio/high_mean": abs(noise),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/max_length": float(np.max(lengths)),
        "completions/clipped_ratio": float(np.mean(truncated)),
        "sampling/logp_mismatch": 1e-6 + abs(noise) * 1e-6,
        "step_time": 5.0,
        "time/sampling": 3.0 + noise,
        "time/rewards": 0.4,
        "time/scoring": 0.1,
        "time/training": 1.5,
        "num_tokens": 4000.0 * step,
    }
    if step % 10 == 0:
        metrics["eval_reward"] = metrics["reward"] - 0.05
    return metrics
