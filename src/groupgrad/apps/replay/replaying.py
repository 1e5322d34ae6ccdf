"""Repeats steps of a run from a checkpoint, in a folder of its own, and compares them with what the run recorded."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from groupgrad.apps.replay.differences import Compared, compare_settings, compare_step
from groupgrad.apps.replay.run_records import RunRecords
from groupgrad.checkpoints.manifest import Manifest, damage_of
from groupgrad.config.grpo_config import without_secrets
from groupgrad.data.columns import dataset_digest
from groupgrad.errors import CheckpointError
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import weights_digest
from groupgrad.trainer import build
from groupgrad.trainer.changed_options import deciding
from groupgrad.trainer.run_summary import StartLines, versions_in_use
from groupgrad.trainer.step_log import FirstBatch
from groupgrad.types import RewardTable

logger = logging.getLogger(__name__)


class ReplayError(ValueError):
    """A step that cannot be repeated; the message says why and what to give."""


@dataclass(slots=True)
class ReplayStart:
    """The checkpoint or start from which a replay begins."""

    step: int
    """Steps made before it; 0 for the start of the run."""
    checkpoint: Path | None
    sampled_at: int
    """The step that sampled the rows that the replayed step trains on."""
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Replay:
    """The result of a replay."""

    run: RunRecords
    step: int
    row: int | None
    start: ReplayStart
    seconds: float
    compared: Compared
    rows: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None)
    """The row in the run and in the replay."""

    @property
    def is_same(self) -> bool:
        """True if nothing that was compared differs."""
        return not self.compared.differences


def find_start(records: RunRecords, step: int, row: int | None = None) -> ReplayStart:
    """The nearest checkpoint before the sampling of what `step` trains on, or the start of the run.

    ReplayError if the run has no such step or row, or cannot be repeated by this number of processes.
    """
    processes = records.config.get("processes", 1)
    if processes != 1:
        raise ReplayError(
            f"{records.name} was trained by {processes} processes, and only runs of one process can be repeated; "
            "`groupgrad bisect` compares its records with those of another run"
        )
    last = records.last_step
    if not 1 <= step <= last:
        raise ReplayError(f"{records.name} has no step {step}; it has recorded steps 1 to {last}")
    sampled_at = _sampled_at(records, step)
    if row is not None:
        _check_row(records, step, sampled_at, row)
    notes: list[str] = []
    if sampled_at != step:
        notes.append(f"step {step} trains on rollouts that step {sampled_at} sampled")
    if 0 < step <= records.resumed_at:
        notes.append(
            f"run_config.json holds the settings of the last start, at step {records.resumed_at}; where those of step "
            f"{step} were others, numbers differ"
        )
    before = {number: path for number, path in records.checkpoints.items() if number < sampled_at}
    for number, path in sorted(before.items(), reverse=True):
        problem = _problem(path)
        if problem is None:
            return ReplayStart(number, path, sampled_at, notes)
        notes.append(f"{path.name} {problem}")
    later = [number for number in records.checkpoints if number >= sampled_at]
    kept = f"; the run has kept checkpoint {', '.join(map(str, later))} only" if later else ""
    if sampled_at > 1:
        notes.append(
            f"no checkpoint before step {sampled_at} can be used{kept}: the replay makes {step} steps from the start"
        )
    return ReplayStart(0, None, sampled_at, notes)


def _sampled_at(records: RunRecords, step: int) -> int:
    settings = records.config.get("settings", {})
    passes = [settings.get(name) or 1 for name in ("steps_per_generation", "num_iterations")]
    reuse = math.ceil(passes[0] * passes[1] / (settings.get("gradient_accumulation_steps") or 1))
    stored = max((number for number in records.files if number <= step), default=step)
    return stored if stored > step - reuse else step


def _check_row(records: RunRecords, step: int, sampled_at: int, row: int) -> None:
    table = records.rollouts(sampled_at)
    if table is None:
        stored = f"steps {min(records.files)} to {max(records.files)}" if records.files else "no step"
        raise ReplayError(
            f"{records.name} has stored no rollouts of step {step}, so row {row} cannot be compared; it has those of "
            f"{stored}. Leave --row out to compare metrics and weights"
        )
    numbers = sorted(set(table["row"].to_pylist()))
    if row not in numbers:
        is_part = numbers != list(range(len(numbers)))
        part = f", {len(numbers)} rows that rollouts_keep has chosen" if is_part else ""
        raise ReplayError(
            f"step {step} of {records.name} has no row {row}; it has rows {numbers[0]} to {numbers[-1]}{part}"
        )


def _problem(checkpoint: Path) -> str | None:
    """Why training cannot go on from a checkpoint bit for bit; None if it can."""
    if not (checkpoint / "groupgrad_state_0.pt").is_file():
        return "holds weights without the state of the run, so it is passed over"
    try:
        manifest = Manifest.read(checkpoint)
    except CheckpointError as error:
        return f"is passed over: {error}"
    damage = {} if manifest is None else damage_of(checkpoint, manifest.files, manifest.files)
    return f"is damaged and passed over: {', '.join(f'{k} {v}' for k, v in damage.items())}" if damage else None


def replay(
    trainer: Any,
    run: str | Path | RunRecords,
    step: int,
    row: int | None = None,
    *,
    recorded_rewards: bool = False,
    keep: str | Path | None = None,
) -> Replay:
    """Repeats the steps of a run from the nearest checkpoint to `step`, and compares every number that it recorded.

    `trainer` is new, made as the run's was, and is not to be used afterwards. Make it directly before the call: another
    training in between would draw random numbers, and a replay from the start of a run would differ. Nothing is written
    into the run's folder: the replay has a folder of its own, which is removed unless `keep` names it. With
    `recorded_rewards` the rewards of the record are used and no reward function is called. ReplayError for what cannot
    be repeated.
    """
    records = run if isinstance(run, RunRecords) else RunRecords(run)
    start = find_start(records, step, row)
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="groupgrad-replay-") if keep is None else keep)
    if keep is not None and folder.exists() and any(folder.iterdir()):
        raise ReplayError(f"{folder} is not empty; name a new folder for the replay's records")
    try:
        again = _repeat(trainer, records, start, step, folder, recorded_rewards=recorded_rewards)
        compared = Compared()
        for number in range(start.step + 1, step + 1):
            compared += compare_step(records, again, number, evaluations=False, optional=recorded_rewards)
        rows = (None, None) if row is None else tuple(_row(r, start.sampled_at, row) for r in (records, again))
        seconds = time.perf_counter() - started
        return Replay(records, step, row, start, seconds, compared, rows)  # pyright: ignore[reportArgumentType]
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _row(records: RunRecords, step: int, row: int) -> dict[str, Any] | None:
    table = records.rollouts(step)
    found = [] if table is None else [item for item in table.to_pylist() if item["row"] == row]
    return found[0] if found else None


def _repeat(
    trainer: Any, records: RunRecords, start: ReplayStart, last_step: int, folder: Path, *, recorded_rewards: bool
) -> RunRecords:
    """Trains from `start` to `last_step` in `folder`, and returns the records that this leaves.

    What differs from the run's configuration is added to the notes of `start`. ReplayError for other data or other
    weights at the start.
    """
    _check_data(records, trainer)
    start.notes += notes_on(records, trainer)
    _send_to(trainer, folder)
    if recorded_rewards:
        trainer.score_rollouts = _RecordedRewards(records, trainer.rewards.names)
    trainer._start_anew()  # with the settings that have changed
    trainer.add_callback(_UntilStep(trainer, records, start, last_step))
    threads, before = records.config.get("threads"), torch.get_num_threads()
    try:
        if threads and trainer.args.device.type == "cpu":
            torch.set_num_threads(threads)
        trainer.train(resume_from_checkpoint=None if start.checkpoint is None else str(start.checkpoint.resolve()))
    finally:
        torch.set_num_threads(before)
    return RunRecords(folder, "the replay")


def _check_data(records: RunRecords, trainer: Any) -> None:
    then, now = records.config.get("data"), dataset_digest(trainer.train_dataset)
    if then and now and then != now:
        raise ReplayError(
            f"the data set is not the one that {records.name} was trained on: it has {now['rows']:,} rows with digest "
            f"{now['digest']}, and the run's had {then['rows']:,} rows with digest {then['digest']}; a replay needs "
            "the same rows in the same order"
        )


def notes_on(records: RunRecords, trainer: Any) -> list[str]:
    """Describes in sentences how versions and settings differ from the recorded run's.

    ReplayError if the reward functions differ.
    """
    config, notes = records.config, []
    if not config:
        return [f"{records.name} has no run_config.json, so versions, data and settings could not be checked"]
    for name, (then, now) in compare_settings(config.get("versions", {}), versions_in_use()).items():
        notes.append(f"{name} was {then} and is {now}, which may change bits")
    names = list(trainer.rewards.names)
    if config.get("rewards", names) != names:
        raise ReplayError(
            f"the reward functions are {', '.join(names)}, and those of {records.name} were "
            f"{', '.join(config['rewards'])}; give the same in the same order"
        )
    then, now = config.get("reward_functions"), trainer.rewards.origins
    if then not in (None, now):
        notes.append(f"the reward functions were {', '.join(then)} and are {', '.join(now)}")
    present = without_secrets(trainer.args.to_dict())
    settings = compare_settings(deciding(config.get("settings", {})), deciding(present))
    notes += [f"{name} was {then!r} and is {now!r}" for name, (then, now) in settings.items()]
    return notes


def _send_to(trainer: Any, folder: Path) -> None:
    """Redirects the files that training writes to `folder`, and turns off what it sends or shows."""
    args = trainer.args
    for callback in get_reporting_integration_callbacks(args.report_to or []):
        trainer.remove_callback(callback)
    args.output_dir = str(folder)
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.report_to, args.push_to_hub, args.log_completions, args.log_completions_hub_repo = [], False, False, None
    args.load_best_model_at_end, args.resume_from_checkpoint = False, None
    trainer.hub_model_id = None
    trainer.remove_callback(trainer.progress)  # its lines are of a run's own steps
    trainer.remove_callback(StartLines)
    trainer.remove_callback(FirstBatch)
    trainer.recorder.keep_bytes, trainer.recorder.senders = 2**62, []
    trainer.completion_log = build.build_completion_log(args)


class _UntilStep(TrainerCallback):
    """Ends a replay after its last step, without evaluations and checkpoints."""

    def __init__(self, trainer: Any, records: RunRecords, start: ReplayStart, last_step: int):
        self._trainer, self._records, self._start, self._last_step = trainer, records, start, last_step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks that the replay starts from the run's weights; notes a different number of steps."""
        then = self._records.config.get("max_steps", state.max_steps)
        if then != state.max_steps:
            self._start.notes.append(f"the run had {then} steps and would now have {state.max_steps}")
        digest = self._records.first_digest
        if state.global_step or digest is None:
            return
        now = weights_digest(unwrap(self._trainer.model).named_parameters())
        if now != digest:
            raise ReplayError(
                f"the model is not the one that {self._records.name} began with: its weights have digest {now}, and "
                f"the run's had {digest}; give the model as it was before training"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Requests the end of training after the last step."""
        logger.info("%s: step %d of %d repeated", self._records.name, state.global_step, self._last_step)
        control.should_evaluate = control.should_save = False
        if state.global_step >= self._last_step:
            control.should_training_stop = True


class _RecordedRewards:
    """Answers with the rewards that a run has stored, in place of its reward functions."""

    def __init__(self, records: RunRecords, names: Sequence[str]):
        self._records, self._names = records, list(names)
        self._calls: dict[int, int] = {}

    def __call__(self, rollouts: Sequence[Any], *, trainer_state: Any, step: int) -> RewardTable:
        """The rewards of rollouts of the step after `step`."""
        place = self._calls[step] = self._calls.get(step, -1) + 1
        table = self._records.rollouts(step + 1)
        stored: dict[int, list[dict[str, Any]]] = {}
        for row in () if table is None else table.to_pylist():
            stored.setdefault(row["row"], []).append(row)
        missing = [item.index for item in rollouts if len(stored.get(item.index, ())) <= place]
        if missing:
            raise ReplayError(
                f"the rewards of step {step + 1}, rows {', '.join(map(str, missing))}, are not stored in "
                f"{self._records.name}, so they cannot be used in place of calls; leave recorded rewards out"
            )
        values = [[stored[item.index][place][f"reward/{name}"] for name in self._names] for item in rollouts]
        numbers = [[math.nan if value is None else value for value in row] for row in values]
        turns = [stored[item.index][place].get("turn_rewards") for item in rollouts]
        by_turn = {
            row: torch.tensor([[math.nan if value is None else value for value in turn] for turn in given]).double()
            for row, given in enumerate(turns)
            if given is not None
        }
        return RewardTable(torch.tensor(numbers, dtype=torch.float64), list(self._names), by_turn=by_turn)
