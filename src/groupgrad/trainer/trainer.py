"""`GRPOTrainer`: one optimizer step, in reading order.

`training_step` → `_begin_step` → `_sample` → `_loss` → `batch_loss`. The rest joins these to the training loop of
`transformers.Trainer`; `trainer/hooks.py` logs, saves and resumes the run.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainerCallback, default_data_collator
from transformers import ProgressCallback as PlainProgressCallback
from transformers import trainer as hf_trainer
from transformers.trainer_utils import EvalLoopOutput
from transformers.training_args import OptimizerNames

from groupgrad import dist
from groupgrad.activity import Timings
from groupgrad.batch import Batch, StepTotals, TokenScores
from groupgrad.batching.buffer import GenerationBuffer
from groupgrad.batching.eval_loader import EvalLoader, checked_batches
from groupgrad.batching.loader import MicroBatchKey, keys_of_step, make_train_loader, reread_rows
from groupgrad.batching.micro_batches import MicroBatch, MicroBatchRules, assign_micro_batches
from groupgrad.batching.rank_balance import rows_to_trainers
from groupgrad.batching.totals import step_totals, with_drift_cutoff, with_entropy_threshold, with_selected
from groupgrad.config import GRPOConfig
from groupgrad.engines.base import EngineWithWeights
from groupgrad.engines.native import NativeEngine
from groupgrad.evaluation.prompt_numbers import Measure, logged
from groupgrad.metrics import latest, merge_all
from groupgrad.models.shards import is_offloaded, is_sharded, num_parameters
from groupgrad.models.unwrapping import unwrap
from groupgrad.objectives import (
    FORWARD,
    FORWARD_AND_BACKWARD,
    Advantages,
    OnPolicyInfo,
    PolicyLoss,
    find_mask,
    find_method,
    policy_loss,
    sampler_scores,
)
from groupgrad.rollout.collector import Experience
from groupgrad.rollout.requests import GenerationRequest, training_request
from groupgrad.rollout.sources import build_rollout_components
from groupgrad.run_folder.metric_store import MetricStore
from groupgrad.run_folder.progress import ProgressCallback
from groupgrad.scoring.attention import unplug, without_cudnn_attention
from groupgrad.scoring.attention_cost import attention_cost
from groupgrad.scoring.forward import errors_of_passes, score_tokens, shares_beginnings
from groupgrad.scoring.fused_modules import restore_modules
from groupgrad.scoring.rounding import Rounding
from groupgrad.trainer import build, component_options, dataset_checks
from groupgrad.trainer.checked_entry import check_model, follow_options, one_thread
from groupgrad.trainer.constructor_arguments import (
    check_optimizer,
    resolve_config,
    resolve_processing_class,
    resolve_reward_funcs,
    use_one_device,
)
from groupgrad.trainer.finite_steps import FiniteSteps
from groupgrad.trainer.gradients import deterministic_cpu
from groupgrad.trainer.hooks import Hooks, TrainerActions, put_first
from groupgrad.trainer.run_state import RunState
from groupgrad.trainer.sampler_logprobs import precompute_gradient
from groupgrad.trainer.step_log import MismatchWatch, StepLog, tolerance
from groupgrad.trainer.trl_names import check_overrides
from groupgrad.types import RewardTable, Rollout, Turns

STEPS_IN_BACKWARD = (OptimizerNames.LOMO, OptimizerNames.ADALOMO)


@dataclass(slots=True, frozen=True)
class MicroBatchStep:
    """The input of one `training_step`: the keys of all micro-batches of an optimizer step, and the index of one."""

    keys: tuple[MicroBatchKey, ...]
    index: int


class GRPOTrainer(Hooks):
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
        reward_funcs: the rewards of completions: a Python function (sync or async), the id of a sequence-classification
            model with one label, such a model, or a list of any of these. A function gets keyword arguments (`prompts`,
            `completions`, `completion_ids`, every data-set column, `trainer_state`, `log_extra`, `log_metric`) and
            returns a float or None (does not apply) for each completion.
        args: the configuration; None gives a default one.
        train_dataset: rows with a `prompt` (text or messages), perhaps `image` or `images`; rewards see all columns.
            None if an environment brings the prompts; then `args.max_steps` is the length of the run.
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
        agent: a program in place of a loop of the trainer's, `agent(row, session)`, plain or async, that talks to an
            OpenAI-compatible address and returns its reward, see `AgentSession`.
        response_parser: reads the calls from a turn whose syntax is not known, see `ChatFormat`.
        eval_reward_funcs: what evaluations score completions by instead of `reward_funcs`, in the same forms, each with
            weight 1; environments' own rewards stay. A reward model's tokenizer is the model's. `score_rollouts` and
            `compute_advantages` of a subclass are then called in training alone.
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
        agent: Callable[..., Any] | None = None,
        response_parser: Callable[..., Any] | None = None,
        eval_reward_funcs: Any = None,
        tokenizer: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        reward_model: Any = None,
        num_generations: int | None = None,
    ):
        self._start_folder = os.getcwd()
        check_overrides(self)
        config = resolve_config(args, model, num_generations)
        reward_funcs = resolve_reward_funcs(reward_funcs, reward_fn, reward_model, environment_factory or agent)
        processing_class = resolve_processing_class(processing_class, tokenizer)
        policy = build.build_policy(model, config, processing_class, quantization_config, peft_config)
        use_one_device(config, policy.model)
        check_optimizer(config, optimizers[0], policy.model)
        self.plan = component_options.generation_plan(config)
        if train_dataset is None:
            train_dataset = dataset_checks.rows_for_environment(environment_factory, self.plan, config)
        self.prompt_maker = build.build_prompt_maker(config, policy)
        self.rollout_components = rollouts = build_rollout_components(
            self.prompt_maker,
            tools,
            environment_factory,
            rollout_func,
            response_parser,
            agent,
            max_tool_calling_iterations=config.max_tool_calling_iterations,
            reuse_environments=config.reuse_environments,
        )
        with one_thread("GRPOTrainer()"), ExitStack() as on_error:
            on_error.callback(rollouts.close)
            train_dataset = dataset_checks.keep_columns(train_dataset, "train_dataset", reward_funcs, rollouts, config)
            scored_by = reward_funcs if eval_reward_funcs is None else eval_reward_funcs
            eval_dataset = dataset_checks.keep_columns_of_sets(eval_dataset, scored_by, rollouts, config)
            datasets = train_dataset, eval_dataset
            dataset_checks.check_datasets(*datasets, self.plan, self.prompt_maker, rollouts, config)
            self.rewards, self.eval_rewards = build.build_rewards(
                config, reward_funcs, reward_processing_classes, eval_reward_funcs, rollouts
            )
            dataset_checks.check_rewards(self.rewards, self.eval_rewards, *datasets, rollouts)
            super().__init__(
                model=policy.model,
                args=config,
                data_collator=default_data_collator,  # unused: the loaders collate
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=policy.processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
            )
            self._connect(policy)
            on_error.pop_all()

    # ------------------------------------------------------------------------------------------------- one step

    def get_batch_samples(
        self, epoch_iterator: Iterator[MicroBatchKey], num_batches: int, device: torch.device
    ) -> tuple[list[MicroBatchStep], None]:
        """The inputs of the `training_step`s of one optimizer step."""
        with dist.errors_on_all_ranks():  # reading a row may fail on one rank alone
            keys = keys_of_step(epoch_iterator, num_batches)
        return [MicroBatchStep(keys, index) for index in range(len(keys))], None

    def training_step(self, model: nn.Module, inputs: MicroBatchStep, num_items_in_batch: Any = None) -> torch.Tensor:  # pyright: ignore
        """Trains one micro-batch; the first of a step samples what the step needs, the last one averages gradients."""
        started = time.perf_counter()
        with self.timings.phase("training"):
            if inputs.index == 0:
                self._micro_batches = self._begin_step(model, inputs.keys)
            micro_batch = self._micro_batches[inputs.index]
            with self._training_passes(is_last=inputs.index == len(inputs.keys) - 1):
                losses = self.memory.train(micro_batch, partial(self._loss, model), self._backward)
                loss = torch.stack([part.loss for part in losses]).sum()
                unsent = self.gradient_sums.holders if self._gradient_sync is None else self._gradient_sync.unsent()
                self.finite_steps.mark(loss, unsent)
        self._step_log.losses += losses
        self._step_log.seconds += time.perf_counter() - started
        return loss

    def _begin_step(self, model: nn.Module, keys: Sequence[MicroBatchKey]) -> list[MicroBatch]:
        """Collective. The step's micro-batches on this rank, with the denominators of the whole step."""
        self._step_log = StepLog()
        model.train()
        self.optimizer.train()  # pyright: ignore  # some optimizers train at other weights than they evaluate
        self.memory.begin_step()
        step, size = self.state.global_step, self.plan.micro_batch_rows
        self._on_policy = self.sampler_logprobs.on_policy(step)
        # A resumed run may begin inside a generation batch that its checkpoint does not hold.
        for index, key in enumerate(keys):
            if key.position == 0 or key.generation not in self.buffer.batches:
                self.buffer.batches[key.generation] = self._sample(key, index)
        self.buffer.batches = {key.generation: self.buffer.batches[key.generation] for key in keys}
        with dist.errors_on_all_ranks():
            batch = self._rows_of_step(keys)
        totals = step_totals(batch, len(keys))
        if self._chooses_tokens:
            batch, totals = self._choose_tokens(batch, totals)
        return assign_micro_batches(
            replace(batch, totals=totals),
            [range(index * size, (index + 1) * size) for index in range(len(keys))],
            self._rules,
            self._on_policy,
            entropy_coef=self.entropy_controller.applied,
            every_row=not self._uses_builtin_loss,
        )

    def _sample(self, key: MicroBatchKey, index: int) -> Batch:
        """Collective. Samples and scores a generation batch; the rows that this rank trains, on the CPU.

        `index` is the place among the step's micro-batches of the one that needs it first.
        """
        check_model(self)  # a callback may have changed it since the training began
        rows = key.rows
        if rows is None:  # a checkpoint should have held the generation batch
            groups = self.plan.rank_groups(dist.rank(), key.generation)
            with dist.errors_on_all_ranks():
                rows = reread_rows(key, self.train_dataset, groups, self.buffer.incompatibility)
        request = training_request(self.plan, dist.rank(), key.generation, rows, self.state.global_step)
        upcoming = self._upcoming(key, index) if key.ahead else []
        experience = self.components.collector(request, trainer_state=self.state, upcoming=upcoming)
        self.state.num_input_tokens_seen += experience.num_tokens
        self._step_log.experiences.append(experience)
        if self.on_experience is not None:
            self.on_experience(experience)
        is_complete = self.plan.is_on_policy and self.reference is None
        batch = experience.batch if is_complete else self._with_logprobs(experience.batch)
        return rows_to_trainers(batch, self.plan, key.generation)

    def _upcoming(self, key: MicroBatchKey, index: int) -> list[GenerationRequest]:
        """Requests for the generation batches after the `index`-th micro-batch's that may be sampled ahead."""
        step = self.state.global_step
        num_left = (self.state.max_steps - step) * self.args.gradient_accumulation_steps - index
        numbered = enumerate(key.ahead[: self.plan.generations_after(num_left)], start=key.generation + 1)
        return [training_request(self.plan, dist.rank(), number, rows, step) for number, rows in numbered]

    def _with_logprobs(self, batch: Batch) -> Batch:
        """Collective. A generation batch with log-probs of the policy that sampled it and of the reference model."""
        scorer, size, old = self.components.scorer, self.plan.micro_batch_rows, None
        with self.timings.phase("scoring"), errors_of_passes(self.model):
            if not self.plan.is_on_policy:
                old = self.sampler_logprobs.old_logprobs(batch)
                if old is None:
                    old = self.recorder.keep_scores(batch, scorer.policy(batch, rows_per_pass=size)).logprobs
            reference = scorer.reference_logprobs(batch, rows_per_pass=size)
        return replace(batch, old_logprobs=old, ref_logprobs=reference)

    def _rows_of_step(self, keys: Sequence[MicroBatchKey]) -> Batch:
        """This rank's rows of a step, from one generation batch or several, in the order of the micro-batches."""
        batches = []
        for number, same in groupby(keys, key=lambda key: key.generation):
            rows = [row for key in same for row in self.plan.places(dist.rank(), key.position, number)]
            batch = self.buffer.batches[number]
            batches.append(batch if rows == list(range(batch.num_rows)) else batch.select(rows))
        return batches[0] if len(batches) == 1 else Batch.concat(batches)

    @property
    def _chooses_tokens(self) -> bool:
        """True if the loss of a step depends on how its tokens compare with each other."""
        policy = self.components.policy_options
        mask = policy.off_policy_mask
        has_cutoff = mask is not None and find_mask(mask).cutoff is not None
        return self.args.top_entropy_quantile < 1.0 or has_cutoff or find_method(policy.loss_type).select is not None

    def _choose_tokens(self, batch: Batch, totals: StepTotals) -> tuple[Batch, StepTotals]:
        """Collective. This rank's part of the step and its totals, with what is chosen among all tokens of the step."""
        scores, policy = self._scores(batch), self.components.policy_options
        if (keep := self.args.top_entropy_quantile) < 1.0:
            totals = with_entropy_threshold(totals, batch, scores.entropy, keep)
        if policy.off_policy_mask is not None:
            totals = with_drift_cutoff(totals, batch, scores.logprobs, find_mask(policy.off_policy_mask), policy)
        method = find_method(policy.loss_type)
        if method.select is not None:
            seed = self.args.seed + self.state.global_step
            batch = with_selected(batch, scores.logprobs, method, policy, seed)
        return batch, totals

    def _scores(self, batch: Batch) -> TokenScores:
        """Collective. Log-probs and entropies of the policy of this step in evaluation mode."""
        with self.timings.phase("scoring"), errors_of_passes(self.model):
            scores = self.sampler_logprobs.scores(batch, self.state.global_step)
            if scores is not None:
                return scores
            return self.components.scorer.policy(batch, rows_per_pass=self.plan.micro_batch_rows)

    def _loss(self, model: nn.Module, part: MicroBatch) -> PolicyLoss:
        """The loss of rows that all need the same passes, with a gradient if they need a backward pass."""
        batch = part.batch.to(self.args.device)
        with self.compute_loss_context_manager():
            if part.passes == FORWARD_AND_BACKWARD:
                if self._uses_builtin_compute_loss:
                    return self.batch_loss(model, batch)
                return self._replaced_loss(model, batch)
            # Rows without a gradient count in the loss's value and its metrics. The model is the one without
            # DeepSpeed's wrapper: ranks may differ in the number of such passes.
            with torch.no_grad():
                if part.passes == FORWARD:
                    return self.batch_loss(unwrap(model), batch)
                return self.batch_loss(unwrap(model), batch, known=True)

    def batch_loss(self, model: nn.Module, batch: Batch, *, known: bool = False) -> PolicyLoss:
        """The share of a batch in the loss of its optimizer step, with gradient, and its metrics.

        The loss of the step is the sum of these shares over micro-batches, averaged over ranks. With `known` the
        sampler's log-probs and entropies replace a forward pass.
        """
        policy = self.components.policy_options
        scores = sampler_scores(batch) if known else self._scores_with_gradient(model, batch)
        result = policy_loss(
            scores,
            batch,
            policy,
            entropy_coef=self.entropy_controller.applied,
            aux_loss_coef=self._policy.aux_loss_coef,
        )
        if not known:
            result.metrics |= self.sampler_logprobs.metrics(scores, batch, self._on_policy.step)
        return result

    def _scores_with_gradient(self, model: nn.Module, batch: Batch) -> TokenScores:
        """Log-probs and entropies of a batch by a forward pass, differentiable; the recorder keeps them too."""
        # In half precision the sampler's log-probs differ by more than a precomputed gradient may.
        is_fine = self._on_policy.exact and not self.rounding.is_half
        precomputed = precompute_gradient(batch, self.components.policy_options) if is_fine else None
        scores = score_tokens(model, batch, self.components.forward_options, precomputed)
        return self.recorder.keep_scores(batch, scores)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """The loss of `batch_loss`; a subclass may change it."""
        if return_outputs:
            raise ValueError("return_outputs=True is not supported: the loss is made of token scores, not of outputs")
        return self.batch_loss(model, inputs).loss

    @property
    def _uses_builtin_compute_loss(self) -> bool:
        """True if neither a subclass nor a script has replaced `compute_loss`."""
        return getattr(self.compute_loss, "__func__", None) is _COMPUTE_LOSS

    @property
    def _uses_builtin_loss(self) -> bool:
        """True if neither `batch_loss` nor `compute_loss` is replaced: rows without advantage then have no loss."""
        return self._uses_builtin_compute_loss and getattr(self.batch_loss, "__func__", None) is _BATCH_LOSS

    def _replaced_loss(self, model: nn.Module, batch: Batch) -> PolicyLoss:
        """The replaced `compute_loss`, with the metrics of each `batch_loss` that it calls."""
        losses: list[PolicyLoss] = []
        batch_loss, replaced = self.batch_loss, vars(self).get("batch_loss")

        def recorded(*args: Any, **kwargs: Any) -> PolicyLoss:
            losses.append(batch_loss(*args, **kwargs))
            return losses[-1]

        self.batch_loss = recorded
        try:
            loss = self.compute_loss(model, batch)
        finally:
            del self.batch_loss
            if replaced is not None:
                self.batch_loss = replaced
        terms = tuple(one for part in losses for one in part.token_terms)
        return PolicyLoss(loss, merge_all(part.metrics for part in losses), terms)

    @contextmanager
    def _training_passes(self, *, is_last: bool) -> Iterator[None]:
        """Context of a micro-batch's forward and backward passes. Collective at the end if `is_last`, and on errors."""
        sync = nullcontext() if self._gradient_sync is None else self._gradient_sync.micro_batch(is_last=is_last)
        passes = self.gradient_sums.passes(is_last=is_last)
        with passes, sync, deterministic_cpu(self.model), without_cudnn_attention():
            try:
                yield
            finally:
                self._restore_modules()
        if is_last and self.is_deepspeed_enabled:
            from groupgrad.integrations.sharding import zero3

            zero3.engine(self.accelerator).step()

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Adds the gradient of `loss`, as `transformers.Trainer.training_step` does; `is_last` in its micro-batch."""
        args, further = self.args, {}
        every = args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            hf_trainer.clear_device_cache()
        if args.optim in STEPS_IN_BACKWARD:
            further["learning_rate"] = self._get_learning_rate()
        sync = self._gradient_sync
        if self.is_deepspeed_enabled:
            from groupgrad.integrations.sharding import zero3

            zero3.backward(self.accelerator, loss)
        else:
            with nullcontext() if sync is None else sync.backward_pass(is_last=is_last):
                # accelerate divides by its own accumulation, which transformers sets to 1; `objectives.reduce` scales.
                self.accelerator.backward(loss, **further)
        self._restore_modules()

    def _restore_modules(self) -> None:
        """Restores the model's own attention and modules; gradient checkpointing no longer needs the others."""
        unplug(self.model)
        restore_modules(self.model)

    def score_rollouts(self, rollouts: Sequence[Rollout], *, trainer_state: Any, step: int) -> RewardTable:
        """The rewards of finished rollouts of this rank, at least one, (B, R) in their order; NaN where not scored.

        A subclass may change them, in training and, without `eval_reward_funcs`, in evaluation.
        """
        return self.rewards.score(rollouts, trainer_state=trainer_state, step=step)

    def compute_advantages(
        self,
        rewards: torch.Tensor,
        num_generations: int,
        lengths: torch.Tensor | None = None,
        turns: Sequence[Turns] | None = None,
    ) -> Advantages:
        """The advantages of all ranks' rows, (N,), from their (N, R) rewards; rows of a group are contiguous.

        `lengths` (N,) are the tokens that the policy sampled, `turns` the turns of each row, None unless the estimator
        credits turns. Every rank gets the same rewards and must return the same advantages. A subclass may change them,
        and need not take `lengths` and `turns`.
        """
        # `ExperienceCollector` calls this with the rewards that it has gathered, and collates the batch of the result.
        return self.components.scoring_options.advantages(rewards, num_generations, lengths, turns)

    def _end_step(self, step: int) -> None:
        """Collective. After the optimizer step: the controller, the reference, the step's own metrics."""
        times = self._step_log.finish(self.timings, has_weights=self.vllm_policy is not None)
        for experience in self._step_log.experiences:
            self._log_experience(experience)
        for metrics in (*(loss.metrics for loss in self._step_log.losses), times, self.finite_steps.metrics()):
            self.metric_store.add(metrics)
        if self.entropy_controller.is_active:
            self.metric_store.add(self.entropy_controller.end_step(self._step_log.measured.get("entropy")))
        if self.reference is not None and self.args.sync_ref_model and step % self.args.ref_model_sync_steps == 0:
            self.reference.sync(self._policy.model, self.args.ref_model_mixup_alpha)

    def _log_experience(self, experience: Experience) -> None:
        """Logs a generation batch of the step that has ended."""
        self.metric_store.add({**experience.metrics, "num_tokens": latest(float(self.state.num_input_tokens_seen))})
        self._log_completions(experience, self.state.global_step - 1, "train")

    def _log_completions(self, experience: Experience, step: int, phase: str) -> None:
        """Collective if `log_completions`. Keeps the completions of a generation batch for the next log event."""
        if self.args.log_completions:
            rows = experience.rollouts, experience.table, experience.advantages.tolist()
            self.completion_log.add(*rows, step, phase=phase)

    # ------------------------------------------------------------------------------------------- parts of a run

    def _connect(self, policy: build.PolicyBundle) -> None:
        """Makes everything that lives as long as the trainer, and hooks it into the training loop."""
        config, self._policy, self.reference = self.args, policy, policy.reference
        if policy.reference is not None and policy.reference.module is not None:
            policy.reference.module = self.accelerator.prepare_model(policy.reference.module, evaluation_mode=True)
        self.progress = ProgressCallback()
        self.timings = Timings(on_phase=self.progress.set_phase)
        self.remove_callback(PrinterCallback)
        self.remove_callback(PlainProgressCallback)
        self.add_callback(self.progress)
        put_first(self.callback_handler.callbacks, TrainerActions(self._prepare_steps, self._end_step))
        self._make_run_objects()
        with dist.errors_on_all_ranks():
            self.completion_log = build.build_completion_log(config)
        if config.use_vllm:
            self.vllm_policy = self._serve(policy)
        self.execution = build.plan_execution(config, self.model, policy, self.accelerator.autocast, self.vllm_policy)
        self.engine, self._micro_batches = self.execution.engine_choice.engine, []
        self._start_anew()

    def _serve(self, policy: build.PolicyBundle) -> EngineWithWeights:
        """Collective. vLLM, started or found; ValueError if it or the data do not fit."""
        from groupgrad.integrations.vllm import setup

        served = setup.serve_policy(self.args, self.model, policy, self.rollout_components)
        # What this process started of vLLM ends with the trainer, or when the process does.
        weakref.finalize(self, served.close)
        max_context, longest = self.prompt_maker.max_context, served.max_model_len
        if max_context is None or max_context > longest:
            self.prompt_maker.max_context = longest
            datasets = self.train_dataset, self.eval_dataset
            dataset_checks.check_datasets(*datasets, self.plan, self.prompt_maker, self.rollout_components, self.args)
        return served

    def _build_components(self) -> None:
        """Splits the configuration into the options of each room, and makes the rooms' components."""
        parts = self.execution, self.rewards, self.timings, self.rollout_components
        self.components = build.build_components(self.args, self._policy, self.prompt_maker, *parts, trainer=self)
        self.plan = component_options.generation_plan(self.args)
        self.sampler_logprobs = build.sampler_logprobs(self.components, self.model, self.rounding, self.vllm_policy)

    def _start_anew(self) -> None:
        """Makes the components, and drops the state of an earlier training."""
        self.rounding = Rounding.of(self.model, self.accelerator.autocast, self.accelerator.mixed_precision)
        self._build_components()
        self.buffer = GenerationBuffer(self.plan, needs_reference=self.reference is not None)
        self._step_log = StepLog()
        applies_early = self.is_deepspeed_enabled or self.args.optim in STEPS_IN_BACKWARD
        self.finite_steps = FiniteSteps(self._policy.tokenizer, applies_early=applies_early)
        self.metric_store, self.eval_metric_store = MetricStore(), MetricStore()
        self.entropy_controller = build.entropy_controller(self.args)
        options, precision = self.components.forward_options, self.accelerator.autocast
        self.checkpointing = build.checkpointing_by_need(
            self.args, self.model, options, precision, self.execution.example
        )
        self._on_policy = OnPolicyInfo(step=0, exact=False)
        limit, is_native = tolerance(self.rounding, self.args.temperature), isinstance(self.engine, NativeEngine)
        self.mismatch_watch = MismatchWatch(limit, is_native=is_native)
        self.gradient_sums, self.memory = build.gradient_memory(
            self.args, self.model, self.components.forward_options, self.checkpointing
        )
        self.run_state = RunState(
            {
                "buffer": self.buffer,
                "metrics": self.metric_store,
                "completions": self.completion_log,
                "entropy": self.entropy_controller,
                "loss": self._loss_window,
                "memory": self.memory,
                "finite_steps": self.finite_steps,
                "evaluation": self.stops.due_evaluation,
            },
            shared={"reference": self.reference} if self.reference is not None and self.args.sync_ref_model else {},
        )

    def _prepare_steps(self) -> None:
        """Computes what holds for all steps, once the model is placed and perhaps sharded over ranks."""
        is_shared, rank_group = is_sharded(self.model), self.execution.rank_group
        is_one_group = rank_group is not None and rank_group.size == dist.world_size()
        balances = self.args.balance_ranks and dist.is_active() and not is_one_group
        self.sampler_logprobs.begin_training(is_shared=is_shared)
        self._num_parameters, self._is_offloaded = num_parameters(self.model), is_offloaded(self.model)
        self._rules = MicroBatchRules(
            self.components.policy_options,
            self.components.forward_options.aux_loss,
            # DeepSpeed counts backward passes, and a sharded model's are collectives.
            backward_everywhere=self.is_deepspeed_enabled or is_shared,
            one_pass=is_shared,
            balance_ranks=balances,
            attention_cost=attention_cost(self.model) if balances else 0.0,
            shares_beginnings=shares_beginnings(self.model, self.components.forward_options),
            rank_group=rank_group,
        )

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        follow_options(self)
        self._start_anew()

    # --------------------------------------------------------------------------------------------- data and log

    def get_train_dataloader(self) -> DataLoader:
        """Yields micro-batch keys; the first of each generation batch brings the prompts that this rank needs."""
        options = replace(component_options.loader_options(self.args), offset=self.resume.data_offset)
        return make_train_loader(self.train_dataset, self.plan, dist.rank(), options)

    # ----------------------------------------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader: EvalLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Collective. Samples, scores and measures a data set; training state and random streams are not touched."""
        store, num_samples, rewarded, prompts = self.eval_metric_store, 0, [], []
        self.callback_handler.eval_dataloader = dataloader
        self._prepare_for_evaluation()
        with self.timings.phase("evaluating"):
            for batch in checked_batches(dataloader):
                experience, metrics, scored = self.components.evaluator(
                    batch, phase=metric_key_prefix, step=self.state.global_step, trainer_state=self.state
                )
                store.add(metrics)
                prompts += scored
                rewarded.append((experience.table, experience.combined_rewards))
                self.recorder.add_evaluation(experience, metric_key_prefix, num_samples)
                self._log_completions(experience, self.state.global_step, metric_key_prefix)
                num_samples += len(batch.rows) * self.args.num_generations_eval_resolved
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        self.timings.take()  # none of it is time of a step
        measure = Measure(tuple(sorted(self.args.eval_k or ())))
        numbers = {**store.flush(), **self.components.collector.spread(rewarded)}
        numbers |= logged(prompts, measure, self.args.eval_by)
        numbers["num_tokens"] = float(self.state.num_input_tokens_seen)
        self._flush_completions(metric_key_prefix)
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in numbers.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=num_samples)  # pyright: ignore


_COMPUTE_LOSS, _BATCH_LOSS = GRPOTrainer.compute_loss, GRPOTrainer.batch_loss
"""The built-in functions: a script may replace them on an instance, in a subclass, or on the class itself."""
