"""`groupgrad rollouts`: prints rollouts that a run has stored."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from groupgrad.apps.cli.command_parser import CommandParser, positive_count, refuse
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.runs.selection import Selection
from groupgrad.run_folder.render import duration, visible
from groupgrad.run_folder.rollout_table import REWARD, SECONDS, TRAINING
from groupgrad.run_folder.terminal import print_table
from groupgrad.spelling import did_you_mean

SHADES = ("", "on grey19", "on grey30", "on dark_goldenrod", "on dark_orange3", "on red3")
"""Background of a token, by the log-prob or entropy (nats) that it reaches."""
BOUNDS = (0.5, 1.0, 2.0, 4.0, 6.0)
SHARES = (0.05, 0.2, 0.4, 0.6, 0.8)
"""The same for shares of the row's largest gradient share."""

POLICY = "policy"
OTHERS = {"tool": "dim italic", "template": "dim"}
"""Style of a token that the policy did not write, by its writer."""

UNITS = {"logprobs": "nats", "entropy": "nats", "advantage": "of the row", "gradient_shares": "shares of the largest"}
"""Quantities by which tokens can be shaded."""

SORTABLE = ("advantage", "step", "row", "group", "num_tokens")
"""Columns to order by, beside the rewards and the seconds that they took."""


def main(argv: Sequence[str]) -> int:
    """Prints the rollouts of a run that are selected, best first. Returns 1 if there are none, 2 for no run."""
    arguments = parser().parse_args(argv)
    try:
        run = RunFolder(arguments.run)
        first, last = _steps(arguments.step)
        if arguments.json and arguments.tokens:
            raise ValueError(
                "--tokens and --json are both given, but a line of JSON has all columns of tokens; drop one"
            )
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
    others = [*run.facets()["shares"], *timed, "group", "finish_reason", "num_tokens"]
    shown = {"reward", "advantage", "prompt", "completion", *others}
    columns = {name if name not in shown else f"{REWARD}{name}": f"{REWARD}{name}" for name in functions}
    rewards = {"reward": "reward", **(columns if len(functions) > 1 else {})}
    records = [_record(row, rewards) for row in rows]
    title = f"{run.name}: {len(rows)} of {count:,} rollouts"
    print_table(records, [*rewards], others, title=title, lead="step·row", console=console)
    for row in rows if arguments.tokens else ():
        _print_tokens(console, row, arguments.tokens)
    return 0


def _check_columns(run: RunFolder, arguments: argparse.Namespace) -> None:
    """ValueError if the rollouts of a run lack the column of `--sort`, `--reward` or `--tokens`."""
    facets = run.facets()
    if not facets["steps"]:
        return
    columns = ["reward", *SORTABLE, *facets["shares"], *(f"{REWARD}{name}" for name in facets["rewards"])]
    columns += [f"{SECONDS}{name}" for name in facets["seconds"]]
    if arguments.sort not in columns:
        hint = did_you_mean(arguments.sort, columns, before="; ")
        known = ", ".join(columns)
        raise ValueError(f"--sort {arguments.sort!r} is no column to order by; choose one of {known}{hint}")
    if arguments.reward not in (None, *facets["rewards"]):
        names = ", ".join(facets["rewards"])
        hint = did_you_mean(arguments.reward, facets["rewards"], before="; ")
        raise ValueError(f"--reward {arguments.reward!r} is no reward of this run, which has {names}{hint}")
    if arguments.tokens == "gradient_shares" and not facets["shares"]:
        raise ValueError(
            "--tokens gradient_shares: this run has stored no gradient shares; train with record_gradient_share=True"
        )
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
        examples="groupgrad rollouts runs/math --step 40 --min-reward 0.5 --tokens entropy\n"
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
    printed.add_argument("--tokens", choices=[*UNITS], help="also print the tokens, shaded by this")
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
    others = ("advantage", "gradient_share", "group", "finish_reason", "num_tokens")
    numbers = {**{name: row.get(name) for name in others}, **{name: row.get(key) for name, key in rewards.items()}}
    numbers |= {name: duration(value) for name, value in row.items() if name.startswith(SECONDS)}
    phase = "" if row.get("phase") in (None, TRAINING) else f" {row['phase']}"
    return {**texts, "step·row": f"{row['step']}·{row['row']}{phase}", **numbers}


def _print_tokens(console: Console, row: dict[str, Any], number: str) -> None:
    """The tokens of a row, shaded by how unlikely or uncertain each was, by its advantage, or by how much it taught.

    Tokens of tools and templates are dim. Without colours, as in a pipe, each token has a line, with its number.
    """
    console.print(Text(f"\nstep {row['step']} row {row['row']}, by {number} ({UNITS[number]}):", style="bold"))
    values, writers = row.get(number) or [None] * len(row["tokens"]), _writers(row)
    if number == "advantage":
        values = _advantages(row, writers)
    bounds: tuple[float, ...] = BOUNDS
    if number == "gradient_shares":
        largest = max((abs(value) for value in values if value is not None), default=0.0) or 1.0
        values, bounds = [None if value is None else value / largest for value in values], SHARES
    if console.color_system is None or console.no_color:
        _print_numbers(row["tokens"], values, writers)
        return
    line = Text(overflow="fold")
    for token, value, writer in zip(row["tokens"], values, writers):
        size = 0.0 if value is None else abs(value)
        shade = SHADES[sum(size >= bound for bound in bounds)] if writer == POLICY else OTHERS[writer]
        line.append(visible(token), style=shade)
    console.print(line)


def _advantages(row: dict[str, Any], writers: Sequence[str]) -> list[float | None]:
    """The advantage of each token of the policy: its turn's, where turns have their own."""
    of_turns = row.get("turn_advantages")
    if not of_turns:
        return [row["advantage"] if writer == POLICY else None for writer in writers]
    sampled, turn, found = row["sampled"] or [True] * len(writers), -1, []
    starts = {branch["start"] for branch in row.get("branches") or []}
    for place, (before, now) in enumerate(pairwise([False, *sampled])):
        turn += now and (not before or place in starts)
        found.append(of_turns[turn] if now else None)
    return found


def _writers(row: dict[str, Any]) -> list[str]:
    """The writer of each token: `policy`, `tool` or `template`. Runs of earlier releases call the last two `tool`."""
    sampled = row["sampled"] or [True] * len(row["tokens"])
    return row.get("writers") or [POLICY if is_policy else "tool" for is_policy in sampled]


def _print_numbers(tokens: Sequence[str], values: Sequence[float | None], writers: Sequence[str]) -> None:
    """A line for each token: its place, its number (- without one) or its other writer, its text as a literal."""
    for place, (token, value, writer) in enumerate(zip(tokens, values, writers)):
        shown = writer if writer != POLICY else "-" if value is None else f"{value:.4g}"
        print(f"{place:>5}  {shown:>10}  {token!r}")
