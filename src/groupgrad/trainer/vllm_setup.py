"""vLLM in a training run: started or found, checked against the run, and what of it the configuration decides."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from groupgrad import compat, dist
from groupgrad.config import GRPOConfig
from groupgrad.config.launcher import uses_deepspeed, zero_stage
from groupgrad.config.sampling import sampling_options, vllm_fields
from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.vllm.client import VLLMServerEngine
from groupgrad.engines.vllm.colocate import VLLMColocateEngine
from groupgrad.engines.vllm.colocate_start import ColocateOptions
from groupgrad.engines.vllm.http import Address
from groupgrad.engines.vllm.memory_check import TrainingBytes, check_memory
from groupgrad.engines.vllm.vllm_params import PROCESSED, logprobs_mode
from groupgrad.engines.vllm.vllm_policy import VLLMPolicy
from groupgrad.modeling.adapters import is_adapted
from groupgrad.modeling.scoring.forward import unwrap
from groupgrad.modeling.systems.checkpointing import activation_bytes_per_token
from groupgrad.modeling.weights import adapter_obstacle, adapter_rank
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.trainer import options
from groupgrad.trainer.build import PolicyBundle

logger = logging.getLogger(__name__)

MOST_ROWS = 256
"""Rows that vLLM samples at the same time at most; further ones wait."""


def serve_policy(
    config: GRPOConfig, model: nn.Module, parts: PolicyBundle, rollout_components: RolloutComponents
) -> VLLMPolicy:
    """Collective. vLLM as the configuration asks for it, ready for its first weights.

    Raises ImportError without vLLM, TimeoutError for a server that does not come up in time, and ValueError, with both
    sides' story, for one that serves something else and for what vLLM cannot do.
    """
    if rollout_components.function is not None and config.rollout_ahead:
        raise ValueError(
            f"rollout_ahead={config.rollout_ahead} with a rollout_func, which uses the trainer while it trains; set "
            "rollout_ahead=0"
        )
    sampling = sampling_options(config, eos_ids=parts.eos_ids, pad_id=int(parts.tokenizer.pad_token_id))
    for problem in compat.unsupported_versions(["vllm"]):
        warnings.warn(problem)
    served: VLLMPolicy | None = None
    with dist.errors_on_all_ranks():
        make = _server if config.vllm_mode == "server" else _colocate
        served = make(config, model, parts.tokenizer, sampling)
    assert served is not None
    return served


def longest_context(served: VLLMPolicy) -> int:
    """Tokens that vLLM has room for, prompt and completion together."""
    engine = served.engine
    return int(engine.info["max_model_len"] if isinstance(engine, VLLMServerEngine) else engine.max_model_len)


def _server(config: GRPOConfig, model: nn.Module, tokenizer: Any, sampling: SamplingOptions) -> VLLMPolicy:
    address = Address.of(config.vllm_server_base_url, config.vllm_server_host, config.vllm_server_port)
    engine = VLLMServerEngine(
        address,
        timeout_s=config.vllm_server_timeout,
        regex=config.vllm_structured_outputs_regex,
        pushes=dist.is_main(),
        group_port=config.vllm_group_port,
    )
    engine.connect(model, num_tokens=sampling.max_new_tokens + 1, options=sampling)
    told = str(engine.info.get("logprobs_mode", PROCESSED))
    wanted = logprobs_mode(vllm_fields(config))
    if config.vllm_importance_sampling_correction and wanted is not None and not engine.plain_logprobs(sampling):
        raise ValueError(
            f"the vLLM server {address} tells log-probs as {told}, which are not those of the distribution that is "
            f"trained, given how tokens are drawn; start it with --logprobs-mode {wanted}, or set "
            "vllm_importance_sampling_correction=False"
        )
    largest = int(engine.info.get("max_lora_rank") or 0)
    place = f"the vLLM server {address} " + (f"takes ranks up to {largest}" if largest else "has no --enable-lora")
    return VLLMPolicy(
        engine,
        model,
        sends_adapter=_sends_adapter(config, model, largest, place),
        tells_logprobs=engine.plain_logprobs(sampling),
    )


def _colocate(config: GRPOConfig, model: nn.Module, tokenizer: Any, sampling: SamplingOptions) -> VLLMPolicy:
    sends_adapter = _sends_adapter(config, model, None, "")
    rows = config.per_device_train_batch_size * config.steps_per_generation_resolved
    chosen = ColocateOptions(
        max_num_seqs=min(MOST_ROWS, max(rows, config.per_device_eval_batch_size)),
        max_model_len=config.vllm_max_model_length,
        memory_utilization=config.vllm_gpu_memory_utilization,
        dtype=computing_dtype(config, model),
        model_impl=config.vllm_model_impl,
        sleep_mode=config.vllm_enable_sleep_mode,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        max_lora_rank=adapter_rank(model) if sends_adapter else 0,
        regex=config.vllm_structured_outputs_regex,
        logprobs_mode=logprobs_mode(vllm_fields(config)) or PROCESSED,
        trust_remote_code=config.trust_remote_code,
    )
    check_memory(model, chosen, training=training_bytes(config, model))
    engine = VLLMColocateEngine(model, tokenizer, chosen)
    try:
        engine.check(sampling, num_tokens=sampling.max_new_tokens + 1)
    except ValueError:
        engine.close()
        raise
    return VLLMPolicy(engine, model, sends_adapter=sends_adapter, tells_logprobs=engine.plain_logprobs(sampling))


def training_bytes(config: GRPOConfig, model: nn.Module) -> TrainingBytes:
    """What training takes of the device at least, as far as it is known before the first step.

    Activations are those of the longest completions of one micro-batch, measured on random tokens, or what gradient
    checkpointing leaves of them where it may be used.
    """
    tokens = config.per_device_train_batch_size * int(config.max_completion_length or 0)
    if config.gradient_checkpointing is False:
        pad = getattr(unwrap(model), "config", None)
        forward = options.forward_options(config, pad_id=int(getattr(pad, "pad_token_id", 0) or 0), aux_loss=False)
        per_token = activation_bytes_per_token(model, forward)
    else:
        inner: Any = unwrap(model)
        text = inner.config.get_text_config() if hasattr(inner.config, "get_text_config") else inner.config
        itemsize = getattr(torch, computing_dtype(config, model)).itemsize
        per_token = itemsize * text.hidden_size * (text.num_hidden_layers + 1)
    reference = 0
    if config.beta != 0 and not is_adapted(unwrap(model)):
        reference = sum(parameter.nbytes for parameter in model.parameters())
    return TrainingBytes.of(
        model,
        activations=int(tokens * per_token),
        further=reference,
        states=_optimizer_states(config),
        whole_gradients=_keeps_gradients(config),
    )


def _optimizer_states(config: GRPOConfig) -> int:
    """Numbers that the optimizer keeps beside each weight that is trained; 0 where they may be fewer, smaller, or
    spread over ranks."""
    optimizer = getattr(config.optim, "value", config.optim)
    return 2 if optimizer in ("adamw_torch", "adamw_torch_fused") and not uses_deepspeed(config) else 0


def _keeps_gradients(config: GRPOConfig) -> bool:
    """False where ZeRO spreads gradients over ranks, or may do so."""
    return not uses_deepspeed(config) or zero_stage(config) in (0, 1)


def computing_dtype(config: GRPOConfig, model: nn.Module) -> str:
    """The type that training computes in, so that vLLM rounds as it does."""
    if config.bf16:
        return "bfloat16"
    if config.fp16:
        return "float16"
    types = [parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point]
    most = max(set(types), key=types.count, default=torch.float32)
    return str(most).removeprefix("torch.")


def _sends_adapter(config: GRPOConfig, model: nn.Module, largest_rank: int | None, place: str) -> bool:
    """Whether an adapter is sent alone. ValueError if it must be and cannot."""
    if not is_adapted(unwrap(model)):
        if config.vllm_lora_updates == "adapter":
            raise ValueError("vllm_lora_updates='adapter', but the model has no adapter; set it to 'auto'")
        return False
    if config.vllm_lora_updates == "merge":
        return False
    reason = adapter_obstacle(model)
    if reason is None and largest_rank is not None and adapter_rank(model) > largest_rank:
        reason = f"it has rank {adapter_rank(model)}, and {place}"
    if reason is None:
        return True
    if config.vllm_lora_updates == "adapter":
        raise ValueError(f"vllm_lora_updates='adapter', but the adapter cannot be sent alone: {reason}; set 'auto'")
    logger.info("the adapter is merged into the weights that vLLM gets, in a copy: %s", reason)
    return False
