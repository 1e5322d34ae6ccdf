"""`groupgrad check`: tries a run before it begins, and prints what is right, doubtful or wrong about it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupgrad.apps.cli.command_parser import epilog, refuse
from groupgrad.apps.cli.launch import add_flags
from groupgrad.apps.cli.parsing import Parsed, TrainParser, parse
from groupgrad.run_folder.advice import Finding, Status

_STATUS_WIDTH, _TOPIC_WIDTH = len("warning") + 2, len("agreement") + 2

_EXAMPLES = """\
groupgrad check --config run.yaml
groupgrad check --config run.yaml --max_completion_length 2048 --prompts 8
groupgrad check --config run.yaml --no-round
groupgrad check --config run.yaml --num-processes all --accelerate-config fsdp2
"""


class CheckParser(TrainParser):
    """Parser of this command: that of `groupgrad train`, and the size of the round."""

    def __init__(self) -> None:
        super().__init__(
            prog="groupgrad check",
            usage="groupgrad check [--config FILE] [--FIELD VALUE ...] [--set KEY=VALUE ...] [--no-round]",
            description="Try a run before it begins: its settings, data, chat template and batches, and one small "
            "round of sampling, rewards and training. Nothing is reported or pushed, and output_dir is not touched.",
            epilog=epilog("check", _EXAMPLES),
        )
        self.add_argument(
            "--prompts",
            type=int,
            default=4,
            metavar="N",
            help="prompts of the small round, at most those of a generation batch",
        )
        add_flags(self)
        self.add_argument("--no-round", "--no_round", action="store_true", help="check without sampling and training")


parser = CheckParser
"""Makes the parser of this command."""


def main(argv: Sequence[str]) -> int:
    """Prints the findings. Returns 1 if one is an error, and 2 after a sentence if the run cannot begin.

    Under a launcher the main process prints its findings, and all return the worst code.
    """
    with tempfile.TemporaryDirectory() as aside, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        parsed = parse(argv, CheckParser())
        try:
            if parsed.flags["prompts"] < 1:
                raise ValueError(f"--prompts {parsed.flags['prompts']}: give at least 1")
            trainer = _build(parsed, aside)
        except (ValueError, TypeError, ImportError, OSError) as error:
            return refuse("check", error)
        ours = [w for w in caught if issubclass(w.category, UserWarning) and "torch" not in Path(w.filename).parts]
        about_settings = [Finding("settings", text, "warning") for text in dict.fromkeys(str(w.message) for w in ours)]
        from groupgrad import dist, stopping
        from groupgrad.config.launcher import holds_parts

        report = _Report()
        # A launcher signals the other ranks as soon as one has ended, perhaps before the findings are printed.
        with stopping.received_signals(leaves_work=not holds_parts(trainer.args)):
            report.add(*(about_settings or [Finding("settings", "they fit together")]))
            is_whole = _try(trainer, parsed, report)
            report.end()
            is_interrupted = stopping.requested() == "SIGINT"
    if is_interrupted:
        raise KeyboardInterrupt
    code = 1 if _count(report.findings, "error") else 0
    # Ranks that a failed round has left in different collectives do not meet again.
    return max(dist.all_gather_objects(code)) if is_whole else code


class _Report:
    """The findings so far; the main process prints them as they come."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        """Prints further findings."""
        self.findings += findings
        print_on_main(as_text(findings, shutil.get_terminal_size((120, 24)).columns))

    def fail(self, reason: str) -> None:
        """Prints that the round has failed."""
        self.add(Finding("round", f"it failed with {reason}", "error"))

    def end(self) -> None:
        """Prints the numbers of errors and warnings."""
        print_on_main(f"\n{in_numbers(self.findings)}\n")


def print_on_main(text: str) -> None:
    """Prints a text on the main process alone."""
    from groupgrad import dist

    if dist.is_main():
        print(text, end="", flush=True)


def _build(parsed: Parsed, folder: str) -> Any:
    """Builds the trainer of the run, but lets it write to `folder` and report to no tracker."""
    from groupgrad.apps.cli.train import build

    quiet_settings(parsed.config, folder)
    return build(parsed)


def quiet_settings(config: Any, folder: str) -> None:
    """Makes a run write to `folder`, report to no tracker and push nothing."""
    config.output_dir, config.report_to, config.push_to_hub, config.log_completions = folder, [], False, False
    config.record_spans, config.record_traces = False, False


def _try(trainer: Any, parsed: Parsed, report: _Report) -> bool:
    """Reports on the data and on a small round. Returns False if the round has failed."""
    from groupgrad import stopping
    from groupgrad.apps.check.data_findings import data_findings
    from groupgrad.apps.check.round_findings import evaluated_completions, round_findings
    from groupgrad.apps.check.small_round import make_round

    plan = trainer.plan
    report.add(*data_findings(trainer), *_offer(parsed))
    if parsed.flags["no_round"]:
        return True
    num_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    num_evaluated = evaluated_completions(trainer, num_steps)

    try:
        done = make_round(trainer, parsed.flags["prompts"])
    except (Exception, stopping.StopRequested) as error:  # functions of the user raise anything
        if os.environ.get("GROUPGRAD_TRACEBACK"):
            raise
        if (name := stopping.requested()) is not None:
            report.add(Finding("round", f"it was stopped by {name}", "error"))
        else:
            report.fail(f"{type(error).__name__}: {error}")
        return False
    report.add(*round_findings(trainer, done, plan, num_steps, num_evaluated))
    return True


def _offer(parsed: Parsed) -> list[Finding]:
    """Offers an evaluation of the model before the first step, where the run makes none."""
    from groupgrad.apps.cli.dataset import test_sets

    if parsed.config.eval_on_start:
        return []
    if parsed.config.evaluates:
        return [Finding("baseline", "eval_on_start=True also evaluates before the first step")]
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--no-round", "--no_round", action="store_true")
    for flag in ("--prompts", "--model-name-or-path", "--model_name_or_path"):
        own.add_argument(flag)
    _, words = own.parse_known_args(parsed.command["argv"])
    command = shlex.join(["groupgrad", "eval", str(parsed.model.model_name_or_path), *words])
    sets = ", ".join(test_sets(parsed.script).values())
    return [Finding("baseline", f"`{command}` evaluates the model before training, on {sets}")]


def _count(findings: Sequence[Finding], status: Status) -> int:
    """Returns the number of findings of a status."""
    return sum(finding.status == status for finding in findings)


def as_text(findings: Sequence[Finding], width: int) -> str:
    """Returns the findings as lines of at most `width` characters, in columns."""
    indent = " " * (_STATUS_WIDTH + _TOPIC_WIDTH)
    lines = []
    for finding in findings:
        head = f"{finding.status:<{_STATUS_WIDTH}}{finding.topic:<{_TOPIC_WIDTH}}"
        text = " ".join(part for part in (finding.text, finding.setting) if part)
        lines += textwrap.wrap(
            head + text, max(width, 60), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "".join(f"{line}\n" for line in lines)


def in_numbers(findings: Sequence[Finding]) -> str:
    """Returns the numbers of errors and warnings, such as `0 errors, 1 warning`."""
    counts = {status: _count(findings, status) for status in ("error", "warning")}
    return ", ".join(f"{number} {status}{'' if number == 1 else 's'}" for status, number in counts.items())
