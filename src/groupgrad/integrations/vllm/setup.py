"""Connects a training run to vLLM: starts it or finds its server, checks that it fits, and wraps it as the policy."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import nn

from groupgrad import compat, dist
from groupgrad.config import GRPOConfig
from groupgrad.config.sampling import sampling_options, vllm_fields
from groupgrad.engines.base import SamplingOptions
from groupgrad.integrations.vllm.colocate import VLLMColocateEngine
from groupgrad.integrations.vllm.colocate_start import MAX_NUM_SEQS, ColocateOptions
from groupgrad.integrations.vllm.http import Address
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.vllm_params import PROCESSED, logprobs_mode
from groupgrad.integrations.vllm.vllm_policy import VLLMPolicy
from groupgrad.models.adapters import is_adapted
from groupgrad.models.unwrapping import is_multimodal, unwrap
from groupgrad.models.weights import adapter_obstacle, adapter_rank
from groupgrad.rollout.sources import RolloutComponents
from groupgrad.trainer.build import PolicyBundle

logger = logging.getLogger(__name__)


def serve_policy(config: GRPOConfig, model: nn.Module, bundle: PolicyBundle, rollout: RolloutComponents) -> VLLMPolicy:
    """Collective. vLLM as configured, ready for its first weights.

    ImportError without vLLM, TimeoutError for a server that does not come up in time, and ValueError, with both sides'
    values, for a server that does not fit and for options that vLLM cannot satisfy.
    """
    if rollout.function is not None and config.rollout_ahead:
        raise ValueError(
            f"rollout_ahead={config.rollout_ahead} with a rollout_func, which uses the trainer while it trains; set "
            "rollout_ahead=0"
        )
    if config.vllm_in_flight_updates and is_multimodal(model):
        raise ValueError(
            f"vllm_in_flight_updates=True with {type(unwrap(model)).__name__}, which takes images: vLLM keeps what it "
            "computed of an image with earlier weights; set vllm_in_flight_updates=False"
        )
    sampling = sampling_options(config, eos_ids=bundle.eos_ids, pad_id=int(bundle.tokenizer.pad_token_id))
    for problem in compat.unsupported_versions(["vllm"]):
        warnings.warn(problem)
    policy: VLLMPolicy | None = None
    with dist.errors_on_all_ranks():
        if config.vllm_mode == "server":
            policy = _server_policy(config, model, sampling)
        else:
            compat.require("vllm", 'vllm_mode="colocate"')
            policy = _colocate_policy(config, model, bundle.tokenizer, sampling)
    assert policy is not None
    return policy


def _server_policy(config: GRPOConfig, model: nn.Module, sampling: SamplingOptions) -> VLLMPolicy:
    addresses = Address.all_of(config.vllm_server_base_url, config.vllm_server_host, config.vllm_server_port)
    engine = VLLMServerPool(
        addresses,
        timeout_s=config.vllm_server_timeout,
        regex=config.vllm_structured_outputs_regex,
        pushes=dist.is_main(),
        group_port=config.vllm_group_port,
    )
    place = ", ".join(map(str, addresses))
    engine.connect(model, num_tokens=sampling.max_new_tokens + 1, options=sampling)
    is_plain = engine.plain_logprobs(sampling)
    best_mode = logprobs_mode(vllm_fields(config))
    if config.vllm_importance_sampling_correction and best_mode is not None and not is_plain:
        raise ValueError(
            f"the vLLM server {place} tells log-probs as {engine.logprobs_mode}, which are not those of the "
            f"distribution that is trained, given how tokens are drawn; start it with --logprobs-mode {best_mode}, or "
            "set vllm_importance_sampling_correction=False"
        )
    max_rank = int(engine.info.get("max_lora_rank") or 0)
    limit = f"the vLLM server {place} " + (f"takes ranks up to {max_rank}" if max_rank else "has no --enable-lora")
    sends_adapter = _sends_adapter(config, model, max_rank, limit)
    return VLLMPolicy(engine, model, sends_adapter=sends_adapter, keeps_logprobs=is_plain)


def _colocate_policy(config: GRPOConfig, model: nn.Module, tokenizer: Any, sampling: SamplingOptions) -> VLLMPolicy:
    sends_adapter = _sends_adapter(config, model)
    rows = config.per_device_train_batch_size * config.steps_per_generation_resolved
    colocate_options = ColocateOptions(
        max_num_seqs=min(MAX_NUM_SEQS, max(rows, config.per_device_eval_batch_size)),
        max_model_len=config.vllm_max_model_length,
        memory_utilization=config.vllm_gpu_memory_utilization,
        dtype=compute_dtype(config, model),
        model_impl=config.vllm_model_impl,
        sleep_mode=config.vllm_enable_sleep_mode,
        sleep_level=config.vllm_sleep_level,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        max_lora_rank=adapter_rank(model) if sends_adapter else 0,
        regex=config.vllm_structured_outputs_regex,
        logprobs_mode=logprobs_mode(vllm_fields(config)) or PROCESSED,
        trust_remote_code=config.trust_remote_code,
    )
    engine = VLLMColocateEngine(model, tokenizer, colocate_options)
    try:
        engine.check(sampling, num_tokens=sampling.max_new_tokens + 1)
    except ValueError:
        engine.close()
        raise
    return VLLMPolicy(engine, model, sends_adapter=sends_adapter, keeps_logprobs=engine.plain_logprobs(sampling))


def compute_dtype(config: GRPOConfig, model: nn.Module) -> str:
    """Name of the dtype that training computes in, so that vLLM rounds in the same way."""
    if config.bf16:
        return "bfloat16"
    if config.fp16:
        return "float16"
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point]
    most_common = max(set(dtypes), key=dtypes.count, default=torch.float32)
    return str(most_common).removeprefix("torch.")


def _sends_adapter(config: GRPOConfig, model: nn.Module, max_rank: int | None = None, limit: str = "") -> bool:
    """True if an adapter is sent alone; ValueError if it must be and cannot.

    `max_rank` is the largest rank that vLLM takes (None: any), and `limit` describes it for the message.
    """
    if not is_adapted(unwrap(model)):
        if config.vllm_lora_updates == "adapter":
            raise ValueError("vllm_lora_updates='adapter', but the model has no adapter; set it to 'auto'")
        return False
    if config.vllm_lora_updates == "merge":
        return False
    reason = adapter_obstacle(model)
    if reason is None and config.vllm_in_flight_updates:
        reason = "vllm_in_flight_updates=True, and a row would keep the adapter that it began with"
    if reason is None and max_rank is not None and adapter_rank(model) > max_rank:
        reason = f"it has rank {adapter_rank(model)}, and {limit}"
    if reason is None:
        return True
    if config.vllm_lora_updates == "adapter":
        raise ValueError(f"vllm_lora_updates='adapter', but the adapter cannot be sent alone: {reason}; set 'auto'")
    logger.info("the adapter is merged into the weights that vLLM gets, in a copy: %s", reason)
    return False
