"""The hooks of `transformers.Trainer`: what groupgrad does at each, in the order in which `Trainer` calls them.

    hook                                         what we do                           why
    create_accelerator_and_postprocess           hides FSDP from accelerate           the model is sharded already
    train                                        run folder, watches, signals         a run cannot hang or be lost
    hyperparameter_search                        each trial from the present weights  some backends drop the model
    _hp_search_setup *                           components of the trial's options    those were of the first trial
    get_train_dataloader *                       keys of micro-batches                batches are sampled, not loaded
    get_optimizer_cls_and_kwargs                 AdamW with stochastic rounding       `Trainer` has none
    _move_model_to_device, _wrap_model           `GradientSync` instead of a wrapper  gradients are averaged once a step
    _load_from_checkpoint                        `Resume`: verified, by name          a run goes on bit for bit
    _issue_warnings_after_load                   missing weights are an error         `Trainer` warns of them
    _load_optimizer_and_scheduler                `Resume`: verified, by name          a run goes on bit for bit
    _load_rng_state                              `Resume`: verified                   a run goes on bit for bit
    _run_epoch                                   no step after the last; signals      `Trainer` would take one more
    get_batch_samples *, training_step *         one optimizer step                   what all the rest is for
    compute_loss *                               `batch_loss`                         a subclass may replace either
    floating_point_ops, _track_num_input_tokens  true tokens                          nothing is padded
    _clip_grad_norm, _get_grad_norm              norms of shards, finite steps        one bad step ruins the weights
    log                                          metrics of all ranks                 `Trainer` logs those of one
    _determine_best_metric                       nothing measured is not better       `Trainer` ends in a KeyError
    evaluate, predict                            in the run's contexts                they run outside of `train` too
    get_eval_dataloader, get_test_dataloader     whole groups                         groups are compared
    evaluation_loop *                            sample and score groups              there are no predictions
    _save_checkpoint, save_model                 `Saves`: aside, then renamed         a checkpoint is whole or not there
    _finalize_training                           loss of all ranks                    `Trainer` takes this rank's alone
    _load_best_model                             `Resume`                             weights are verified before
    create_model_card                            the run's own card                   `Trainer` knows no GRPO

Those with a star are overridden in `trainer/trainer.py`, which has what a step computes.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PredictionOutput, TrainOutput

from groupgrad import dist
from groupgrad.activity import Hung
from groupgrad.batching.eval_loader import EvalLoader
from groupgrad.batching.generation_plan import GenerationPlan
from groupgrad.batching.micro_batches import MicroBatch
from groupgrad.config import GRPOConfig
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Engine, EngineWithWeights
from groupgrad.errors import HangError
from groupgrad.memory.oom_retry import MemoryGuard
from groupgrad.models.reference import Reference
from groupgrad.models.shards import is_fully_sharded, is_shard, is_sharded, without_accelerate
from groupgrad.rewards.reward_runner import RewardRunner
from groupgrad.rollout.collector import Experience
from groupgrad.rollout.custom import sample_completions
from groupgrad.rollout.requests import row_seed
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.run_folder.completions import CompletionLog
from groupgrad.run_folder.metric_store import MetricStore
from groupgrad.run_folder.progress import ProgressCallback
from groupgrad.run_folder.run_card import write_run_card
from groupgrad.run_folder.run_lock import locked
from groupgrad.trainer import build, dataset_checks
from groupgrad.trainer.build import TrainerComponents
from groupgrad.trainer.changed_options import ChangedOptions
from groupgrad.trainer.checked_entry import entry, trials_from_present_weights
from groupgrad.trainer.finite_steps import FiniteSteps
from groupgrad.trainer.gradients import GradientSums, GradientSync
from groupgrad.trainer.hangs import Watch
from groupgrad.trainer.resuming import Resume, raise_if_missing
from groupgrad.trainer.run_recorder import RunRecorder
from groupgrad.trainer.run_state import LossWindow, RunState
from groupgrad.trainer.run_summary import StartLines
from groupgrad.trainer.saves import Saves
from groupgrad.trainer.step_log import (
    BestMetric,
    FirstBatch,
    LearningSignalWatch,
    StepLog,
    StepWatches,
)
from groupgrad.trainer.stochastic_adamw import StochasticAdamW
from groupgrad.trainer.stops import Stops
from groupgrad.trainer.trl_names import TRLNames, check_overrides

logger = logging.getLogger(__name__)


class Hooks(TRLNames, Trainer):
    """The overrides of `transformers.Trainer`, but for those of a step; `GRPOTrainer` sets the attributes."""

    args: GRPOConfig
    model: Any
    optimizer: Any
    callback_handler: Any
    plan: GenerationPlan
    trial: Any = None
    """The trial of a hyperparameter search that is under way, whose run has a folder of its own."""
    run_state: RunState
    """Everything that a step depends on beyond what `transformers.Trainer` saves."""
    completion_log: CompletionLog
    _start_folder: str
    """Working directory in which the trainer was made, to which a relative `output_dir` belongs."""
    progress: ProgressCallback
    finite_steps: FiniteSteps
    on_experience: Callable[[Experience], None] | None = None
    """Is called with each generation batch of training, once it is scored."""
    _step_log: StepLog
    rewards: RewardRunner
    eval_rewards: RewardRunner
    """Those that score evaluations: `rewards`, unless `eval_reward_funcs` are given."""
    _micro_batches: list[MicroBatch]
    """This rank's micro-batches of the present optimizer step."""
    metric_store: MetricStore
    """Metrics since the last log event."""
    eval_metric_store: MetricStore
    """Metrics of the present or the next evaluation."""
    reference: Reference | None
    vllm_policy: EngineWithWeights | None = None
    """vLLM with the policy's weights, if it samples."""
    engine: Engine
    prompt_maker: PromptMaker
    execution: build.ExecutionPlan
    components: TrainerComponents
    _build_components: Callable[[], None]
    _prepare_steps: Callable[[], None]
    _num_parameters: int
    """Parameters of the model, the shards of other ranks included."""
    _is_offloaded: bool
    """The model is sharded, and its shards are in host memory."""
    _policy: build.PolicyBundle
    rollout_components: RolloutComponents
    gradient_sums: GradientSums
    """The gradients of the present optimizer step."""
    memory: MemoryGuard
    _gradient_sync: GradientSync | None = None
    """Averages gradients over ranks; None for a single rank, and where DeepSpeed does it."""
    _sampled_for_functions: dict[int, int] = {}  # noqa: RUF012 - replaced, never changed
    """Completions that rollout functions have asked for in this optimizer step."""

    def _make_run_objects(self) -> None:
        """Makes the objects that the hooks call, and adds those that are callbacks."""
        self.changed_options = ChangedOptions(self.args)
        self.resume = Resume(self)
        self.saves = Saves(self, self.resume)
        self.stops = Stops(self, self.saves, self.resume)
        self._loss_window = LossWindow(self)
        self.recorder = RunRecorder(self, self.resume, build.build_senders(self.args))
        self._best_metric = BestMetric(self)
        watches = StepWatches(self), FirstBatch(self), LearningSignalWatch(self)
        for callback in (self._loss_window, self.stops.due_evaluation, *watches, self.recorder, StartLines(self)):
            self.add_callback(callback)

    def create_accelerator_and_postprocess(self) -> None:
        """`Trainer`'s, for a model that this trainer shards itself under FSDP."""
        plugin, self.args.fsdp_plugin_args = getattr(self.args, "fsdp_plugin_args", None), None
        try:
            with without_accelerate():
                super().create_accelerator_and_postprocess()
        finally:
            self.args.fsdp_plugin_args = plugin

    # ------------------------------------------------------------------------------------ a run begins and ends

    @entry
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> TrainOutput:
        """`Trainer.train`: step count, mean loss and metrics. Always restores the terminal and closes environments.

        `resume_from_checkpoint` is a path, True for the newest whole checkpoint in `output_dir`, or "auto" for the same
        or else a new start; None takes the configuration's. CheckpointError if it is damaged, before anything is
        sampled; CheckpointNotSaved, after the last step, if the last checkpoint could not be written.
        """
        with self._training(trial, resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, trial, ignore_keys_for_eval, **kwargs)

    @contextmanager
    def _training(self, trial: Any, request: str | bool | None) -> Iterator[str | None]:
        """Collective. A training's folder, watches and signals; yields the checkpoint that it resumes from."""
        check_overrides(self)  # a script may have assigned some since the trainer was made
        self._invalidate_vllm()
        self.gradient_sums.clear()
        dist.limit_waiting(self.args.ddp_timeout)
        self.trial = trial
        try:
            # A signal's checkpoint is written inside all others: watched, recorded, in the locked folder.
            with (
                self.progress,
                self._in_run_folder(),
                self._watched("the training loop"),
                self.stops.at_signals(),
            ):
                if request is None and trial is None:
                    request = self.args.resume_from_checkpoint
                self.saves.begin_training()
                checkpoint = self.resume.begin(request)
                yield checkpoint
            self.saves.raise_if_not_saved()
            self.saves.check_weights()
            if checkpoint:
                self._warn_if_finished(self.progress.first_step)
        finally:
            self.is_in_train, self.trial = False, None
            if self.completion_log.upload is not None:
                self.completion_log.upload.finish()

    @contextmanager
    def _in_run_folder(self) -> Iterator[None]:
        """Collective at its start. The run's folder by a whole path, locked by the main process, with its record.

        The path is whole since a reward function or a tool may change the folder that relative paths belong to.
        """
        given = self.args.output_dir
        self.args.output_dir = os.path.join(self._start_folder, str(given))
        try:
            with ExitStack() as stack:
                with dist.errors_on_all_ranks():
                    if dist.is_main():
                        stack.enter_context(locked(self._get_output_dir(self.trial)))
                stack.enter_context(self.recorder)
                yield
        finally:
            self.args.output_dir = given

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Collective at its start. HangError for what hangs; closes environments at the end."""
        folder = os.path.join(self._start_folder, self._get_output_dir(self.trial))
        try:
            with Watch(what, folder, lambda: self.state.global_step + self.is_in_train, self.args.hang_timeout_s):
                yield
        except Hung as hang:
            raise HangError(str(hang)) from hang
        finally:
            self.components.collector.close()

    def _warn_if_finished(self, first_step: int) -> None:
        """Warns if a resumed run was already finished at its `first_step`."""
        if self.state.global_step == first_step >= self.state.max_steps:
            logger.warning(
                "the checkpoint is at step %d and the run has %d, so it is finished and no step was taken; raise "
                "max_steps or num_train_epochs to train further",
                self.state.global_step,
                self.state.max_steps,
            )

    def _invalidate_vllm(self) -> None:
        """Makes vLLM get the weights again before sampling outside of training, where their changes are not noticed."""
        if self.vllm_policy is not None:
            self.vllm_policy.invalidate()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """`Trainer.hyperparameter_search`; each trial starts from the present weights. The last trial's are kept."""
        with trials_from_present_weights(self):
            return super().hyperparameter_search(*args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """The optimizer that the configuration asks for, and its arguments."""
        if not getattr(args, "stochastic_rounding", False):
            return Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = (args.adam_beta1, args.adam_beta2)
        return StochasticAdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "seed": args.seed}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing for shards, which are on the device."""
        if not is_fully_sharded(model):
            super()._move_model_to_device(model, device)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Collective where several ranks begin to train: the model without a wrapper for them, rank 0's on all."""
        averages = dist.is_active() and not self.is_deepspeed_enabled and not is_sharded(self.model)
        if training and (averages or is_fully_sharded(self.model)):
            model = self._prepare_model(model)
        if training and averages:
            self._gradient_sync = build.gradient_sync(self.args, self.model, self.gradient_sums)
            self._gradient_sync.begin()
        return super()._wrap_model(model, training, dataloader)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        """The model placed, compiled and given its precision, but not wrapped."""
        placed = None if not is_fully_sharded(model) else False
        return self.accelerator.prepare_model(model, device_placement=placed, evaluation_mode=True)

    # -------------------------------------------------------------------------- a run goes on from a checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads weights, including shards of FSDP and renamed parameters."""
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        self.resume.load_weights(resume_from_checkpoint, model or self.model, otherwise=load)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """CheckpointError for missing weights, of which `Trainer` warns."""
        raise_if_missing(load_result.missing_keys, self.model, "the checkpoint")
        super()._issue_warnings_after_load(load_result._replace(missing_keys=[]))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Assigns the optimizer's state by the names of parameters; `Trainer` goes by their order."""
        self.resume.load_optimizer(checkpoint, otherwise=partial(super()._load_optimizer_and_scheduler, checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads the random streams, unless their file is damaged and the user goes on without it."""
        self.resume.load_random_streams(checkpoint, otherwise=partial(super()._load_rng_state, checkpoint))

    # ---------------------------------------------------------------------------------------------------- steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """`Trainer._run_epoch`, which would take a step after the last one of a finished run."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)
        self.stops.end_epoch()

    def floating_point_ops(self, inputs: Any) -> float:
        """Estimate for training on a micro-batch: 6 a parameter and token (arXiv:2001.08361, sec. 2.1)."""
        num_tokens = self._micro_batches[inputs.index].num_forward_tokens / self.args.context_parallel_size
        return 6.0 * self._num_parameters * num_tokens

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Nothing: tokens are counted when they are sampled."""

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """The norm of the averaged gradient, scaled down to `max_grad_norm`. Collective for a sharded model."""
        norm = self._norm_of_offloaded(self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the averaged gradient; a gradient that is not finite is dropped, so that the step is none."""
        known = self._norm_of_offloaded(math.inf) if grad_norm is None else grad_norm
        norm: Any = super()._get_grad_norm(model, known)
        norm = self.recorder.grad_norm = norm.full_tensor() if is_shard(norm) else norm
        self.finite_steps.drop_unless_finite(self, norm)
        return norm

    def _norm_of_offloaded(self, max_norm: float) -> Any:
        """Clips the gradient of shards in host memory and returns its norm before that; None for another model."""
        if not self._is_offloaded:
            return None
        from groupgrad.integrations.sharding.fsdp import clip_offloaded

        return clip_offloaded(self.model, max_norm, self.args.device)

    # ------------------------------------------------------------ between steps: logs, evaluations, checkpoints

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Collective on training logs: the window's metrics of all ranks join the loop's own."""
        if "loss" in logs or ("train_runtime" in logs and len(self.metric_store)):
            logs = {**logs, **self.metric_store.flush()}
            logs |= self.finite_steps.end_window() if "loss" in logs else {}
            self._flush_completions("train")
            for text in self.changed_options.without_effect(self.args):
                logger.warning(text)
        with self.goes_on_without("a log"):
            super().log(logs, start_time)

    def _flush_completions(self, phase: str) -> None:
        """Writes, shows and drops the completions of a phase."""
        with self.goes_on_without(f"completions in {self.completion_log.folder}"):
            self.completion_log.flush(self.state.global_step, phase)

    @contextmanager
    def goes_on_without(self, what: str) -> Iterator[None]:
        """Context in which a file that cannot be written is a warning, not the end of training."""
        try:
            yield
        except OSError as error:
            logger.warning("step %d: %s could not be written (%s)", self.state.global_step, what, error)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """`Trainer._determine_best_metric`; an evaluation that measured nothing for the metric is not better."""
        if self.args.metric_for_best_model is not None and self._best_metric.of(metrics) is None:
            return False
        return super()._determine_best_metric(metrics, trial)

    @entry
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """`Trainer.evaluate`: the metrics, by `eval_` names."""
        with self._evaluating():
            return super().evaluate(*args, **kwargs)

    @entry
    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """`Trainer.predict`: the metrics, by `test_` names."""
        with self._evaluating():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Collective at its start outside of training, where the ranks are watched as `train` has them watched."""
        if self.is_in_train:
            yield
            return
        self._invalidate_vllm()
        with self._watched("the evaluation"):
            yield

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalLoader:  # pyright: ignore
        """Yields batches of whole groups, every prompt once."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # pyright: ignore
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate()")
        dataset = dataset_checks.rows_to_evaluate(self, dataset)
        ranks = dist.world_size()
        prompts = max(1, self.args.per_device_eval_batch_size * ranks // self.args.num_generations_eval_resolved)
        if prompts > ranks:
            prompts -= prompts % ranks  # ranks have whole groups, so that another one would be too many for some
        return EvalLoader(dataset, prompts)

    def get_test_dataloader(self, test_dataset: Any) -> EvalLoader:  # pyright: ignore
        """The same for `predict`."""
        return self.get_eval_dataloader(test_dataset)  # pyright: ignore

    def _prepare_for_evaluation(self) -> None:
        """Places the model and gives it training's precision, when evaluation comes before any training."""
        if self.model_wrapped is self.model and not self._policy.given.is_prepared:
            self._prepare_model(self.model)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """In place of `Trainer`'s, which writes into the folder that a resume would read."""
        self.saves.write(trial, is_pause=self.stops.is_pausing)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer.save_model`, without a bar in files. NonFiniteError for weights that are not finite.

        Collective for a sharded model, whose weights the main process writes whole.
        """
        if output_dir in (None, self.args.output_dir):
            output_dir = os.path.join(self._start_folder, str(self.args.output_dir))
        self.saves.save_model(output_dir, pushes=not _internal_call, otherwise=super().save_model)

    # -------------------------------------------------------------------------------------------------- the end

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Collective. `Trainer`'s, which would take the losses since the last log event from this rank alone."""
        self._tr_loss.fill_(dist.all_sum([float(self._tr_loss)])[0] / dist.world_size())
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        """Loads the best weights as `_load_from_checkpoint` does."""
        self.resume.load_best_weights(otherwise=super()._load_best_model)

    def create_model_card(
        self, model_name: Any = None, dataset_name: Any = None, tags: Any = None, **fields: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Writes the model card (`README.md`) into `output_dir`; main process only. `fields`: see `write_run_card`.

        A dict as the first argument has the fields, such as `{"tags": ["math"]}`.
        """
        if self.is_world_process_zero():
            given = model_name if isinstance(model_name, dict) else {"model_name": model_name}
            fields |= {"dataset_name": dataset_name, "tags": tags, **given}
            write_run_card(self.args, self.model, self.state.log_history, hub_model_id=self.hub_model_id, **fields)

    # ------------------------------------------------------------------------------------ for rollout functions

    def sample_completions(self, prompts: Sequence[Any], *, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Completions of the policy as it is now, one for each prompt (text or messages): for rollout functions.

        A dict of `prompt_ids`, `completion_ids` and `logprobs`, which a rollout function may return as it is. Each call
        draws something else; a run of the same seed draws the same.
        """
        sampling = self.components.sampling
        # Generation batches that are sampled ahead must not meet other weights, so those sent last are used.
        if self.vllm_policy is not None and not (self.is_in_train and self.args.rollout_ahead):
            self.vllm_policy.refresh(self.state.global_step)
        if max_new_tokens is not None:
            sampling = replace(sampling, max_new_tokens=max_new_tokens)
        first = self._sampled_for_functions.get(self.state.global_step, 0)
        self._sampled_for_functions = {self.state.global_step: first + len(prompts)}
        rows = range(first, first + len(prompts))
        seeds = [row_seed(self.args.seed, f"function/{dist.rank()}", self.state.global_step, row) for row in rows]
        return sample_completions(self.engine, self.prompt_maker, sampling, prompts, seeds)


class TrainerActions(TrainerCallback):
    """Calls the trainer when training begins, and after each optimizer step, before anything is logged or saved.

    The intervals of logs, evaluations and checkpoints are those of the configuration: a checkpoint's state does not
    replace them, and other callbacks may change them there.
    """

    def __init__(self, begin_training: Callable[[], None], end_step: Callable[[int], None]):
        self._begin_training, self._end_step = begin_training, end_step
        self._intervals: tuple[Any, ...] | None = None
        """The intervals that the state was given last."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is placed, and perhaps sharded over ranks."""
        self._intervals = None
        self._follow_intervals(args, state)
        self._begin_training()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """`state` counts the step just made."""
        self._follow_intervals(args, state)
        self._end_step(state.global_step)

    def _follow_intervals(self, args: Any, state: Any) -> None:
        intervals = args.save_steps, args.eval_steps, args.logging_steps
        if intervals != self._intervals:
            state.compute_steps(args, state.max_steps)
            self._intervals = intervals


def put_first(callbacks: list[TrainerCallback], actions: TrainerActions) -> None:
    """Inserts the trainer's actions before all callbacks, some of which save.

    transformers' JIT-checkpoint callback saves at whichever event follows a signal. A checkpoint between gradients and
    update could not be resumed, so it is delayed to the end of the step.
    """
    for callback in callbacks:
        if type(callback).__name__ == "JITCheckpointCallback":
            callback.on_pre_optimizer_step = lambda *args, **kwargs: None
    callbacks.insert(0, actions)
