"""The trainer: one optimizer step, in reading order.

`training_step` → `_make_step` → `_make_generation_batch` → `_forward_and_backward` → `compute_loss`; the rest joins
these to the training loop of `transformers.Trainer`. Micro-batches are made in `batching/`; `trainer/base.py` keeps
the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, default_data_collator
from transformers import ProgressCallback as PlainProgressCallback
from transformers.trainer_utils import EvalLoopOutput

from groupgrad import dist
from groupgrad.batch import Batch
from groupgrad.batching.buffer import GenerationBuffer
from groupgrad.batching.eval_loader import EvalLoader
from groupgrad.batching.loader import MicroBatchKey, make_train_loader, rows_of
from groupgrad.batching.micro_batches import assign_micro_batches, has_gradient
from groupgrad.batching.totals import step_totals
from groupgrad.config import GRPOConfig
from groupgrad.metrics import Metric, average, latest
from groupgrad.modeling.scoring.forward import score_tokens, unwrap
from groupgrad.modeling.systems.deterministic_cpu import deterministic_cpu
from groupgrad.modeling.systems.oom_retry import Trained, memory_guard
from groupgrad.modeling.systems.zero3 import is_sharded, num_parameters
from groupgrad.objectives import policy_loss
from groupgrad.rollout.base import training_request
from groupgrad.rollout.collector import Experience
from groupgrad.rollout.sources import AgentArguments, build_rollout_setup
from groupgrad.telemetry.metric_store import MetricStore
from groupgrad.telemetry.progress import ProgressCallback
from groupgrad.telemetry.timings import Timings
from groupgrad.trainer import build as assembly
from groupgrad.trainer import options
from groupgrad.trainer.base import TrainingRun
from groupgrad.trainer.callbacks import LossWindow, RunState, put_step_end_first
from groupgrad.trainer.needed_scores import needed_scores
from groupgrad.trainer.precomputed_gradient import precompute_gradient
from groupgrad.trainer.sampler_logprobs import SamplerLogprobs
from groupgrad.types import Rollout

_STEP_PHASES = ("sampling", "rewards", "scoring", "training")
"""Parts of a step whose seconds are logged as `time/...`; they do not overlap, and `step_time` is about their sum."""


@dataclass(slots=True, frozen=True)
class MicroBatchStep:
    """One micro-batch's turn within an optimizer step: all the step's ticks, and which of them it is."""

    keys: tuple[MicroBatchKey, ...]
    index: int


class GRPOTrainer(TrainingRun):
    """Trains a language model by group relative policy optimization (arXiv:2402.03300).

    ```python
    from datasets import load_dataset
    from groupgrad import GRPOTrainer
    from groupgrad.rewards import accuracy_reward

    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```

    Args:
        model: id or directory of a causal language model or of an adapter to train further, a `PreTrainedModel`, or a
            `PeftModel`.
        reward_funcs: what scores completions: a Python function (sync or async), the id of a sequence-classification
            model with one label, such a model, or a list of any of these. A function gets keyword arguments (`prompts`,
            `completions`, `completion_ids`, every data-set column, `trainer_state`, `log_extra`, `log_metric`) and
            returns a float or None (does not apply) for each completion.
        args: the configuration; None gives a default one.
        train_dataset: rows with a `prompt` (text or messages), perhaps `image` or `images`; rewards see all columns.
        eval_dataset: the same for evaluation, or a dict of named sets, each with metric keys of its own.
        processing_class: the tokenizer, or the processor of a model that takes images; None loads the model's.
        reward_processing_classes: tokenizers of reward models, aligned with `reward_funcs`.
        callbacks: further `TrainerCallback`s.
        optimizers: optimizer and scheduler; None makes those that `args` names.
        quantization_config: passed to loading when `model` is an id.
        peft_config: wraps the model in an adapter.
        tools: functions, sync or async, with type hints and docstrings, that the model may call while it answers.
        rollout_func: makes whole rollouts in place of the model: `f(prompts, trainer)`, see `CustomRollouts`.
        environment_factory: makes an environment for each rollout: `reset(**row)`, public methods as tools, and
            optionally `get_reward()` and `close()`; or a dict of such, chosen by a row's `environment`.
        response_parser: reads the calls from a turn whose syntax is not known, see `ChatFormat`.
        tokenizer, reward_fn, reward_model, num_generations: other spellings of `processing_class`, `reward_funcs` and
            `args.num_generations`.

    Raises:
        ConfigError, ValueError, TypeError: whatever cannot work, before anything is sampled; the message says what to
            set.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
        *,
        response_parser: Callable[..., Any] | None = None,
        tokenizer: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        reward_model: Any = None,
        num_generations: int | None = None,
    ):
        config = assembly.resolve_config(args, model, num_generations)
        reward_funcs = assembly.resolve_reward_funcs(reward_funcs, reward_fn, reward_model, environment_factory)
        processing_class = assembly.resolve_processing_class(processing_class, tokenizer)
        parts = assembly.build_policy(model, config, processing_class, quantization_config, peft_config)
        assembly.check_devices(config, parts.model)
        assembly.check_optimizer(config, optimizers, parts.model)
        train_dataset, eval_dataset = assembly.keep_columns(config, train_dataset, eval_dataset)
        self.plan = assembly.plan_for(config)
        self.prompt_maker = assembly.build_prompt_maker(config, parts)
        asked = AgentArguments(
            tools, environment_factory, rollout_func, response_parser, config.max_tool_calling_iterations
        )
        self.rollout_setup = build_rollout_setup(self.prompt_maker, asked)
        with self.rollout_setup.closed_on_errors():
            assembly.check_datasets(
                train_dataset, eval_dataset, self.plan, self.prompt_maker, self.rollout_setup, config
            )
            self.rewards = assembly.build_rewards(config, reward_funcs, reward_processing_classes, self.rollout_setup)
            assembly.check_reward_models(self.rewards, train_dataset)
            super().__init__(
                model=parts.model,
                args=config,
                data_collator=default_data_collator,  # unused: the loaders collate
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=parts.processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
            )
            self._connect(parts)

    def _connect(self, parts: assembly.PolicyBundle) -> None:
        """Make everything that lives as long as the trainer, and hang it into the training loop."""
        config = self.args
        self.loss_is_scaled_for_ga = True  # compute_loss returns shares that need no further division
        self._parts, self.reference = parts, parts.reference
        if parts.reference is not None and parts.reference.module is not None:
            parts.reference.place(self.accelerator.prepare_model(parts.reference.module, evaluation_mode=True))
        self.progress = ProgressCallback()
        self.timings = Timings(on_phase=self.progress.set_phase)
        self.remove_callback(PrinterCallback)
        self.remove_callback(PlainProgressCallback)
        self.add_callback(self.progress)
        put_step_end_first(self.callback_handler.callbacks, self._end_step)
        self._loss_window = LossWindow(self)
        self.add_callback(self._loss_window)
        self.completion_log = assembly.build_completion_log(config)
        if config.use_vllm:
            self.vllm_policy = self._serve(parts)
        self.paths = assembly.plan_execution(config, self.model, parts, self.accelerator.autocast, self.vllm_policy)
        self.engine = self.paths.engine.engine
        self._micro_batches: list[Batch] = []
        self._start_anew()

    def _start_anew(self) -> None:
        """Cut the configuration into the options of each floor, and drop what a training before this one left."""
        self.setup = assembly.build_components(
            self.args, self._parts, self.prompt_maker, self.paths, self.rewards, self.timings, self.rollout_setup, self
        )
        self.plan = self.setup.plan
        self.buffer, self.metric_store = GenerationBuffer(self.plan), MetricStore()
        self.entropy_controller = assembly.entropy_controller(self.args)
        self.checkpointing = assembly.checkpointing_by_need(
            self.args, self.model, self.setup.forward_options, self.accelerator.autocast, self.paths.example
        )
        self.sampled = SamplerLogprobs(
            self.setup.collector.rollouts,
            self.model,
            self.setup.frozen_scorer,
            self.accelerator,
            self.setup.policy_options.mismatch,
        )
        self.memory = memory_guard(self.model, self.args, aux_loss=self.setup.forward_options.aux_loss)
        self.run_state = RunState(
            {
                "buffer": self.buffer,
                "metrics": self.metric_store,
                "completions": self.completion_log,
                "entropy": self.entropy_controller,
                "loss": self._loss_window,
                "memory": self.memory,
            },
            shared={"reference": self.reference} if self.reference is not None and self.args.sync_ref_model else {},
        )
        self._step_rollouts: list[Rollout] = []
        self._step_seconds = 0.0

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self._start_anew()

    # ------------------------------------------------------------------------------------------------ one step

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatchKey], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatchStep], None]:
        """The ticks of one optimizer step, each micro-batch with sight of all of them."""
        keys = tuple(islice(epoch_iterator, num_batches))
        return [MicroBatchStep(keys, index) for index in range(len(keys))], None

    def training_step(self, model: nn.Module, inputs: MicroBatchStep, num_items_in_batch: Any = None) -> torch.Tensor:  # pyright: ignore
        """Forward and backward of one micro-batch; the first of a step samples what the step needs, the last one joins
        what the ranks found."""
        started = time.perf_counter()
        with self.timings.phase("training"):
            if inputs.index == 0:
                model.train()
                self.optimizer.train()  # pyright: ignore  # some train at other weights than they evaluate
                self._micro_batches = self._make_step(inputs.keys)
                self.memory.begin_step()
            batch = self._micro_batches[inputs.index]
            with self._joined(is_last=inputs.index == len(inputs.keys) - 1), deterministic_cpu(model):
                trained = self.memory.train(batch, lambda part: self._forward_and_backward(model, part))
        self.metric_store.add(trained.metrics)
        self.entropy_controller.observe(trained.metrics["entropy"])
        self.sampled.note(trained.metrics)
        self._step_seconds += time.perf_counter() - started
        return trained.loss

    def _make_step(self, keys: tuple[MicroBatchKey, ...]) -> list[Batch]:
        """Collective. The step's micro-batches on this rank, with the denominators of the whole step."""
        self.sampled.begin_step(self.state.global_step)
        for place, key in enumerate(keys):
            if key.position == 0 or self.buffer.get(key.round) is None:
                self.buffer.put(key.round, self._make_generation_batch(key, place))
        self.buffer.keep_only({key.round for key in keys})
        batches = []
        for key in keys:
            micro_batches = self.buffer.get(key.round) or []
            batches.append(micro_batches[key.position % self.plan.steps_per_generation])
        with self.timings.phase("scoring"):
            totals = step_totals(batches, keep_entropy=self.args.top_entropy_quantile, entropy_of=self.sampled.entropy)
        return assign_micro_batches(
            [replace(batch, totals=totals) for batch in batches],
            self.setup.policy_options,
            self.sampled.freshness,
            entropy_coef=self.entropy_controller.applied,
            aux_loss=self.setup.forward_options.aux_loss,
            backward_everywhere=self.is_deepspeed_enabled,  # it counts backward passes
            one_pass=is_sharded(self.model),
        )

    def _make_generation_batch(self, key: MicroBatchKey, place: int) -> list[Batch]:
        """Collective. Sample and score the round of the step's tick at `place`; its S micro-batches of this rank, kept
        on the CPU."""
        rank, step = dist.rank(), self.state.global_step
        left = self.plan.generations_after(
            (self.state.max_steps - step) * self.args.gradient_accumulation_steps - place
        )
        rows = (rows_of(key, self.train_dataset, self.plan.rank_groups(rank)), *key.ahead[:left])
        request, *upcoming = (training_request(self.plan, rank, key.round + i, r, step) for i, r in enumerate(rows))
        scored = self.setup.collector(request, trainer_state=self.state, upcoming=upcoming)
        self._log_experience(scored)
        slices = [self.plan.slice_rows(rank, s) for s in range(self.plan.steps_per_generation)]
        micro_batches = [
            scored.micro_batch(rows, mask_truncated=self.args.mask_truncated_completions) for rows in slices
        ]
        with self.timings.phase("scoring"), dist.together():
            off_policy = not self.plan.is_on_policy
            return [self.sampled.with_frozen_scores(batch, off_policy=off_policy) for batch in micro_batches]

    def _forward_and_backward(self, model: nn.Module, batch: Batch) -> Trained:
        """The gradient of a micro-batch or a part of one added to the model's; rows without one are only measured."""
        self._measured = {}
        if has_gradient(batch):
            if self.checkpointing is not None:
                self.checkpointing.prepare(batch)
            loss = super().training_step(model, batch)  # pyright: ignore[reportArgumentType]
        else:
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(batch))
        return Trained(loss.detach(), self._measured)

    def _prepare_inputs(self, inputs: Batch) -> Batch:
        """The batch on its device."""
        return inputs.to(self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """This micro-batch's share of the loss: the loss is the sum over micro-batches of the mean over ranks."""
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss is made of token scores, not of outputs")
        self.memory.gradients_are_whole = True
        forward, policy, exact = self.setup.forward_options, self.setup.policy_options, self.sampled.freshness.exact
        # Rows without a gradient go past DeepSpeed's wrapper, since each rank has its own number of such passes.
        scores = needed_scores(
            inputs,
            policy=lambda rows: score_tokens(model, rows, forward, precompute_gradient(rows, policy, exact=exact)),
            measure=lambda rows: score_tokens(unwrap(model), rows, forward),
        )
        result = policy_loss(
            scores,
            inputs,
            policy,
            entropy_coef=self.entropy_controller.applied,
            aux_loss_coef=self._parts.aux_loss_coef,
        )
        self._measured = {**result.metrics, **self.sampled.mismatch(scores, inputs)}
        self.memory.gradients_are_whole = False
        return result.loss

    def _end_step(self, step: int) -> None:
        """Collective. After the optimizer step: the controller, the reference, the step's own metrics."""
        seconds, lengths = self.timings.take(), [rollout.num_sampled for rollout in self._step_rollouts]
        metrics: dict[str, Metric] = {"step_time": average(self._step_seconds)}
        phases = _STEP_PHASES if self.vllm_policy is None else (*_STEP_PHASES, "weights")
        metrics |= {f"time/{phase}": average(seconds.get(phase, 0.0)) for phase in phases}
        if lengths:
            speed = sum(lengths) * dist.world_size() / max(seconds.get("sampling", 0.0), 1e-9)
            self.progress.set_numbers(length=sum(lengths) / len(lengths), tokens_per_second=speed)
        self.sampled.end_step(step)
        if self.entropy_controller.is_active:
            metrics |= self.entropy_controller.end_step()
        if self.reference is not None and self.args.sync_ref_model and step % self.args.ref_model_sync_steps == 0:
            self.reference.follow(self._parts.model, self.args.ref_model_mixup_alpha)
        self.metric_store.add(metrics)
        self._step_seconds, self._step_rollouts = 0.0, []

    # --------------------------------------------------------------------------------------------- data and log

    def get_train_dataloader(self) -> DataLoader:
        """Ticks: one a micro-batch, the first of each round with the prompts that this rank needs."""
        return make_train_loader(self.train_dataset, self.plan, dist.rank(), options.loader_options(self.args))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> EvalLoader:  # pyright: ignore
        """Batches of whole groups, every prompt once."""
        dataset = eval_dataset if eval_dataset is not None else self.eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # pyright: ignore
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset; pass one to the trainer or to evaluate()")
        assembly.check_rows(dataset, "eval_dataset", self.prompt_maker, self.rollout_setup)
        rows = self.args.per_device_eval_batch_size * dist.world_size()
        return EvalLoader(dataset, max(1, rows // self.args.num_generations_eval_resolved))

    def _log_experience(self, scored: Experience) -> None:
        """Count, log and show a training round."""
        self.state.num_input_tokens_seen += scored.num_tokens
        self.metric_store.add({**scored.metrics, "num_tokens": latest(float(self.state.num_input_tokens_seen))})
        self.completion_log.add(scored.records, reward_names=self.rewards.names)
        self._step_rollouts += scored.rollouts
        self.progress.set_numbers(reward=scored.mean_reward)

    def floating_point_ops(self, inputs: MicroBatchStep) -> float:
        """Estimate for training on a micro-batch: 6 a parameter and token (arXiv:2001.08361, sec. 2.1)."""
        batch = self._micro_batches[inputs.index]
        return 6.0 * num_parameters(self.model) * batch.num_forward_tokens

    # ----------------------------------------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader: EvalLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Collective. Sample, score and measure a data set; training state is not touched.

        The same rows get the same random streams in every evaluation, so that changes are the policy's.
        """
        store, num_samples = MetricStore(), 0
        self.callback_handler.eval_dataloader = dataloader
        self._prepare_for_evaluation()
        with self.timings.apart("evaluating"):
            for batch in dataloader:
                scored, metrics = self.setup.evaluator(
                    batch, phase=metric_key_prefix, step=self.state.global_step, trainer_state=self.state
                )
                store.add(metrics)
                self.completion_log.add(scored.records, phase=metric_key_prefix, reward_names=self.rewards.names)
                num_samples += len(batch.rows) * self.args.num_generations_eval_resolved
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        numbers = {**store.flush(), "num_tokens": float(self.state.num_input_tokens_seen)}
        self.completion_log.flush(self.state.global_step, metric_key_prefix)
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in numbers.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_samples)  # pyright: ignore
