"""`groupgrad rollouts`: prints rollouts that a run has stored."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from groupgrad.apps.cli.command_parser import CommandParser, positive_count, refuse
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.runs.selection import Selection
from groupgrad.run_folder.render import duration
from groupgrad.run_folder.rollout_table import REWARD, SECONDS, TRAINING
from groupgrad.run_folder.terminal import print_table
from groupgrad.spelling import did_you_mean

SORTABLE = ("advantage", "step", "row", "group", "num_tokens")
"""Columns to order by, beside the rewards and the seconds that they took."""


def main(argv: Sequence[str]) -> int:
    """Prints the rollouts of a run that are selected, best first. Returns 1 if there are none, 2 for no run."""
    arguments = parser().parse_args(argv)
    try:
        run = RunFolder(arguments.run)
        first, last = _steps(arguments.step)
        run.refresh()
        _check_columns(run, arguments)
    except ValueError as error:
        return refuse("rollouts", error)
    conditions = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(Selection)}
    selection = Selection(**{**conditions, "first_step": first, "last_step": last})
    count, found = run.find(selection, sort=arguments.sort, descending=not arguments.ascending, limit=arguments.limit)
    if not count:
        there = _what_there_is(run, arguments)
        print(f"groupgrad rollouts: no rollout of {arguments.run} is like that; {there}", file=sys.stderr)
        return 1
    rows = [row for place in found for row in run.rows(place["step"], row=place["row"], phase=place["phase"])]
    if arguments.json:
        for row in rows:
            print(json.dumps(row, ensure_ascii=False))
        if len(rows) < count:
            print(f"groupgrad rollouts: {len(rows)} of {count:,} rollouts; --limit {count} has all", file=sys.stderr)
        return 0
    console = Console()
    functions = run.facets()["rewards"]
    timed = [arguments.sort] if arguments.sort.startswith(SECONDS) else []
    others = [*timed, "group", "finish_reason", "num_tokens"]
    shown = {"reward", "advantage", "prompt", "completion", *others}
    columns = {name if name not in shown else f"{REWARD}{name}": f"{REWARD}{name}" for name in functions}
    rewards = {"reward": "reward", **(columns if len(functions) > 1 else {})}
    records = [_record(row, rewards) for row in rows]
    title = f"{run.name}: {len(rows)} of {count:,} rollouts"
    print_table(records, [*rewards], others, title=title, lead="step·row", console=console)
    return 0


def _check_columns(run: RunFolder, arguments: argparse.Namespace) -> None:
    """ValueError if the rollouts of a run lack the column of `--sort` or `--reward`."""
    facets = run.facets()
    if not facets["steps"]:
        return
    columns = ["reward", *SORTABLE, *(f"{REWARD}{name}" for name in facets["rewards"])]
    columns += [f"{SECONDS}{name}" for name in facets["seconds"]]
    if arguments.sort not in columns:
        hint = did_you_mean(arguments.sort, columns, before="; ")
        known = ", ".join(columns)
        raise ValueError(f"--sort {arguments.sort!r} is no column to order by; choose one of {known}{hint}")
    if arguments.reward not in (None, *facets["rewards"]):
        names = ", ".join(facets["rewards"])
        hint = did_you_mean(arguments.reward, facets["rewards"], before="; ")
        raise ValueError(f"--reward {arguments.reward!r} is no reward of this run, which has {names}{hint}")
    if arguments.reward is not None and arguments.min_reward is None and arguments.max_reward is None:
        raise ValueError(
            f"--reward {arguments.reward} is for --min-reward and --max-reward, and neither is given; give one, or "
            f"order by --sort {REWARD}{arguments.reward}"
        )


def _what_there_is(run: RunFolder, arguments: argparse.Namespace) -> str:
    """Describes what can be selected: the steps, and the values of each condition that was given as a name."""
    facets = run.facets()
    if not facets["steps"]:
        return "it has stored no rollouts"
    text = "its rollouts are of steps {} to {}".format(*facets["steps"])
    for name in ("finish_reason", "tool", "phase"):
        if getattr(arguments, name) is not None:
            text += f", {name.replace('_', ' ')}s {' and '.join(facets[name + 's']) or '(none)'}"
    return text


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "rollouts",
        description="Print rollouts that a run has stored.",
        examples="groupgrad rollouts runs/math --step 40 --min-reward 0.5\n"
        "groupgrad rollouts runs/math --step 30:40 --finish-reason length --json > rollouts.jsonl",
    )
    parser.add_argument("run", metavar="RUN", help="output_dir of a run")
    chosen = parser.add_argument_group("Which rollouts")
    chosen.add_argument("--step", metavar="N[:M]", help="only rollouts of step N, or of steps N to M")
    chosen.add_argument("--group", type=int, help="only rollouts of this group")
    chosen.add_argument("--prompt-id", metavar="ID", help="only rollouts of this prompt, by the prompt_id of --json")
    chosen.add_argument(
        "--search",
        dest="text",
        metavar="TEXT",
        help="only rollouts whose prompt or completion contains TEXT, in any case",
    )
    chosen.add_argument("--reward", metavar="NAME", help="reward function of the bounds (default: the weighted reward)")
    chosen.add_argument("--min-reward", type=float, help="only rollouts with at least this reward")
    chosen.add_argument("--max-reward", type=float, help="only rollouts with at most this reward")
    chosen.add_argument("--finish-reason", help="only rollouts that ended for this reason, such as length")
    chosen.add_argument("--tool", help="only rollouts that called this tool")
    chosen.add_argument("--phase", help="only rollouts of training (train) or of an evaluation (eval, eval_NAME)")
    printed = parser.add_argument_group("Output")
    printed.add_argument("--sort", default="reward", help="column to order by")
    printed.add_argument("--ascending", action="store_true", help="lowest first")
    printed.add_argument("--limit", type=positive_count, default=10, help="most rollouts to print")
    printed.add_argument("--json", action="store_true", help="print one line of JSON a rollout, with all its columns")
    return parser


def _steps(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if match is None or not any(match.group(1, 3)):
        raise ValueError(f"--step {text!r} is no step; give a number, or two as in 30:40")
    first, colon, last = match.groups()
    if first and last and int(first) > int(last):
        raise ValueError(f"--step {text!r} ends before it begins; give the smaller number first")
    return int(first) if first else None, int(last) if last else (None if colon else int(first))


def _record(row: dict[str, Any], rewards: Mapping[str, str]) -> dict[str, Any]:
    """A row as a record of the printed table. `rewards`: name in the table -> column of the row."""
    texts = {key: json.loads(row[key]) if row["is_messages"] else row[key] for key in ("prompt", "completion")}
    others = ("advantage", "group", "finish_reason", "num_tokens")
    numbers = {**{name: row.get(name) for name in others}, **{name: row.get(key) for name, key in rewards.items()}}
    numbers |= {name: duration(value) for name, value in row.items() if name.startswith(SECONDS)}
    phase = "" if row.get("phase") in (None, TRAINING) else f" {row['phase']}"
    return {**texts, "step·row": f"{row['step']}·{row['row']}{phase}", **numbers}
