"""Builds the trainer's components from its constructor arguments."""

from __future__ import annotations

import logging
import re
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, set_seed

from groupgrad import compat, dist
from groupgrad.activity import Timings
from groupgrad.config import GRPOConfig
from groupgrad.config.field_rules import changed
from groupgrad.config.launcher import (
    fsdp_layer_classes,
    fsdp_offloads,
    fsdp_settings,
    uses_deepspeed,
    uses_fsdp,
    zero_stage,
)
from groupgrad.config.sampling import eval_sampling_changes, sampling_options
from groupgrad.config.settings import mapping
from groupgrad.config.unused_settings import unused_reward_settings
from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker
from groupgrad.dist import RankGroup
from groupgrad.engines.base import Engine, EngineWithWeights, SamplingOptions
from groupgrad.engines.selection import EngineChoice, choose_engine
from groupgrad.errors import ConfigError, UnavailableError
from groupgrad.kernels.threads import limit_spinning
from groupgrad.memory.oom_retry import MemoryGuard, memory_guard, obstacle_to_cutting
from groupgrad.models import load
from groupgrad.models.adapters import add_adapter, check_adapter, is_adapted
from groupgrad.models.liger import apply_kernels
from groupgrad.models.load import check_language_model, check_vocabulary
from groupgrad.models.model_names import folder_as_text, model_source
from groupgrad.models.reference import Reference, check_sharded_policy
from groupgrad.models.shards import gather_all, gather_per_module, without_accelerate
from groupgrad.models.unwrapping import is_multimodal, unwrap
from groupgrad.multimodal.vlm_prompts import (
    VisionPromptMaker,
    example_prompt,
    is_processor,
    tokenizer_with_processor_template,
)
from groupgrad.objectives import PolicyOptions, find_estimator
from groupgrad.rewards.reward_runner import RewardRunner, check_failure_names
from groupgrad.rollout.collector import ExperienceCollector, ScoringOptions
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.evaluation import Evaluator
from groupgrad.rollout.prefetch import RolloutPrefetcher
from groupgrad.rollout.single_turn import SingleTurnRollouts
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.run_folder.completions import CompletionLog, CompletionsUpload
from groupgrad.run_folder.progress import bars_on_terminals_only
from groupgrad.scoring.attention import whole_rows_reason
from groupgrad.scoring.forward import ForwardOptions, OldAndRefScorer
from groupgrad.scoring.fused_modules import compute_in_weights_type
from groupgrad.scoring.gradient_checkpointing import CheckpointingByNeed
from groupgrad.scoring.rounding import Rounding
from groupgrad.scoring.self_check import (
    LayoutReport,
    check_causal,
    check_layout,
    configured_aux_loss_weight,
    effective_aux_loss_weight,
)
from groupgrad.spelling import did_you_mean
from groupgrad.trainer import component_options
from groupgrad.trainer.checked_entry import GivenModel
from groupgrad.trainer.gradients import GradientSums, GradientSync
from groupgrad.trainer.run_recorder import Sender
from groupgrad.trainer.run_state import EntropyController
from groupgrad.trainer.sampler_logprobs import SamplerLogprobs
from groupgrad.types import Prompt

if TYPE_CHECKING:
    from groupgrad.integrations.sharding.fsdp import FSDPOptions

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PolicyBundle:
    """A policy with what belongs to it."""

    model: Any
    processing_class: Any
    tokenizer: Any
    eos_ids: list[int]
    max_context: int | None
    reference: Reference | None
    given: GivenModel
    aux_loss_coef: float
    """Weight of the load-balancing loss of a mixture of experts; 0 for other models."""


@bars_on_terminals_only()
def build_policy(
    model: Any, config: GRPOConfig, processing_class: Any, quantization_config: Any, peft_config: Any
) -> PolicyBundle:
    """The policy on its way into training, its tokenizer, and the frozen reference if a KL term is used."""
    limit_spinning()
    if config.device.type == "cuda":
        compat.join_tf32_settings()
    # What is made here at random, an adapter above all, is the same in every run of this seed and on every rank.
    set_seed(config.seed)
    with without_accelerate():
        model = _load_model(folder_as_text(model), config, quantization_config)
    check_language_model(model)
    adapter_is_fresh = not is_adapted(model)
    if peft_config is not None:
        model = add_adapter(model, peft_config, keep_dtype=config.stochastic_rounding)
    check_adapter(model)
    given = GivenModel(model)
    if config.use_liger_kernel:
        apply_kernels(model, config.liger_kernel_config)
    load.check_trainable(model)
    processing_class, tokenizer = _load_processing_class(model, config, processing_class)
    check_vocabulary(model, tokenizer)
    eos_ids = load.end_of_sequence_ids(model, tokenizer)
    if not eos_ids:
        raise ValueError(
            "neither the tokenizer nor the model's generation config names an end-of-sequence token, so no completion "
            "could ever end; set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(eos_ids[0])
    for owner in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if owner is not None:
            owner.pad_token_id = tokenizer.pad_token_id
    if config.disable_dropout:
        load.turn_off_dropout(model)
    if uses_fsdp(config):
        from groupgrad.integrations.sharding import fsdp

        fsdp.shard(model, fsdp_options(config), config.device)
    reference = None
    if config.beta != 0.0:
        reference = Reference(model, adapter_is_fresh=adapter_is_fresh, is_synced=config.sync_ref_model)
    if zero_stage(config) == 3 or uses_fsdp(config):
        check_sharded_policy(model, reference)
    if config.cast_lm_head_to_fp32:
        for part in [model, reference.module if reference is not None else None]:
            if part is not None:
                load.cast_head_to_float32(part)
    return PolicyBundle(
        model=model,
        processing_class=processing_class,
        tokenizer=tokenizer_with_processor_template(processing_class, tokenizer),
        eos_ids=eos_ids,
        max_context=load.max_context(model),
        reference=reference,
        given=given,
        aux_loss_coef=configured_aux_loss_weight(model, config.router_aux_loss_coef),
    )


def fsdp_options(config: GRPOConfig) -> FSDPOptions:
    """Returns how FSDP shards the policy."""
    from groupgrad.integrations.sharding.fsdp import FSDPOptions

    in_bf16 = getattr(config, "mixed_precision", "bf16" if config.bf16 else "no") == "bf16"
    return FSDPOptions(
        layer_classes=fsdp_layer_classes(config),
        reshard_after_forward=fsdp_settings(config).get("reshard_after_forward", True) is not False,
        compute_dtype=torch.bfloat16 if in_bf16 else None,
        cpu_offload=fsdp_offloads(config),
    )


def entropy_controller(config: GRPOConfig) -> EntropyController:
    """The weight of the entropy bonus."""
    return EntropyController(
        config.entropy_coef,
        adaptive=config.use_adaptive_entropy,
        target=config.entropy_target,
        delta=config.entropy_coef_delta,
        minimum=config.entropy_coef_min,
        maximum=config.entropy_coef_max,
    )


@dataclass(slots=True, frozen=True)
class TrainerComponents:
    """The components that a step and an evaluation call, made from the configuration."""

    policy_options: PolicyOptions
    forward_options: ForwardOptions
    scoring_options: ScoringOptions
    sampling: SamplingOptions
    scorer: OldAndRefScorer
    collector: ExperienceCollector
    evaluator: Evaluator


@dataclass(slots=True, frozen=True)
class ExecutionPlan:
    """The engine and the layout that were chosen for the model."""

    engine_choice: EngineChoice
    layout_report: LayoutReport
    example: Prompt | None = None
    """The prompt with an image that the self-check used; None for a model that takes text alone."""
    rank_group: RankGroup | None = None
    """The ranks that train rows together with this one; None if each trains rows of its own."""
    vllm_policy: EngineWithWeights | None = None
    """The engine, if it is vLLM."""


def plan_execution(
    config: GRPOConfig,
    model: nn.Module,
    policy: PolicyBundle,
    precision: Any,
    vllm_policy: EngineWithWeights | None = None,
) -> ExecutionPlan:
    """Chooses the engine and the layout for the model, which are tried on random tokens. Collective.

    The engine is `vllm_policy` if given. `precision` makes the context of training's mixed precision. ConfigError if
    the configuration asks for what the model cannot run.
    """
    policy.given.keep_cache()
    pad_id, example = int(policy.tokenizer.pad_token_id), _example(policy)
    scoring = component_options.forward_options(config, pad_id=pad_id, aux_loss=False)
    asked = config.router_aux_loss_coef
    with gather_per_module(model):
        compute_in_weights_type(model, is_compiled=bool(config.torch_compile))
        check_causal(model, precision)
        policy.aux_loss_coef = effective_aux_loss_weight(model, scoring, policy.aux_loss_coef, asked, precision)
        report = check_layout(model, replace(scoring, aux_loss=policy.aux_loss_coef != 0.0), precision, example)
    if report.reason is not None:
        name = type(unwrap(model)).__name__
        logger.warning("%s is scored in the %s layout: %s", name, report.layout, report.reason)
    rank_group = None
    if config.context_parallel_size > 1:
        rank_group = context_group(config, model, report, aux_loss=policy.aux_loss_coef != 0.0)
    if vllm_policy is not None:
        engine = EngineChoice(vllm_policy, "vllm", f"use_vllm=True, vllm_mode={config.vllm_mode!r}")
    else:
        sampling = sampling_options(config, eos_ids=policy.eos_ids, pad_id=pad_id)
        further: dict[str, Any] = {"tokenizer": policy.tokenizer, "precision": precision, "example": example}
        with gather_all(model):
            engine = choose_engine(model, component_options.engine_options(config), sampling, **further)
    return ExecutionPlan(engine, report, example, rank_group, vllm_policy)


def context_group(config: GRPOConfig, model: nn.Module, report: LayoutReport, *, aux_loss: bool) -> RankGroup:
    """The group of ranks that train rows together with this one (`context_parallel_size`). Collective.

    ConfigError if the tokens of a row of `model` cannot be cut over ranks.
    """
    size = config.context_parallel_size
    padded_because = str(report.reason) if report.layout == "dense" else None
    reason = whole_rows_reason(model, padded_because, aux_loss=aux_loss)
    if reason is not None:
        raise ConfigError([f"context_parallel_size={size} cuts the tokens of a row over processes, and {reason}"])
    return dist.consecutive_groups(size, timeout_s=config.ddp_timeout)


def _example(policy: PolicyBundle) -> Prompt | None:
    """A prompt with an image, for a model that takes images; None if its processor fails on it."""
    try:
        return example_prompt(policy.processing_class) if is_multimodal(policy.model) else None
    except ValueError:
        return None


def checkpointing_by_need(
    config: GRPOConfig, model: nn.Module, forward_options: ForwardOptions, precision: Any, example: Prompt | None = None
) -> CheckpointingByNeed | None:
    """Turns gradient checkpointing on where memory runs short; None if the configuration decides."""
    can = getattr(unwrap(model), "supports_gradient_checkpointing", False)
    # Ranks that train rows together compute in the same way, so none decides by its own memory.
    if config.gradient_checkpointing is not None or not can or config.context_parallel_size > 1:
        return None
    chosen = mapping(config.gradient_checkpointing_kwargs)
    with gather_all(model):
        return CheckpointingByNeed(model, forward_options, chosen, precision, example, is_joint=_shares_model(config))


def _shares_model(config: GRPOConfig) -> bool:
    """True if ranks hold parts of one model in training. ZeRO cuts a model that is given when training begins."""
    return uses_fsdp(config) or zero_stage(config) == 3


def sums_in_float32(config: GRPOConfig) -> bool:
    """Returns True if gradients of half-precision weights are summed in float32, which takes 4 bytes a weight."""
    return config.gradient_dtype != "weights" and obstacle_to_cutting(config) is None


def gradient_memory(
    config: GRPOConfig,
    model: nn.Module,
    forward_options: ForwardOptions,
    checkpointing: CheckpointingByNeed | None,
) -> tuple[GradientSums, MemoryGuard]:
    """The sums of a step's gradients, and the guard that trains micro-batches again that ran out of memory."""
    prepare = None if checkpointing is None else checkpointing.prepare
    sums = GradientSums(model, in_float32=sums_in_float32(config))
    options: dict[str, Any] = {"aux_loss": forward_options.aux_loss, "prepare": prepare}
    return sums, memory_guard(model, config, sums.clear, **options, is_joint=_shares_model(config))


def gradient_sync(config: GRPOConfig, model: nn.Module, sums: GradientSums) -> GradientSync:
    """Averages the gradients of ranks that each hold the whole model."""
    megabytes = config.ddp_bucket_cap_mb
    return GradientSync(
        model,
        sums,
        bucket_bytes=dist.BUCKET_BYTES if megabytes is None else megabytes * 2**20,
        buffers=config.ddp_broadcast_buffers is not False,
        joint_passes=config.context_parallel_size > 1,
        overlaps=not mapping(config.gradient_checkpointing_kwargs).get("use_reentrant"),
    )


def build_prompt_maker(config: GRPOConfig, policy: PolicyBundle) -> PromptMaker:
    """The maker of prompts from rows; with images where the model takes them and there is a processor for them."""
    maker = _prompt_maker(config, policy)
    model: Any = unwrap(policy.model)
    num_embeddings = int(getattr(model.get_input_embeddings(), "num_embeddings", 0))
    _warn_of_unread_kwargs(config, policy)
    maker.keeps_special_tokens = config.special_tokens_in_completions
    maker.num_embeddings = num_embeddings if 0 < num_embeddings < len(policy.tokenizer) else None
    return maker


def _warn_of_unread_kwargs(config: GRPOConfig, policy: PolicyBundle) -> None:
    """A warning of each entry of `chat_template_kwargs` that no chat template has a variable for."""
    text = str(getattr(policy.tokenizer, "chat_template", None) or "")
    words = set(re.findall(r"\w+", text))
    for key, value in mapping(config.chat_template_kwargs).items():
        is_read = key in words or key == "continue_final_message"
        if text and not is_read and not is_processor(policy.processing_class):
            hint = did_you_mean(key, words, before="; ")
            warnings.warn(f"chat_template_kwargs has {key}={value!r}, which the chat template does not read{hint}")


def _prompt_maker(config: GRPOConfig, policy: PolicyBundle) -> PromptMaker:
    text = policy.tokenizer, mapping(config.chat_template_kwargs), policy.max_context
    special, name = config.special_tokens_in_prompts, type(unwrap(policy.model)).__name__
    if config.image_root is not None and not is_multimodal(policy.model):
        warnings.warn(f"image_root={config.image_root!r} has no effect: {name} reads text alone")
    if not is_multimodal(policy.model):
        no_images = f"{name} reads text alone; train a model that takes images, or remove the images from the data set"
        return PromptMaker(*text, special_tokens=special, no_images=no_images)
    if is_processor(policy.processing_class):
        return VisionPromptMaker(policy.processing_class, *text, special_tokens=special, image_root=config.image_root)
    found = f"processing_class is a {type(policy.processing_class).__name__}, which makes no model inputs of images"
    logger.warning("%s takes images, but %s: it trains on text alone", name, found)
    no_images = f"{found}; pass processing_class=AutoProcessor.from_pretrained(...)"
    return PromptMaker(*text, special_tokens=special, no_images=no_images)


def build_completion_log(config: GRPOConfig) -> CompletionLog:
    """The log that keeps and shows completions. ValueError if the data set on the hub cannot be written to."""
    folder, repo, upload = Path(str(config.output_dir)).absolute(), config.log_completions_hub_repo, None
    if repo is not None and config.log_completions and dist.is_main():
        private = config.hub_private_repo
        upload = CompletionsUpload(folder / "completions", repo, token=config.hub_token, private=private)
    log = CompletionLog(
        folder,
        num_to_print=config.num_completions_to_print,
        unique_prompts=config.log_unique_prompts,
        log_multimodal=config.log_multimodal,
        report_to=config.report_to or (),  # pyright: ignore[reportArgumentType]
        upload=upload,
    )
    if upload is not None:
        weakref.finalize(log, upload.stop).atexit = False  # at exit it uploads the rest
    return log


def build_senders(config: GRPOConfig) -> list[Sender]:
    """The receivers of what a run records, beside its folder. ConfigError or ImportError where they cannot be had."""
    if not (config.record_spans or config.record_traces):
        return []
    from groupgrad.integrations import traces

    spans: list[Sender] = [traces.RunSpans()] if config.record_spans else []
    return [*spans, *([traces.RunTraces(config.report_to)] if config.record_traces else [])]


def build_rewards(
    config: GRPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    eval_reward_funcs: Any,
    rollout_components: RolloutComponents,
) -> tuple[RewardRunner, RewardRunner]:
    """The runners of the reward functions and models of training, and of evaluation: the same one without
    `eval_reward_funcs`. Environments' own rewards are among both.

    ValueError if there is not one weight for each of training's, or if a setting names a function that is in neither.
    """
    models, supervision = component_options.reward_model_options(config), component_options.supervision_options(config)
    shared: dict[str, Any] = {"environment_names": rollout_components.reward_names, "supervision": supervision}
    rewards = RewardRunner(reward_funcs, processing_classes, models=models, **shared)
    eval_rewards = rewards
    if eval_reward_funcs is not None:
        eval_rewards = RewardRunner(eval_reward_funcs, models=replace(models, argument="eval_reward_funcs"), **shared)
    check_failure_names(supervision, list(dict.fromkeys([*rewards.function_names, *eval_rewards.function_names])))
    _warn_of_unused_rewards(config, rewards, eval_rewards)
    num_given = len(rollout_components.reward_names)
    component_options.scoring_options(config, len(rewards.names) - num_given, num_given)
    plan = component_options.generation_plan(config)
    if rewards.has_functions and not plan.samples_whole_groups and dist.is_main():
        logger.warning(
            "reward functions see parts of groups: a process samples %d completions of a generation batch, which "
            "num_generations=%d does not divide; where a function compares the completions of a prompt, make "
            "per_device_train_batch_size x steps_per_generation (%d x %d) a multiple of it",
            *(plan.rows_per_rank, plan.num_generations, plan.micro_batch_rows, plan.steps_per_generation),
        )
    return rewards, eval_rewards


def _warn_of_unused_rewards(config: GRPOConfig, rewards: RewardRunner, eval_rewards: RewardRunner) -> None:
    """Warnings of settings that none of the rewards makes use of."""
    num_workers = max(rewards.num_workers, eval_rewards.num_workers)
    if config.reward_workers > num_workers:
        warnings.warn(
            f"reward_workers={config.reward_workers} starts {num_workers}: each function runs in one process, "
            "but async functions, reward models and accuracy rewards, which have processes of their own, in none"
        )
    models = [*rewards.models, *eval_rewards.models]
    by_name = any(model.is_by_name for model in models)
    if unused := unused_reward_settings(config, models=bool(models), by_name=by_name):
        warnings.warn(unused)


def build_components(
    config: GRPOConfig,
    policy: PolicyBundle,
    prompt_maker: PromptMaker,
    execution: ExecutionPlan,
    rewards: RewardRunner,
    timings: Timings,
    rollout_components: RolloutComponents,
    trainer: Any,
) -> TrainerComponents:
    """Makes the components of a run from the configuration.

    A user's rollout function is called with `trainer`, whose `score_rollouts` and `compute_advantages` serve; its
    `eval_rewards` score evaluations.
    """
    pad_id = int(policy.tokenizer.pad_token_id)
    policy_options = component_options.policy_options(config, prompt_maker.max_context)
    forward_options = component_options.forward_options(config, pad_id=pad_id, aux_loss=policy.aux_loss_coef != 0.0)
    forward_options = execution.layout_report.options(forward_options)
    engine, vllm_policy = execution.engine_choice.engine, execution.vllm_policy
    if zero_stage(config) == 3:
        from groupgrad.integrations.sharding import zero3

        image = zero3.image_of_every_pass(policy.model, execution.example, policy.aux_loss_coef)
        forward_options = replace(forward_options, image_example=image)
    scorer = OldAndRefScorer(policy.model, policy.reference, forward_options, config.device)
    sampling = sampling_options(config, eos_ids=policy.eos_ids, pad_id=pad_id)
    if rollout_components.program is None:
        for name in changed(config, ("agent_timeout_s", "agent_sampling")):
            warnings.warn(f"{name}={getattr(config, name)!r} has no effect: there is no agent")
    rollouts = rollout_components.source(
        engine,
        prompt_maker,
        sampling,
        component_options.agent_options(config),
        program_options=component_options.program_options(config),
        seed=config.seed,
        trainer=trainer,
    )
    if isinstance(rollouts, SingleTurnRollouts) and find_estimator(config.advantage_estimator).uses_turns:
        logger.warning(
            "advantage_estimator=%r credits turns, but every completion is one turn: there are no tools, no "
            "environment_factory and no rollout_func",
            config.advantage_estimator,
        )
    num_given = len(rollout_components.reward_names)
    scoring = component_options.scoring_options(config, len(rewards.names) - num_given, num_given)
    rewards.weights = scoring.reward_weights
    end_ids = (*sampling.eos_ids, *(() if rollout_components.chat is None else rollout_components.chat.end_ids))
    rewards.texts = trainer.eval_rewards.texts = CompletionTexts(policy.tokenizer, frozenset(end_ids))
    prefetcher, around = None, nullcontext
    if vllm_policy is not None:
        ahead, in_flight = config.rollout_ahead, config.vllm_in_flight_updates
        prefetcher = RolloutPrefetcher(rollouts, timings, vllm_policy, ahead=ahead, in_flight=in_flight)
    elif uses_deepspeed(config) or uses_fsdp(config):
        around = partial(gather_all, policy.model)
    dynamic = (
        component_options.dynamic_sampling(config, trainer.train_dataset) if config.dynamic_sampling_rounds else None
    )
    collector = ExperienceCollector(
        *(rollouts, rewards, scoring, timings, prefetcher),
        score_rollouts=trainer.score_rollouts,
        compute_advantages=trainer.compute_advantages,
        around=around,
        dynamic=dynamic,
    )
    scored = collector if trainer.eval_rewards is rewards else collector.with_rewards(trainer.eval_rewards)
    evaluator = _evaluator(config, policy, policy_options, forward_options, scored)
    in_training = replace(forward_options, rank_group=execution.rank_group)
    return TrainerComponents(policy_options, in_training, scoring, sampling, scorer, collector, evaluator)


def _evaluator(
    config: GRPOConfig,
    policy: PolicyBundle,
    policy_options: PolicyOptions,
    forward_options: ForwardOptions,
    collector: ExperienceCollector,
) -> Evaluator:
    """Measures at the temperature at which evaluation samples. ValueError for a user's function, which samples itself,
    beside `eval_sampling`."""
    changes = eval_sampling_changes(config)
    if changes and isinstance(collector.rollouts, CustomRollouts):
        raise ValueError(
            f"eval_sampling={config.eval_sampling!r} with a rollout_func, which samples by itself; leave all but "
            "num_generations out"
        )
    options = replace(forward_options, temperature=changes.get("temperature", forward_options.temperature))
    return Evaluator(
        model=policy.model,
        collector=collector,
        scorer=OldAndRefScorer(policy.model, policy.reference, options, config.device),
        policy_options=policy_options,
        forward_options=options,
        num_generations=config.num_generations_eval_resolved,
        aux_loss_coef=policy.aux_loss_coef,
        device=config.device,
        sampling=changes,
        by=config.eval_by,
    )


def sampler_logprobs(
    components: TrainerComponents, model: nn.Module, rounding: Rounding, vllm_policy: Engine | None
) -> SamplerLogprobs:
    """The reader of the engine's numbers; vLLM samples from weights of its own."""
    rollouts, correction = components.collector.rollouts, components.policy_options.mismatch
    return SamplerLogprobs(rollouts, model, rounding, correction, samples_policy=vllm_policy is None)


def _load_model(model: Any, config: GRPOConfig, quantization_config: Any) -> nn.Module:
    if isinstance(model, str):
        return load.load_policy(
            model,
            mapping(config.model_init_kwargs),
            trust_remote_code=config.trust_remote_code,
            quantization_config=quantization_config,
            on_device=not uses_deepspeed(config) and not uses_fsdp(config),
        )
    if not isinstance(model, (PreTrainedModel, nn.Module)):
        raise TypeError(
            f"model is a {type(model).__name__}; it must be a model id, a directory, a PreTrainedModel or a PeftModel"
        )
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnavailableError(
            f"{type(model).__name__} is an encoder-decoder; groupgrad trains decoder-only language models"
        )
    for name, value in (
        ("model_init_kwargs", config.model_init_kwargs),
        ("quantization_config", quantization_config),
    ):
        if value:
            warnings.warn(f"{name} has no effect: the model is already loaded, it is used as it is")
    return model


def _load_processing_class(model: Any, config: GRPOConfig, processing_class: Any) -> tuple[Any, Any]:
    if processing_class is None:
        name = model_source(model)
        if not name:
            raise ValueError(
                "processing_class is None and the model has no name to load a tokenizer by; pass the tokenizer as "
                "processing_class"
            )
        processing_class = load.load_tokenizer(
            model,
            name,
            revision=mapping(config.model_init_kwargs).get("revision"),
            trust_remote_code=config.trust_remote_code,
            gguf_file=mapping(config.model_init_kwargs).get("gguf_file"),
        )
    return processing_class, load.inner_tokenizer(processing_class)
