"""`groupgrad check`: tries a run before it begins, and prints what is right, doubtful or wrong about it."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupgrad.cli.command_parser import epilog, refuse
from groupgrad.cli.launch import add_flags
from groupgrad.cli.parsing import Parsed, TrainParser, parse
from groupgrad.telemetry.findings import Finding, as_text, count

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
            if parsed.own["prompts"] < 1:
                raise ValueError(f"--prompts {parsed.own['prompts']}: give at least 1")
            trainer = _build(parsed, aside)
        except (ValueError, TypeError, ImportError, OSError) as error:
            return refuse("check", error)
        ours = [w for w in caught if issubclass(w.category, UserWarning) and "torch" not in Path(w.filename).parts]
        about_settings = [Finding("settings", text, "warning") for text in dict.fromkeys(str(w.message) for w in ours)]
        findings = _findings(trainer, parsed, about_settings)
    from groupgrad import dist

    if dist.is_main():
        print(as_text(findings, shutil.get_terminal_size((120, 24)).columns), end="")
    return max(dist.all_gather_objects(1 if count(findings, "error") else 0))


def _build(parsed: Parsed, folder: str) -> Any:
    """Builds the trainer of the run, but lets it write to `folder` and report to no tracker."""
    from groupgrad.cli.train import build

    config = parsed.config
    config.output_dir, config.report_to, config.push_to_hub, config.log_completions = folder, [], False, False
    config.record_spans, config.record_traces = False, False
    return build(parsed)


def _findings(trainer: Any, parsed: Parsed, about_settings: list[Finding]) -> list[Finding]:
    from groupgrad.preflight.data_findings import data_findings
    from groupgrad.preflight.round_findings import round_findings
    from groupgrad.preflight.small_round import make_round

    plan = trainer.plan
    findings = [*(about_settings or [Finding("settings", "they fit together")]), *data_findings(trainer)]
    if parsed.own["no_round"]:
        return findings
    num_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    try:
        done = make_round(trainer, parsed.own["prompts"])
    except Exception as error:  # functions of the user raise anything
        if os.environ.get("GROUPGRAD_TRACEBACK"):
            raise
        return [*findings, Finding("round", f"it failed with {type(error).__name__}: {error}", "error")]
    return [*findings, *round_findings(trainer, done, plan, num_steps)]
