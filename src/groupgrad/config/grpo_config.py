# ruff: noqa: RUF009 - _option makes dataclass fields
"""`GRPOConfig`: every setting of a run in one flat record.

Fields hold what the user said and are never filled in with values derived from other fields, so that a copy
(`dataclasses.replace`, `GRPOConfig(**config.to_dict())`, `copy`, `pickle`) is equal to the original and can change any
one of them. What follows from them is in the read-only properties at the end.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from groupgrad import compat
from groupgrad.config import field_rules as values
from groupgrad.config import legacy, rules
from groupgrad.errors import ConfigError

CISPO_CEILING = 5.0
"""Ceiling of the importance weight that `loss_type="cispo"` uses without `epsilon_high` (arXiv:2510.13786)."""


def _option(default: Any, help: str, **kwargs: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help}, **kwargs)


@dataclass(repr=False)
class GRPOConfig(legacy.LegacyArguments):
    """All settings of a GRPO run: those of `transformers.TrainingArguments` and the ones below.

    Defaults that differ from `TrainingArguments`: `learning_rate` 1e-6, `logging_steps` 10, `gradient_checkpointing`
    (on, but on a CPU only where memory needs it), `remove_unused_columns` False, and `bf16`, which is on unless `fp16`
    is, wherever an accelerator computes in it; on a CPU it stays off unless asked for. Raises ConfigError, a
    ValueError, that lists every setting that cannot work. Settings that have no effect beside the others are named in
    one UserWarning.
    """

    # --- Defaults that differ from TrainingArguments ---
    learning_rate: float = _option(1e-6, "Peak learning rate of the optimizer.")
    logging_steps: float = _option(10, "Optimizer steps between two logs; a value below 1 is a share of all steps.")
    gradient_checkpointing: bool | None = _option(
        None,
        "Recompute activations in the backward pass instead of keeping them: less memory, a third slower. Unset: yes "
        "on accelerators; on a CPU for micro-batches whose activations would not fit.",
    )
    bf16: bool | None = _option(
        None, "Compute in bfloat16 mixed precision. Unset: yes, unless fp16 is set or no accelerator computes in it."
    )
    remove_unused_columns: bool | None = _option(
        False, "Keep only the prompt, image and environment columns; reward functions then see no others."
    )
    # A token is no part of what a config says: to_dict and repr hide it, and copies compare equal without it.
    hub_token: str | None = _option(
        None, "Access token for the hub; unset: the one stored by `hf auth login`.", compare=False
    )

    # --- Model ---
    model_init_kwargs: dict | str | None = _option(
        None, "Keyword arguments for from_pretrained, used when the model is given by name; dict or JSON text."
    )
    trust_remote_code: bool = _option(False, "Run model and tokenizer code that comes with a checkpoint.")
    router_aux_loss_coef: float | None = _option(
        None, "Weight of the load-balancing loss of mixture-of-experts models; unset: the model's own, 0 turns it off."
    )
    disable_dropout: bool = _option(False, "Set every dropout probability of policy and reference to 0.")
    cast_lm_head_to_fp32: bool = _option(False, "Keep the output head in float32 and multiply in float32.")
    stochastic_rounding: bool = _option(
        False,
        "For weights loaded in bfloat16: AdamW whose updates are rounded at random, so that small ones are not lost; "
        "saves the memory of float32 weights.",
    )

    # --- Reference model ---
    beta: float = _option(0.0, "Weight of the KL divergence from the reference model; 0: no reference model is kept.")
    sync_ref_model: bool = _option(False, "Move the reference model towards the policy from time to time.")
    ref_model_mixup_alpha: float = _option(0.6, "Share of the policy in the reference at each move, 0 to 1.")
    ref_model_sync_steps: int = _option(512, "Optimizer steps between two moves of the reference.")

    # --- Data and groups ---
    num_generations: int | None = _option(8, "Completions sampled for each prompt, the group size G; at least 2.")
    num_generations_eval: int | None = _option(None, "Group size in evaluation; unset: num_generations.")
    max_completion_length: int | None = _option(256, "Most tokens that a completion may have.")
    shuffle_dataset: bool | None = _option(True, "Draw training prompts in random order, by `seed`.")
    pad_to_multiple_of: int | str | None = _option(
        None, "Accepted for older scripts: nothing is padded here. 'auto', a number or unset."
    )
    ds3_gather_for_generation: bool = _option(True, "DeepSpeed ZeRO-3: gather the weights to sample.")

    # --- Generation ---
    rollout_engine: str = _option(
        "auto",
        "What samples completions: 'native', 'transformers' (generate), or 'auto': native where the model and "
        "generation_kwargs allow it, and otherwise generate, with a warning that says why.",
    )
    engine_kv_memory: str | None = _option(
        None,
        "Memory for keys and values of the native engine, such as '4GiB'; rows wait when it is full. Unset: by what is "
        "free.",
    )
    engine_pack_weights: bool = _option(
        False,
        "Native engine on a CPU in float32, where groupgrad's kernels cannot be compiled: copy layers' "
        "weights into the library's own order for each round of sampling; faster, at the cost of that memory while "
        "sampling. The kernels read the weights as they lie.",
    )
    generation_batch_size: int | None = _option(
        None, "Completions sampled in one round, over all processes; excludes steps_per_generation."
    )
    steps_per_generation: int | None = _option(
        None, "Micro-batches sampled in one round; unset: gradient_accumulation_steps."
    )
    temperature: float = _option(1.0, "Sampling temperature, above 0; scores are computed at the same one.")
    top_p: float = _option(1.0, "Sample from the most likely tokens that make up this probability; 1: from all.")
    top_k: int | None = _option(None, "Sample from this many most likely tokens; unset or 0: from all.")
    min_p: float | None = _option(None, "Leave out tokens less likely than this share of the most likely one, 0 to 1.")
    repetition_penalty: float = _option(1.0, "Above 1: make tokens that came before less likely; below 1: more.")
    generation_kwargs: dict | str | None = _option(
        None,
        "Further options of the sampler, which override the ones above; dict or JSON text. One that the native engine "
        "lacks is an error with rollout_engine='native'; with 'auto' a warning names it, and generate samples.",
    )
    chat_template_kwargs: dict | str | None = _option(
        None, "Arguments for every rendering of the chat template; dict or JSON text."
    )
    cache_implementation: str | None = _option(None, "Kind of key-value cache of the transformers engine.")
    use_transformers_continuous_batching: bool = _option(False, "Sample with transformers' continuous batching.")
    transformers_continuous_batching_config: dict | str | None = _option(
        None, "Options of continuous batching; dict or JSON text."
    )
    max_tool_calling_iterations: int | None = _option(
        None, "Most rounds of tool calls in a completion; unset: no limit."
    )
    tool_timeout_s: float = _option(
        60.0, "Seconds that a tool call, an environment's reset or its reward may take; then the model is told so."
    )
    tool_max_result_chars: int = _option(
        20_000, "Longest tool result in characters; longer ones are cut, which they say."
    )
    tool_threads: int = _option(64, "Tools and environments that run at once, but for async ones.")

    # --- vLLM ---
    use_vllm: bool = _option(False, "Sample with vLLM.")
    vllm_mode: str = _option("colocate", "Where vLLM runs: 'colocate' (in this process) or 'server'.")
    vllm_model_impl: str = _option("vllm", "Whose model code vLLM runs: 'vllm' or 'transformers'.")
    vllm_enable_sleep_mode: bool = _option(False, "Colocate: free vLLM's memory while training.")
    vllm_structured_outputs_regex: str | None = _option(None, "Regular expression that every completion must match.")
    vllm_server_base_url: str | None = _option(None, "Server: its address; host and port are then not used.")
    vllm_server_host: str = _option("0.0.0.0", "Server: its host.")
    vllm_server_port: int = _option(8000, "Server: its port.")
    vllm_server_timeout: float = _option(240.0, "Server: seconds for each wait: to be up, for a push, for a token.")
    vllm_group_port: int = _option(51216, "Server: port at which trainer and server meet to transfer weights.")
    vllm_gpu_memory_utilization: float = _option(0.3, "Colocate: share of the accelerator's memory for vLLM, 0 to 1.")
    vllm_max_model_length: int | None = _option(None, "Colocate: longest prompt and completion together, in tokens.")
    vllm_tensor_parallel_size: int = _option(1, "Colocate: accelerators that share one copy of the model.")
    vllm_lora_updates: str = _option(
        "auto",
        "How a LoRA adapter reaches vLLM: 'adapter' (alone), 'merge' (all weights, the adapter merged into a copy), or "
        "'auto': alone where vLLM loads it, and otherwise merged.",
    )
    rollout_ahead: int = _option(
        0, "Server: rounds that are sampled while earlier ones train, from weights that are as many rounds old."
    )

    # --- Objective ---
    loss_type: str = _option("dapo", "grpo, dapo, dr_grpo, bnpo, cispo, sapo, luspo or vespo.")
    importance_sampling_level: str = _option("token", "Ratio of policies for each 'token' or for the 'sequence'.")
    num_iterations: int = _option(1, "Times that each sampled round is trained on.")
    epsilon: float = _option(0.2, "Lower clip width: the ratio's trust region begins at 1 - epsilon.")
    epsilon_high: float | None = _option(
        None, "Upper clip width; unset: epsilon. For cispo the ceiling of the weight itself; unset: 5.0."
    )
    delta: float | None = _option(None, "Ceiling of the ratio on the unclipped side, above 1; unset: none.")
    sapo_temperature_neg: float = _option(1.05, "sapo: temperature of the gate where the advantage is not positive.")
    sapo_temperature_pos: float = _option(1.0, "sapo: temperature of the gate where the advantage is positive.")
    vespo_k_pos: float = _option(2.0, "vespo: power of the weight where the advantage is not negative.")
    vespo_lambda_pos: float = _option(3.0, "vespo: decay of the weight where the advantage is not negative.")
    vespo_k_neg: float = _option(3.0, "vespo: power of the weight where the advantage is negative.")
    vespo_lambda_neg: float = _option(2.0, "vespo: decay of the weight where the advantage is negative.")
    mask_truncated_completions: bool = _option(False, "Leave completions that were cut off out of the loss.")
    top_entropy_quantile: float = _option(1.0, "Share of tokens, by entropy, that the policy term trains; 1: all.")
    use_bias_correction_kl: bool = _option(False, "Weigh the KL estimate by the policy ratio, which makes it unbiased.")
    off_policy_mask_threshold: float | None = _option(
        None, "Leave out completions of negative advantage that drifted further than this (nats a token)."
    )
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus; the first value if it is adaptive.")
    use_adaptive_entropy: bool = _option(False, "Steer entropy_coef so that entropy stays near entropy_target.")
    entropy_coef_min: float = _option(0.0, "Adaptive: smallest entropy_coef.")
    entropy_coef_max: float = _option(1.0, "Adaptive: largest entropy_coef.")
    entropy_coef_delta: float = _option(0.005, "Adaptive: change of entropy_coef in one optimizer step.")
    entropy_target: float = _option(0.2, "Adaptive: entropy to hold, in nats a token.")

    # --- Rewards ---
    reward_weights: list[float] | None = _option(None, "One weight for each reward function; unset: 1 each.")
    scale_rewards: str = _option(
        "group", "Divide advantages by the reward's deviation in the 'group', 'batch', or 'none'."
    )
    multi_objective_aggregation: str = _option(
        "sum_then_normalize", "Several rewards: 'sum_then_normalize', or 'normalize_then_sum' (each by itself first)."
    )

    reward_model_init_kwargs: dict | str | None = _option(
        None,
        "Keyword arguments for loading reward models given by name (dtype, revision, device_map, ...); dict or JSON "
        "text. Of model_init_kwargs they share only how files are fetched (token, cache_dir). Unset: as saved.",
    )
    reward_model_device: str | None = _option(
        None, "Device of reward models, such as 'cpu' or 'cuda:1'; unset: the training device."
    )
    reward_model_batch_tokens: int = _option(
        16_384, "Most tokens, padding included, that a reward model reads in one forward pass."
    )
    reward_model_offload: bool = _option(
        False, "Keep reward models in host memory and bring them to their device for each round of scoring."
    )

    # --- Correction of the difference between vLLM and the trainer ---
    vllm_importance_sampling_correction: bool = _option(True, "Correct for it by importance sampling.")
    vllm_importance_sampling_mode: str = _option(
        "sequence_mask", "token_truncate, token_mask, sequence_truncate or sequence_mask."
    )
    vllm_importance_sampling_clip_max: float | None = _option(3.0, "Upper bound of the correction; unset: none.")
    vllm_importance_sampling_clip_min: float | None = _option(None, "Lower bound of the correction; unset: none.")

    # --- Logging ---
    log_completions: bool = _option(False, "Print and store sampled completions, and send them to the trackers.")
    log_multimodal: bool = _option(True, "Include images in the trackers' table of completions.")
    num_completions_to_print: int | None = _option(None, "Rows to print; unset: all of them.")
    log_unique_prompts: bool = _option(False, "Keep one completion for each prompt in the trackers' table.")
    log_completions_hub_repo: str | None = _option(None, "Data set on the hub that receives the stored completions.")

    def __post_init__(self) -> None:
        self._parse_dicts()
        legacy.take_over(self)
        self._normalise()
        # The base class overwrites one of the two, so this rule comes before it.
        early = rules.checkpointing_options(self)
        by_need = self.gradient_checkpointing is None
        try:
            super().__post_init__()
            failure = None
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            failure = error
        if failure is None and by_need:
            self._set_checkpointing(None if self.device.type == "cpu" else True)
        problems = ([early] if early else []) + rules.problems(self)
        if problems or isinstance(failure, ValueError):
            raise ConfigError(problems + ([str(failure)] if failure else [])) from failure
        if failure is not None:
            raise failure
        for text in rules.warnings_for(self):
            warnings.warn(text, UserWarning, stacklevel=3)

    def _parse_dicts(self) -> None:
        """Turn JSON text into dicts; what is no JSON object stays as it is, for the rules to report."""
        for name in rules.DICT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError:
                    continue
            if isinstance(value, dict):
                # A copy: the caller's dict stays the caller's. A dtype object becomes its name, as in to_dict.
                value = {k: str(v).split(".")[-1] if isinstance(v, torch.dtype) else v for k, v in value.items()}
                setattr(self, name, value)

    def _normalise(self) -> None:
        """Give settings that have several spellings one of them."""
        if isinstance(self.scale_rewards, bool) or str(self.scale_rewards).lower() in ("true", "false"):
            self.scale_rewards = "group" if str(self.scale_rewards).lower() == "true" else "none"
        if isinstance(self.pad_to_multiple_of, str):
            text = self.pad_to_multiple_of.strip().lower()
            self.pad_to_multiple_of = None if text in ("none", "null") else int(text) if text.isdigit() else text
        if self.report_to is None:
            self.report_to = "none"
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and compat.has_bf16_accelerator()
        if self.hub_token == "<HUB_TOKEN>":
            self.hub_token = None
        self._join_checkpointing()

    def _join_checkpointing(self) -> None:
        """Give `gradient_checkpointing` and the later name, where transformers has it, one value.

        Every config carries both names, so a copy that changes one of them comes here with two values: off wins.
        """
        if not hasattr(self, "activation_checkpointing"):
            return
        if self.activation_checkpointing_kwargs is None:
            self.activation_checkpointing_kwargs = self.gradient_checkpointing_kwargs
        old, new = self.gradient_checkpointing, self.activation_checkpointing
        if old is not None and new is not None and old != new:
            warnings.warn(
                f"gradient_checkpointing={old} and activation_checkpointing={new} are one setting with two names; "
                f"it is off, because one of them says so. Set both to True to turn it on",
                stacklevel=5,
            )
        given = [x for x in (old, new) if x is not None]
        self._set_checkpointing(all(given) if given else None)

    def _set_checkpointing(self, value: bool | None) -> None:
        self.gradient_checkpointing = value
        if hasattr(self, "activation_checkpointing"):
            self.activation_checkpointing = value

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: all but the token, because every saved model has its settings beside it."""
        return {**self.__dict__, "hub_token": None}

    def __copy__(self) -> GRPOConfig:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> GRPOConfig:
        made = object.__new__(type(self))
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data, from which `GRPOConfig(**data)` makes an equal config; tokens are left out."""
        plain = copy.copy(self)
        # The base class writes into nested dicts.
        plain.model_init_kwargs = copy.copy(self.model_init_kwargs)
        plain.reward_model_init_kwargs = copy.copy(self.reward_model_init_kwargs)
        data = super(GRPOConfig, plain).to_dict()
        for name, value in data.items():
            if name.endswith("_token") and getattr(self, name) is None:
                data[name] = None
            elif isinstance(value, (list, dict)):
                data[name] = copy.copy(value)
        return data

    @property
    def num_generations_eval_resolved(self) -> int:
        """Group size in evaluation."""
        return self.num_generations_eval or self.num_generations or 0

    @property
    def micro_batch_rows(self) -> int:
        """Completions in one micro-batch over all processes."""
        return self.per_device_train_batch_size * rules.world_size(self)

    @property
    def steps_per_generation_resolved(self) -> int:
        """Micro-batches (S) that one generation round gives each process."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.micro_batch_rows
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def generation_batch_size_resolved(self) -> int:
        """Completions of one generation round over all processes."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size
        return self.micro_batch_rows * self.steps_per_generation_resolved

    @property
    def epsilon_high_resolved(self) -> float:
        """Upper clip width; for cispo the ceiling of the importance weight."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_CEILING if self.loss_type == "cispo" else self.epsilon

    @property
    def sampling_resolved(self) -> dict[str, Any]:
        """`temperature`, `top_p`, `top_k` (None: off), `min_p` and `repetition_penalty` as `generation_kwargs` leaves
        them."""
        given = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        chosen = {name: given.get(name, getattr(self, name)) for name in rules.SAMPLING_FIELDS}
        chosen["top_k"] = chosen["top_k"] or None
        return chosen

    @property
    def engine_kv_memory_resolved(self) -> int | None:
        """Bytes of keys and values that sampling may keep; None: by what is free."""
        return None if self.engine_kv_memory is None else values.parse_bytes(self.engine_kv_memory)

    @property
    def temperature_resolved(self) -> float:
        """Temperature of sampling, at which policy and reference are scored too."""
        return self.sampling_resolved["temperature"]

    @property
    def generation_kwargs_resolved(self) -> dict[str, Any]:
        """Sampler options beyond `sampling_resolved`."""
        given = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        return {key: value for key, value in given.items() if key not in rules.SAMPLING_FIELDS}
