# ruff: noqa: RUF009 - _option makes dataclass fields
"""The fields of a configuration and the values derived from them.

Fields hold what the user set. They are never filled in with values derived from other fields, so that a copy
(`dataclasses.replace`, `GRPOConfig(**config.to_dict())`, `copy`, `pickle`) equals the original and can change any one
of them. Derived values are read-only properties.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from groupgrad.byte_sizes import parse_bytes
from groupgrad.config.field_rules import CHOICES, failure_action
from groupgrad.config.legacy import LegacyArguments
from groupgrad.objectives import ESTIMATORS, LOSSES, MASKS, described_settings
from groupgrad.rewards.function_calls import FailureAction

CISPO_CEILING = 5.0
"""Ceiling of the importance weight that `loss_type="cispo"` uses without `epsilon_high` (arXiv:2510.13786)."""

SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that `generation_kwargs` may override."""


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help}, **kwargs)


def _choices(name: str) -> str:
    *first, last = CHOICES[name]
    return f"{', '.join(first)} or {last}"


def mapping(value: Any) -> dict[str, Any]:
    """Copies a dict-valued field; an empty dict for None."""
    return dict(value or {})


@dataclass(repr=False)
class GRPOSettings(LegacyArguments):
    """All fields of a GRPO run: those of `transformers.TrainingArguments` and the ones below. Nothing is checked."""

    # --- Defaults that differ from TrainingArguments ---
    learning_rate: float = _option(1e-6, "Peak learning rate of the optimizer.")
    logging_steps: float = _option(10, "Optimizer steps between two logs; a value below 1 is a share of all steps.")
    gradient_checkpointing: bool | None = _option(
        None,
        "Recompute activations in the backward pass instead of keeping them: less memory, a third slower. Unset: for "
        "micro-batches whose activations would not fit, and always for a model in shards on accelerators.",
    )
    bf16: bool | None = _option(
        None,
        "Compute in bfloat16 mixed precision, on a CPU too. Unset: yes, unless fp16 is set or no accelerator computes "
        "in it.",
    )
    remove_unused_columns: bool | None = _option(
        False, "Keep only the columns that prompts are made of, and those that reward functions or `reset` name."
    )
    # to_dict, repr and comparison leave the token out, so that no copy or log reveals it.
    hub_token: str | None = _option(
        None, "Access token for the hub; unset: the one stored by `hf auth login`.", compare=False
    )

    # --- Model ---
    model_init_kwargs: dict | str | None = _option(
        None, "Keyword arguments for from_pretrained if the model is given by name; dict or JSON text."
    )
    trust_remote_code: bool = _option(False, "Run model and tokenizer code that comes with a checkpoint.")
    router_aux_loss_coef: float | None = _option(
        None, "Weight of a mixture of experts' load-balancing loss, 0 for none; unset: the model's own."
    )
    disable_dropout: bool = _option(False, "Set every dropout probability of policy and reference to 0.")
    cast_lm_head_to_fp32: bool = _option(
        False, "Multiply in float32 in the output head, and keep its weight in float32 unless an embedding shares it."
    )
    stochastic_rounding: bool = _option(
        False,
        "Train bfloat16 weights by an AdamW with stochastic rounding, so that small updates are not lost; needs no "
        "float32 copy of the weights.",
    )
    gradient_dtype: str = _option(
        "auto",
        "Type in which gradients of half-precision weights are summed over micro-batches and ranks: 'float32' (4 bytes "
        "a weight, rounded once), 'weights' (their own type: 2 bytes, but a sum of many micro-batches loses most of "
        "its precision), or 'auto': float32, unless DeepSpeed or an optimizer that steps within the backward pass "
        "keeps the gradients to itself.",
    )

    # --- Saving and resuming ---
    save_in_background: bool = _option(False, "Without effect: training waits until a checkpoint is written.")
    allow_partial_resume: bool = _option(
        False,
        "Resume from a checkpoint with damaged or missing parts (optimizer, scheduler, random streams, rollouts), with "
        "other trained parameters, or with another reference; what starts anew is named. Weights and the step "
        "count must be whole, and the weights and the adapter those of this run's model.",
    )
    resume_learning_rate: bool = _option(
        False, "Resume with this configuration's learning_rate; otherwise the checkpoint's stays in force."
    )

    # --- Reference model ---
    beta: float = _option(0.0, "Weight of the KL divergence from the reference model; 0: no reference model is kept.")
    sync_ref_model: bool = _option(False, "Mix the policy into the reference model every ref_model_sync_steps.")
    ref_model_mixup_alpha: float = _option(0.6, "Share of the policy in the reference at each update, 0 to 1.")
    ref_model_sync_steps: int = _option(512, "Optimizer steps between two updates of the reference.")

    # --- Data and groups ---
    num_generations: int | None = _option(8, "Completions sampled for each prompt, the group size G; at least 2.")
    num_generations_eval: int | None = _option(None, "Group size in evaluation; unset: num_generations.")
    eval_sampling: dict | str | None = _option(
        None,
        "Sampling in evaluation where it differs from training: temperature, top_p, top_k, min_p, "
        "max_completion_length and num_generations; dict or JSON text.",
    )
    eval_k: list[int] | None = _option(
        None,
        "Log pass@k in evaluation, the chance that one of k completions has a reward of 1 or more, for these k; and "
        "maj@k, the chance that the most frequent answer of k is right, where a reward function logs answers.",
    )
    eval_by: str | None = _option(
        None, "Also log the means of an evaluation over the prompts of each value of this column, such as level."
    )
    max_completion_length: int | None = _option(256, "Maximum length of a completion, in tokens.")
    shuffle_dataset: bool | None = _option(True, "Shuffle the training prompts, by data_seed or seed.")
    shuffle_rows: str = _option(
        "rows",
        "Rows that an optimizer step takes of a generation batch which serves several: 'rows' (any of the batch, dealt "
        "by seed) or 'groups' (whole groups: each prompt is computed in one step alone).",
    )
    dynamic_sampling_rounds: int = _option(
        0,
        "Further rounds of sampling in which groups whose rewards are all equal give place to groups of other prompts, "
        "drawn at random by data_seed or seed (DAPO's dynamic sampling); 0: such groups stay and teach nothing.",
    )
    stop_without_signal: int = _option(
        0,
        "End a new run with an error if its first generation batches, this many, have no group whose rewards differ; "
        "0: go on.",
    )
    balance_ranks: bool = _option(
        True,
        "Several ranks give each other rows of a step, after sampling, so that all have about equal work. No result "
        "depends on it. A loss that is defined by its micro-batch, or that a script replaces, keeps its rows.",
    )
    max_tokens_per_pass: int | None = _option(
        None,
        "Tokens of prompts and completions in a training pass with gradients. Larger micro-batches are cut between "
        "groups, and inside a group where computing its prompt again costs under 5 percent. Results do not change. "
        "Unset: 2,048 on a CPU (more in models narrower than 256), where larger passes are no faster; no limit on "
        "accelerators.",
    )
    context_parallel_size: int = _option(
        1,
        "Consecutive processes that train each row together: its tokens are cut over them, and keys and values travel "
        "between them, so that a row may need more memory than one device has. It divides the number of processes. 1: "
        "each process trains rows of its own.",
    )
    pad_to_multiple_of: int | str | None = _option(
        None, "Accepted for older scripts; nothing is padded. 'auto', a number or unset."
    )
    ds3_gather_for_generation: bool = _option(True, "DeepSpeed ZeRO-3: gather the weights to sample.")

    # --- Generation ---
    rollout_engine: str = _option(
        "auto",
        "Engine that samples: 'native', 'transformers' (generate), or 'auto': native if the model and "
        "generation_kwargs allow it, otherwise transformers, with a warning that says why.",
    )
    engine_kv_memory: str | None = _option(
        None, "Native engine: memory for keys and values, such as '4GiB'; rows wait if it is full. Unset: what is free."
    )
    engine_pack_weights: bool = _option(False, "Without effect: the compiled kernels read weights in place.")
    generation_batch_size: int | None = _option(
        None, "Completions of a generation batch, over all processes; excludes steps_per_generation."
    )
    steps_per_generation: int | None = _option(
        None, "Micro-batches of a generation batch on each process; unset: gradient_accumulation_steps."
    )
    temperature: float = _option(1.0, "Sampling temperature, above 0; scores are computed at the same one.")
    top_p: float = _option(1.0, "Sample from the most likely tokens that make up this probability; 1: from all.")
    top_k: int | None = _option(None, "Sample from this many most likely tokens; unset or 0: from all.")
    min_p: float | None = _option(None, "Leave out tokens less likely than this share of the most likely one, 0 to 1.")
    repetition_penalty: float = _option(1.0, "Above 1: make tokens that came before less likely; below 1: more.")
    generation_kwargs: dict | str | None = _option(
        None,
        "Further sampling parameters, which override the ones above; dict or JSON text. One that the native engine "
        "lacks is an error with rollout_engine='native'; 'auto' samples with transformers instead and warns.",
    )
    chat_template_kwargs: dict | str | None = _option(
        None,
        "Arguments for every rendering of the chat template; dict or JSON text. 'continue_final_message': true has "
        "completions continue the assistant's message at the end of a prompt.",
    )
    hang_timeout_s: float | None = _option(
        3600.0,
        "Seconds without a sign of life after which a phase of training counts as hanging: the run ends with an error "
        "that names phase, rank and rows, and the stacks of all threads are in output_dir; None: never.",
    )
    image_root: str | None = _option(
        None,
        "Folder that the paths of images in data and tool results are relative to and may not lead out of; unset: "
        "any path of this machine, relative ones from the working directory.",
    )
    special_tokens_in_prompts: str = _option(
        "auto",
        "Special tokens such as '<|im_end|>' that a prompt's text contains: 'split' encodes them as ordinary text, "
        "'keep' as the tokens; 'auto' splits them in messages and keeps them in text prompts, which may be rendered "
        "conversations. Results of tools are always split.",
    )
    special_tokens_in_completions: bool = _option(
        False,
        "Reward functions get texts with the special tokens of an answer, such as a '<think>' that is one; not with "
        "those that end it.",
    )
    cache_implementation: str | None = _option(None, "Type of key-value cache of the transformers engine.")
    use_transformers_continuous_batching: bool = _option(
        False, "Sample with transformers' continuous batching, over a paged key-value cache; text models alone."
    )
    transformers_continuous_batching_config: dict | str | None = _option(
        None, "Fields of transformers' ContinuousBatchingConfig; dict or JSON text."
    )
    max_tool_calling_iterations: int | None = _option(
        None, "Maximum number of turns with tool calls in a completion; unset: no limit."
    )
    reuse_environments: bool | None = _option(
        None,
        "True: reset and reuse an environment for later rollouts; False: a new one for each rollout, closed after it; "
        "unset: False for environments that have a method close, True for others.",
    )
    tool_timeout_s: float = _option(
        60.0, "Timeout of a tool call and of an environment's reset or reward, in seconds; the model gets an error."
    )
    tool_max_result_chars: int = _option(20_000, "Maximum length of a tool result in characters; the rest is cut.")
    tool_threads: int = _option(64, "Maximum number of synchronous tools and environments that run at once.")
    agent_timeout_s: float = _option(600.0, "Timeout of a rollout whose agent is a program (agent=), in seconds.")
    agent_sampling: str = _option(
        "refuse",
        "What becomes of an agent's request for a temperature or top_p that is not the policy's: 'refuse' answers it "
        "with an error; 'policy' samples as the policy does; 'request' samples and trains at its temperature.",
    )

    # --- vLLM ---
    use_vllm: bool = _option(False, "Sample with vLLM.")
    vllm_mode: str = _option("colocate", "Where vLLM runs: 'colocate' (in this process) or 'server'.")
    vllm_model_impl: str = _option("vllm", "Model code that vLLM runs: 'vllm' or 'transformers'.")
    vllm_enable_sleep_mode: bool = _option(False, "Colocate: free vLLM's memory while training.")
    vllm_sleep_level: int = _option(
        2, "Sleep mode: 2 drops vLLM's weights; 1 keeps them in host memory, so that with adapters only those are sent."
    )
    vllm_structured_outputs_regex: str | None = _option(None, "Regular expression that every completion must match.")
    # The list first: transformers' HfArgumentParser cannot read the other order.
    vllm_server_base_url: list[str] | str | None = _option(
        None, "Server: URL, or a list of the URLs of several, which replaces host and port."
    )
    vllm_server_host: str = _option("0.0.0.0", "Server: host name or address.")
    vllm_server_port: int = _option(8000, "Server: HTTP port.")
    vllm_server_timeout: float = _option(240.0, "Server: seconds to wait for its start, a weight transfer or a token.")
    vllm_group_port: int = _option(51216, "Server: port for the transfer of weights.")
    vllm_gpu_memory_utilization: float = _option(0.3, "Colocate: share of the accelerator's memory for vLLM, 0 to 1.")
    vllm_max_model_length: int | None = _option(None, "Colocate: maximum tokens of prompt and completion together.")
    vllm_tensor_parallel_size: int = _option(1, "Colocate: number of accelerators that share one copy of the model.")
    vllm_lora_updates: str = _option(
        "auto",
        "Transfer of a LoRA adapter to vLLM: 'adapter' (the adapter alone), 'merge' (all weights, merged), or 'auto': "
        "adapter if vLLM can load it, otherwise merge.",
    )
    rollout_ahead: int = _option(0, "Server: generation batches sampled ahead, from weights as many batches old.")
    vllm_in_flight_updates: bool = _option(
        False, "Server, with rollout_ahead of 2 or more: rows under way go on with new weights; a push waits for none."
    )

    # --- Objective ---
    loss_type: str = _option(
        "dapo", f"Surrogate and its reduction: {_choices('loss_type')}, or the path of a module with another."
    )
    loss_settings: dict[str, Any] | str | None = _option(None, f"Settings of the loss: {described_settings(LOSSES)}.")
    importance_sampling_level: str = _option("token", "Level of the policy ratio: 'token' or 'sequence'.")
    num_iterations: int = _option(1, "Number of times that each generation batch is trained on.")
    epsilon: float = _option(0.2, "Lower clip width: the ratio's trust region begins at 1 - epsilon.")
    epsilon_high: float | None = _option(
        None, f"Upper clip width; unset: epsilon. For cispo the ceiling of the weight itself; unset: {CISPO_CEILING}."
    )
    delta: float | None = _option(None, "Ceiling of the ratio on the unclipped side, above 1; unset: none.")
    sapo_temperature_neg: float = _option(1.05, "sapo: temperature of the gate where the advantage is not positive.")
    sapo_temperature_pos: float = _option(1.0, "sapo: temperature of the gate where the advantage is positive.")
    vespo_k_pos: float = _option(2.0, "vespo: power of the weight where the advantage is not negative.")
    vespo_lambda_pos: float = _option(3.0, "vespo: decay of the weight where the advantage is not negative.")
    vespo_k_neg: float = _option(3.0, "vespo: power of the weight where the advantage is negative.")
    vespo_lambda_neg: float = _option(2.0, "vespo: decay of the weight where the advantage is negative.")
    mask_truncated_completions: bool = _option(False, "Leave truncated completions out of the loss.")
    top_entropy_quantile: float = _option(1.0, "Share of tokens, by entropy, that the policy term trains; 1: all.")
    use_bias_correction_kl: bool = _option(False, "Multiply the KL estimate by the policy ratio to make it unbiased.")
    off_policy_mask: str | None = _option(
        None,
        f"Leave out tokens or completions that drifted from the sampler: {_choices('off_policy_mask')}, or the path of "
        "a module with another; unset: none.",
    )
    off_policy_mask_settings: dict[str, Any] | str | None = _option(
        None, f"Settings of off_policy_mask: {described_settings(MASKS)}."
    )
    off_policy_mask_threshold: float | None = _option(
        None, "Leave out completions of negative advantage that drifted further than this (nats a token)."
    )
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus; the first value if it is adaptive.")
    use_adaptive_entropy: bool = _option(False, "Adapt entropy_coef so that entropy stays near entropy_target.")
    entropy_coef_min: float = _option(0.0, "Adaptive: smallest entropy_coef.")
    entropy_coef_max: float = _option(1.0, "Adaptive: largest entropy_coef.")
    entropy_coef_delta: float = _option(0.005, "Adaptive: change of entropy_coef in one optimizer step.")
    entropy_target: float = _option(0.2, "Adaptive: entropy to hold, in nats a token.")

    # --- Rewards ---
    reward_weights: list[float] | None = _option(None, "One weight for each reward function; unset: 1 each.")
    advantage_estimator: str = _option(
        "group",
        f"How rewards become advantages: {_choices('advantage_estimator')}, or the path of a module with another.",
    )
    advantage_settings: dict[str, Any] | str | None = _option(
        None, f"Settings of advantage_estimator: {described_settings(ESTIMATORS)}."
    )
    scale_rewards: str = _option("group", "Divide advantages by the rewards' deviation: 'group', 'batch' or 'none'.")
    multi_objective_aggregation: str = _option(
        "sum_then_normalize", "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (each by itself first)."
    )
    reward_timeout_s: float | None = _option(
        None, "Seconds that one call of a reward function may take; later it counts as failed. Unset: no limit."
    )
    reward_workers: int = _option(
        0,
        "Processes that run the reward functions that are not async, each function in one; a call past its deadline or "
        "one that crashes then costs its process. 0: the training process runs them.",
    )
    reward_worker_memory_gb: float | None = _option(
        None, "Memory of a reward worker in GiB, beyond which allocations fail; unset: no limit."
    )
    reward_retries: int = _option(0, "Further attempts of a reward function after a transient error, after a pause.")
    reward_transient_errors: list[str] | None = _option(
        None,
        "Names of the exceptions of reward functions that count as transient, with their subclasses; unset: "
        "ConnectionError and TimeoutError.",
    )
    on_reward_failure: dict | str | None = _option(
        "error",
        "Result of a reward function's call that raises, passes its deadline or crashes: 'error' (the run ends), "
        "'none' (its rows get no reward from it) or a number, their reward; one for all functions or a dict by name, "
        "also as JSON text.",
    )
    reward_model_init_kwargs: dict | str | None = _option(
        None,
        "Keyword arguments for loading reward models given by name (dtype, revision, device_map, ...); dict or JSON "
        "text. Of model_init_kwargs only download options (token, cache_dir) apply to them too. Unset: as saved.",
    )
    reward_model_device: str | None = _option(
        None, "Device of reward models, such as 'cpu' or 'cuda:1'; unset: the training device."
    )
    reward_model_batch_tokens: int = _option(
        16_384, "Maximum number of tokens, padding included, in a reward model's forward pass."
    )
    reward_model_offload: bool = _option(False, "Keep reward models in host memory while they do not score.")

    # --- Correction of the difference between vLLM and the trainer ---
    vllm_importance_sampling_correction: bool = _option(True, "Correct the difference by importance sampling.")
    vllm_importance_sampling_mode: str = _option(
        "sequence_mask", f"Level and bounding of the ratio: {_choices('vllm_importance_sampling_mode')}."
    )
    vllm_importance_sampling_clip_max: float | None = _option(3.0, "Upper bound of the ratio; unset: none.")
    vllm_importance_sampling_clip_min: float | None = _option(None, "Lower bound of the ratio; unset: none.")

    # --- Logging ---
    log_completions: bool = _option(False, "Print and store sampled completions, and send them to the trackers.")
    log_multimodal: bool = _option(True, "Include images in the trackers' table of completions.")
    num_completions_to_print: int | None = _option(None, "Rows to print; unset: all of them.")
    log_unique_prompts: bool = _option(False, "Keep one completion for each prompt in the trackers' table.")
    log_completions_hub_repo: str | None = _option(
        None, "Data set on the hub that receives the stored completions, while the run goes on."
    )
    rollouts_keep: str | None = _option(
        "1GB",
        "Space for the rollouts in output_dir, such as '1GB'; where all would not fit, a random part of the groups is "
        "kept. '0' or unset: none are stored.",
    )
    record_spans: bool = _option(
        False,
        "Send each step, its rollouts and the run's events as OpenTelemetry spans to the process's tracer provider.",
    )
    record_traces: bool = _option(
        False,
        "Send the rollouts of each step and the run's events as traces to its Trackio run; needs report_to='trackio'.",
    )

    @property
    def world_size(self) -> int:
        """Number of processes that train together, also before the base class has set up its devices."""
        return super().world_size if hasattr(self, "distributed_state") else int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def evaluates(self) -> bool:
        """True if the run evaluates while it trains."""
        return getattr(self.eval_strategy, "value", self.eval_strategy) != "no" or bool(self.eval_on_start)

    @property
    def optimizer_name(self) -> str:
        """`optim` as text."""
        return str(getattr(self.optim, "value", self.optim))

    @property
    def num_generations_eval_resolved(self) -> int:
        """Group size in evaluation: that of `eval_sampling`, else `num_generations_eval`, else `num_generations`."""
        if size := mapping(self.eval_sampling).get("num_generations"):
            return size
        return self.num_generations_eval or self.num_generations or 0

    @property
    def global_micro_batch_size(self) -> int:
        """Number of completions in one micro-batch over all processes."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def steps_per_generation_resolved(self) -> int:
        """Number of micro-batches of each process in one generation batch."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.global_micro_batch_size
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def generation_batch_size_resolved(self) -> int:
        """Number of completions in one generation batch over all processes."""
        return self.generation_batch_size or self.global_micro_batch_size * self.steps_per_generation_resolved

    @property
    def epsilon_high_resolved(self) -> float:
        """Upper clip width: `epsilon_high`, or `epsilon` if unset. For cispo the ceiling of the importance weight,
        `CISPO_CEILING` if unset."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_CEILING if self.loss_type == "cispo" else self.epsilon

    @property
    def engine_kv_memory_resolved(self) -> int | None:
        """`engine_kv_memory` in bytes; None if unset."""
        return None if self.engine_kv_memory is None else parse_bytes(self.engine_kv_memory)

    @property
    def on_reward_failure_resolved(self) -> FailureAction | dict[str, FailureAction]:
        """`on_reward_failure` with numbers as floats and None for 'none'."""
        value = self.on_reward_failure
        if isinstance(value, dict):
            return {str(name): failure_action(item) for name, item in value.items()}
        return failure_action(value)

    @property
    def sampling_resolved(self) -> dict[str, Any]:
        """`temperature`, `top_p`, `top_k` (None: off), `min_p` and `repetition_penalty`, overridden by
        `generation_kwargs`."""
        overrides = mapping(self.generation_kwargs)
        sampling = {name: overrides.get(name, getattr(self, name)) for name in SAMPLING_FIELDS}
        return {**sampling, "top_k": sampling["top_k"] or None}

    @property
    def rollouts_keep_resolved(self) -> int:
        """`rollouts_keep` in bytes; 0 if none are stored."""
        return parse_bytes(self.rollouts_keep) or 0

    @property
    def temperature_resolved(self) -> float:
        """Temperature of sampling and of scoring."""
        return float(self.sampling_resolved["temperature"])

    @property
    def max_new_tokens_resolved(self) -> int:
        """Maximum number of tokens of a completion: `max_completion_length`, overridden by `generation_kwargs`."""
        return int(mapping(self.generation_kwargs).get("max_new_tokens", self.max_completion_length))

    @property
    def generation_kwargs_resolved(self) -> dict[str, Any]:
        """Entries of `generation_kwargs` that are not in `sampling_resolved`."""
        return {key: value for key, value in mapping(self.generation_kwargs).items() if key not in SAMPLING_FIELDS}
