"""Describes the results of a replay and of a bisection in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupgrad.apps.replay.bisecting import Bisection
from groupgrad.apps.replay.differences import Compared, same_bits, shown
from groupgrad.apps.replay.replaying import Replay

MAX_LINES = 12
"""Differences that are printed one by one."""


def replay_report(result: Replay) -> str:
    """Lines that say what was repeated and compared, and name the first difference."""
    name, start, step = result.run.name, result.start, result.step
    origin = "the start of the run" if start.checkpoint is None else start.checkpoint.name
    steps = f"step {step}" if start.step + 1 == step else f"steps {start.step + 1} to {step}"
    lines = [f"{name}: {steps} repeated from {origin} in {result.seconds:.1f} s"]
    lines += [f"  note: {note}" for note in start.notes]
    if result.row is not None:
        lines += ["", *_row_lines(result)]
    lines += ["", "compared:", *_compared_lines(result.compared)]
    if not result.compared.digests:
        lines.append("  weights: not compared, for the run has stored no digest of them")
    lines += ["", *_outcome(result.compared, name, "the replay")]
    return "\n".join(lines) + "\n"


def _row_lines(result: Replay) -> list[str]:
    then, now = result.rows
    head = f"step {result.start.sampled_at}, row {result.row}:"
    if then is None or now is None:
        return [f"{head} {'the replay' if now is None else 'the run'} has no such row"]
    numbers = [*(name for name in then if name.startswith("reward")), "advantage", "finish_reason"]
    width = max(16, *map(len, numbers)) + 2
    lines = [head, *(f"  {key:<{width}}{shown(repr(then[key]), 90)}" for key in ("prompt", "completion"))]
    pairs: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        (label, then[key] or [], now[key] or [])
        for label, key in (("token ids", "completion_ids"), ("log-probs", "logprobs"), ("entropies", "entropy"))
    ]
    for label, one, two in pairs:
        if not one and not two:
            lines.append(f"  {label:<{width}}not stored")
            continue
        size = max(len(one), len(two))
        equal = sum(same_bits(a, b) for a, b in zip(one, two))
        lines.append(f"  {label:<{width}}{equal} of {size} the same")
    for key in numbers:
        is_same = same_bits(then[key], now.get(key))
        lines.append(
            f"  {key:<{width}}{then[key]!r}" + (", the same" if is_same else f"; {now.get(key)!r} in the replay")
        )
    return lines


def _compared_lines(compared: Compared) -> list[str]:
    rows = (
        f"  rollouts: {compared.rows:,} rows, {compared.tokens:,} tokens, {compared.numbers:,} log-probs, entropies, "
    )
    lines = [
        f"{rows}rewards and advantages",
        f"  metrics: {compared.metrics:,} numbers such as loss and grad_norm; measured times are left out",
        f"  weights: digests after {compared.digests:,} step{'' if compared.digests == 1 else 's'}",
    ]
    if compared.unmatched:
        lines.append(f"  not compared: {compared.unmatched:,} rows that only one of the two has stored")
    return lines


def _weights_lines(result: Bisection) -> list[str]:
    """A line for each checkpoint whose weights were compared."""
    return [
        f"  checkpoint-{step}: weights {f'differ in {len(names)} tensors, first {names[0]}' if names else 'the same'}"
        for step, names in result.weights.items()
    ]


def _outcome(compared: Compared, first: str, second: str) -> list[str]:
    if not compared.rows + compared.metrics + compared.digests:
        return ["Nothing could be compared: no rollouts, metrics or digests of these steps are stored."]
    if not compared.differences:
        return ["0 bits differ."]
    found = sorted(compared.differences, key=lambda item: item.step)
    first_step = [item for item in found if item.step == found[0].step]
    lines = [f"first difference: {first_step[0].text(first, second)}"]
    if len(first_step) > 1:
        lines += ["in the same step:", *(f"  {item.text(first, second)}" for item in first_step[1 : MAX_LINES + 1])]
    if len(first_step) > MAX_LINES + 1:
        lines.append(f"  and {len(first_step) - MAX_LINES - 1} more")
    later = sorted({item.step for item in found} - {found[0].step})
    if later:
        lines.append(f"later steps that differ: {len(later)}, to step {later[-1]}")
    return lines


def bisection_report(result: Bisection) -> str:
    """Lines that say how two runs differ from the start, what was compared, and where they part."""
    one, two = result.first.name, result.second.name
    lines = [f"{one} and {two}", ""]
    if result.settings:
        lines.append("configuration, what differs:")
        lines += [f"  {key}: {a!r} in {one}, {b!r} in {two}" for key, (a, b) in result.settings.items()]
    else:
        lines.append("configuration: the same")
    lines.append(f"weights at the start: {result.weights_at_start}")
    lines += ["", f"compared: {result.extent}", *_compared_lines(result.compared)]
    lines += [*_weights_lines(result), ""]
    if result.first_step is None:
        lines.append("No difference was found.")
    else:
        lines += _outcome(result.compared, one, two) if result.compared.differences else []
        lines.append(result.conclusion)
    return "\n".join(lines) + "\n"
