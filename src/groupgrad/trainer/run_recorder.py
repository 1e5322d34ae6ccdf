"""Records a run in its folder while it trains: metrics, events, configuration and rollouts; see docs/run-folder.md.

A folder that cannot be written is a warning. Log-probs and entropies are those that a step computes anyway.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow as pa
import torch
from torch import nn
from transformers import TrainerCallback

from groupgrad import dist
from groupgrad.batch import Batch, TokenScores
from groupgrad.data.columns import dataset_digest
from groupgrad.models.shards import is_sharded
from groupgrad.models.unwrapping import unwrap
from groupgrad.models.weights import weights_digest
from groupgrad.rollout.collector import Experience
from groupgrad.run_folder import run_files
from groupgrad.run_folder.render import plain_value
from groupgrad.run_folder.rollout_files import RolloutFiles
from groupgrad.run_folder.rollout_table import TRAINING, StoredRows, images_by_name, summaries, to_table
from groupgrad.run_folder.run_files import LineFile, WriteBehind
from groupgrad.run_folder.token_texts import TokenTexts
from groupgrad.stopping import Paused, Stopped
from groupgrad.trainer.recorded_rows import numbers_by_row, stored_rows
from groupgrad.trainer.resuming import Resume
from groupgrad.trainer.run_summary import path_of_step, run_configuration

logger = logging.getLogger(__name__)

_PACKAGE = logging.getLogger("groupgrad")

WAIT_S = 20.0
"""Seconds that the end of a run waits for rollouts to be written."""
MAX_WARNINGS = 1000
"""Warnings of a run that are recorded."""
EVAL_PART = 5
"""Evaluations get at most one part in so many of `rollouts_keep`."""


class Sender(Protocol):
    """Sends what the run folder records elsewhere."""

    def event(self, line: Mapping[str, Any]) -> None:
        """Sends a line of `events.jsonl`."""
        ...

    def step(self, step: int, times_ns: tuple[int, int], rows: Sequence[Mapping[str, Any]]) -> None:
        """Sends a step, from its begin to its end, with the `summaries` of the rollouts that it sampled."""
        ...


class RunRecorder(TrainerCallback, AbstractContextManager):
    """Writes the run folder of a trainer. A context of each training, inside the lock of the folder.

    The main process writes metrics, events and configuration, every rank the rollouts that it sampled.
    """

    def __init__(self, trainer: Any, resume: Resume, senders: Sequence[Sender]):
        self._trainer, self._resume = trainer, resume
        self.senders = senders
        """Receivers of steps, rollouts and events, in addition to the run folder."""
        self.command: dict[str, Any] | None = None
        """The command line that made the trainer, for the configuration; None for a trainer made in Python."""
        self.keep_bytes = trainer.args.rollouts_keep_resolved
        self._folder: Path | None = None
        """The run's folder; None before the first training."""
        self._is_open = False
        """True within a training whose folder can be written."""
        self._is_usable = False
        """The same, also after the training."""
        self._early_lines: list[dict[str, Any]] = []
        """Log events before the first training."""
        self._scores: list[tuple[Batch, TokenScores]] = []
        """Log-probs and entropies from the step's own passes, where the engine reports none."""
        self._evaluated: dict[str, list[tuple[Experience, int]]] = {}
        """Batches of the present evaluation, with the number of the first row of each, by prefix of metrics."""
        self._known_data: tuple[Any, dict[str, Any] | None] | None = None
        """The training data with their digest."""
        self._written: tuple[Any, ...] | None = None
        """Settings, length and threads with which this trainer has written the configuration."""
        self._step_began_ns = time.time_ns()
        self.grad_norm: Any = None
        """The norm of the last step's gradient, as a number or a tensor."""
        self._learning_rate: float | None = None
        self._writer = WriteBehind(self._report)
        self._parameters: list[tuple[str, nn.Parameter]] | None = None
        """The weights of a training, of which digests are recorded; None where no rank has all of them."""
        self._handlers: list[logging.Handler] = []
        """Handlers of the package's messages while a training is recorded."""
        self._event_handler = _EventHandler(self)
        self._has_failed = False
        self._num_skipped = 0
        self._config: dict[str, Any] = {}
        self._path = ""
        """The decode path that the record names now; empty before the first generation batch."""

    # ------------------------------------------------------------------------------------- what a step has computed

    @property
    def _sampled(self) -> list[Experience]:
        """Generation batches of the present step that are to be recorded."""
        wanted = self._is_open and (self.keep_bytes or self.senders)
        return self._trainer._step_log.experiences if wanted else []

    def add_evaluation(self, experience: Experience, phase: str, first_row: int) -> None:
        """Keeps a batch of an evaluation, whose rows are numbered from `first_row` on, until the evaluation ends."""
        if self._is_open and self.keep_bytes:
            self._evaluated.setdefault(phase, []).append((experience, first_row))

    def keep_scores(self, batch: Batch, scores: TokenScores) -> TokenScores:
        """Returns the scores, and keeps them where the engine has reported no log-probs or entropies of the tokens."""
        lacks = batch.sampling_logprobs is None or batch.sampling_entropy is None
        if lacks and self._sampled and batch.row_index is not None:
            self._scores.append((batch, TokenScores(scores.logprobs.detach(), scores.entropy.detach())))
        return scores

    # ------------------------------------------------------------------------------------------ a training's course

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Records how the training ended, and waits for what is being written."""
        if not self._is_open:
            return
        self._is_open = False
        self._forget()
        for handler in self._handlers:
            _PACKAGE.removeHandler(handler)
        self._parameters = None
        if not self._writer.close(WAIT_S):
            logger.warning("%s: the last rollouts were not written within %g s", self._folder, WAIT_S)
        if self._writer.num_dropped:
            self.event("rollouts_dropped", steps=self._writer.num_dropped, text="the disk was slower than training")
        if error is None:
            self.event("ended")
        elif isinstance(error, (Stopped, KeyboardInterrupt)):
            self.event("paused" if isinstance(error, Paused) else "stopped", text=str(error) or type(error).__name__)
        else:
            self.event("failed", text=f"{type(error).__name__}: {error}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the folder: a resumed run goes on in it, another one moves what it finds aside."""
        trainer, step = self._trainer, state.global_step
        self._folder = Path(trainer._get_output_dir(trial=trainer.trial))
        self._has_failed = False
        self._forget()
        names = (run_files.METRICS, run_files.EVENTS, run_files.WEIGHTS)
        self._metrics, self._events, self._weights = (LineFile(self._folder / name) for name in names)
        self._files: dict[str, RolloutFiles] = {}
        self._texts = TokenTexts(trainer.prompt_maker.tokenizer)
        self._num_skipped = trainer.finite_steps.num_skipped
        resumed = self._resume.point
        self._is_open = self._is_usable = self._prepare(step, None if resumed is None else Path(resumed.folder))
        if self._is_open and state.is_world_process_zero:
            can_digest = not (is_sharded(trainer.model) or trainer.is_fsdp_enabled)
            self._parameters = list(unwrap(trainer.model).named_parameters()) if can_digest else None
            self._start(step, None if resumed is None else str(resumed.folder))
            # logging prints through its last resort only where there is no other handler.
            last_resort = [] if _PACKAGE.hasHandlers() or logging.lastResort is None else [logging.lastResort]
            self._handlers = [*last_resort, self._event_handler]
            for handler in self._handlers:
                _PACKAGE.addHandler(handler)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Adds a log event to the metrics."""
        if state.is_world_process_zero and logs:
            # Tensors are read now: they may change.
            numbers = {**(self._last_window() if "train_runtime" in logs else {}), **logs}
            line = {"step": state.global_step, "time": time.time(), **plain_value(numbers)}
            if self._folder is None:
                self._early_lines.append(line)
            elif self._is_usable:
                self._try(lambda: self._metrics.append(line))

    def _last_window(self) -> dict[str, Any]:
        """Loss, gradient norm and learning rate of the last steps, if they are too few for a log event of their own."""
        trainer = self._trainer
        num_steps = trainer.state.global_step - trainer._globalstep_last_logged
        if num_steps <= 0 or self._learning_rate is None:
            return {}
        numbers = {"loss": float(trainer._tr_loss) / num_steps, "learning_rate": self._learning_rate}
        return numbers if self.grad_norm is None else {**numbers, "grad_norm": float(self.grad_norm)}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps the learning rate that the step has used."""
        self._learning_rate = self._trainer._get_learning_rate()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drops what an unfinished step has left behind."""
        self._step_began_ns = time.time_ns()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Collective. Queues the step's rollouts for writing, and records a skipped step."""
        if not self._is_open:
            return
        trainer = self._trainer
        step, scores, self._scores = state.global_step, self._scores, []
        gathered = None
        # Rows may be trained on other ranks than sampled them.
        if dist.is_active() and (trainer.args.balance_ranks or trainer.plan.moves_rows):
            gathered = {
                key: row for part in dist.all_gather_objects(numbers_by_row(scores)) for key, row in part.items()
            }
        if state.is_world_process_zero and (digest := self._digest_now(trained_only=True)) is not None:
            self._try(lambda: self._weights.append({"step": step, "digest": digest}))
        skipped = trainer.finite_steps.num_skipped
        if skipped > self._num_skipped:
            self._num_skipped = skipped
            self.event("skipped_step", text="the loss or the gradient was not finite")
        self._tell_path()
        sampled = [experience for experience in self._sampled if experience.rollouts]
        if not sampled:
            return
        size, files, max_steps = trainer.plan.num_generations, self._files_of(TRAINING), state.max_steps
        times, stores, senders = (self._step_began_ns, time.time_ns()), self.keep_bytes > 0, self.senders

        def write() -> None:
            found = numbers_by_row(scores) if gathered is None else gathered
            rows = [stored_rows(one, found, self._texts, num_generations=size) for one in sampled]
            tables = _write(rows, step, max_steps, files if stores else None)
            for sender in senders:
                sender.step(step, times, [row for table in tables for row in summaries(table)])

        self._writer.put(write)
        if self.senders and (step >= max_steps or control.should_training_stop):
            self._writer.drain(WAIT_S)  # trackers close at the end of training, before this context

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Completes the configuration early in the first step, which may last long or fail."""
        if self._is_open and not self._path:
            self._tell_path()

    def _tell_path(self) -> None:
        """Records the decode path of this step: first in the configuration, later as an event when it changes."""
        path = path_of_step(self._trainer)
        if not path or path == self._path:
            return
        if self._path:
            self.event("path", text=path)
        elif self._trainer.state.is_world_process_zero:
            self._try(lambda: self._write_configuration(path))
        self._path = path

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Queues the rollouts of an evaluation for writing."""
        evaluated, self._evaluated = self._evaluated, {}
        size, step, max_steps = self._trainer.args.num_generations_eval_resolved, state.global_step, state.max_steps
        for phase, batches in evaluated.items():
            sampled, files = [batch for batch in batches if batch[0].rollouts], self._files_of(phase)

            def write(files: Any = files, phase: str = phase, sampled: Any = sampled) -> None:
                options = {"num_generations": size, "phase": phase}
                rows = [stored_rows(one, {}, self._texts, first_row=first, **options) for one, first in sampled]
                _write(rows, step, max_steps, files)

            if sampled:
                self._writer.put(write)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """The same after `predict`."""
        self.on_evaluate(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Records a checkpoint."""
        if self._is_open:
            self.event("checkpoint", folder=f"checkpoint-{state.global_step}")

    def event(self, kind: str, **fields: Any) -> None:
        """Adds an event; main process only."""
        if self._folder is not None and dist.is_main():
            line = {"time": time.time(), "step": self._trainer.state.global_step, "event": kind, **fields}
            self._try(lambda: self._events.append(line))
            for sender in self.senders:
                self._try(lambda sender=sender: sender.event(line))

    # ---------------------------------------------------------------------------------------------------- the parts

    def _forget(self) -> None:
        self._scores, self._evaluated = [], {}

    def _prepare(self, step: int, checkpoint: Path | None) -> bool:
        """Collective. Moves the files of an earlier run aside, or cuts them to `step` to go on; False if that fails.

        After a failure nothing is recorded, since two runs would mix. Where nodes have disks of their own, the first
        process of each node prepares the folder there, which finds it prepared where they share one; on such a node a
        file that the main process writes is missing.
        """
        is_main, errors = dist.is_main(), []
        for prepares in (is_main, self._trainer.state.is_local_process_zero and not is_main):
            errors += dist.all_gather_objects(self._prepared(step, checkpoint) if prepares else None)
        error = next((one for one in errors if one is not None), None)
        if error is not None and is_main:
            self._report(error)
        return error is None

    def _prepared(self, step: int, checkpoint: Path | None) -> OSError | None:
        """Prepares the folder; the error if that fails."""
        assert self._folder is not None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if checkpoint is None or checkpoint.resolve().parent != self._folder.resolve():
                run_files.set_aside(self._folder)
            else:
                self._metrics.cut(step)
                self._weights.cut(step)
                run_files.remove_rollouts_after(self._folder, step)
        except OSError as error:
            return error
        return None

    def _start(self, step: int, resumed_from: str | None) -> None:
        """Writes the configuration, the log events before the training, and how it starts. Main process only."""
        assert self._folder is not None
        decides = dict(vars(self._trainer.args)), self._trainer.state.max_steps, torch.get_num_threads(), self.command
        if resumed_from is None or decides != self._written:  # a pause leaves them as they are
            self._path = ""
            self._try(self._write_configuration)
            self._written = decides
        for line in self._early_lines:
            self._try(lambda line=line: self._metrics.append(line))
        self._early_lines = []
        if step == 0 and (digest := self._digest_now(trained_only=True)) is not None:
            first = {"step": 0, "digest": digest, "all": self._digest_now(trained_only=False)}
            self._try(lambda: self._weights.append(first))
        where: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "processes": dist.world_size()}
        where["process_started"] = psutil.Process().create_time()
        if resumed_from is None:
            self.event("started", **where)
        else:
            self.event("resumed", checkpoint=resumed_from, **where)

    def _write_configuration(self, path: str = "") -> None:
        """Writes the configuration of a start, and again with the `path` of decode steps once that is known."""
        assert self._folder is not None
        self._config = self._config if path else run_configuration(self._trainer, self.command, self.data_digest())
        self._config["sampling"]["path"] = path or None
        text = json.dumps(self._config, indent=1, ensure_ascii=False, default=str)
        run_files.replace_file(self._folder / run_files.CONFIG, lambda aside: aside.write_text(text + "\n", "utf-8"))

    def _files_of(self, phase: str) -> RolloutFiles:
        """The files of training or of an evaluation, within their part of the space."""
        assert self._folder is not None
        if phase not in self._files:
            args = self._trainer.args
            keep, folder = self.keep_bytes // dist.world_size(), self._folder / run_files.ROLLOUTS
            part = keep // EVAL_PART if args.evaluates else 0
            if phase == "train":
                keep -= part
            else:
                sets = self._trainer.eval_dataset
                keep = (part or keep // EVAL_PART) // (len(sets) if isinstance(sets, dict) else 1)
                folder = self._folder / run_files.EVAL_ROLLOUTS / re.sub(r"[^\w.-]+", "_", phase)
            self._files[phase] = RolloutFiles(
                folder,
                rank=dist.rank(),
                keep_bytes=keep,
                seed=args.seed,
                world_size=dist.world_size(),
                images=None if phase == "train" else self._folder / run_files.IMAGES,
            )
        return self._files[phase]

    def data_digest(self) -> dict[str, Any] | None:
        """The digest of the training data, which is read once for a run that is resumed many times."""
        dataset = self._trainer.train_dataset
        if self._known_data is None or self._known_data[0] is not dataset:
            self._known_data = dataset, dataset_digest(dataset)
        return self._known_data[1]

    def _digest_now(self, *, trained_only: bool) -> str | None:
        """The digest of the weights as they are; None if there is none."""
        if self._parameters is None:
            return None
        named = [pair for pair in self._parameters if pair[1].requires_grad or not trained_only]
        return self._try(lambda: weights_digest(named))

    def _try(self, make: Callable[[], Any]) -> Any:
        """Makes or writes a record; None, and a warning, if that fails."""
        try:
            return make()
        except Exception as error:  # no record is worth a run
            self._report(error)
            return None

    def _report(self, error: Exception) -> None:
        """Warns once a training of a record that cannot be written."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "step %d: the run folder %s cannot be written (%s: %s); training goes on without these records",
                self._trainer.state.global_step,
                self._folder,
                type(error).__name__,
                error,
            )


def _write(rows: Sequence[StoredRows], step: int, max_steps: int, files: RolloutFiles | None) -> list[pa.Table]:
    """Writes what a step or an evaluation sampled, unless `files` is None, and returns it as tables."""
    tables = [to_table(step, part) for part in rows]
    if files is not None:
        images = {name: image for pair in zip(rows, tables) for name, image in images_by_name(*pair).items()}
        files.write(step, tables, max_steps=max_steps, images=images)
    return tables


class _EventHandler(logging.Handler):
    """Adds the package's warnings to the events of a run."""

    def __init__(self, recorder: RunRecorder):
        super().__init__(logging.WARNING)
        self._recorder, self._left = recorder, MAX_WARNINGS

    def emit(self, record: logging.LogRecord) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        kind = "error" if record.levelno >= logging.ERROR else "warning"
        try:
            self._recorder.event(kind, source=record.name, text=record.getMessage())
        except Exception:  # a message whose arguments do not fit, as in every handler
            self.handleError(record)
