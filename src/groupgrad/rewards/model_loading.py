"""Loads and places reward models and their tokenizers, and rejects those that cannot give one reward a text."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupgrad.models.model_names import missing_because, model_source
from groupgrad.models.shards import loading_unsharded

HUB_KEYS = ("cache_dir", "local_files_only", "proxies", "token")
"""Entries of the policy's `model_init_kwargs` that reward models share: they set how files are downloaded."""

_TOKENIZER_KEYS = ("revision", "subfolder", *HUB_KEYS)


@dataclass(slots=True, frozen=True)
class RewardModelOptions:
    """Loading and execution options of all reward models."""

    device: torch.device | str = "cpu"
    """Ignored for quantized models and for those that a device map has placed."""
    init_kwargs: dict[str, Any] | None = None
    """Keyword arguments of `from_pretrained`; the policy's are not added. Never changed."""
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    batch_tokens: int = 16_384
    """Maximum tokens of a forward pass, padding included; a longer text gets a pass of its own."""
    offload: bool = False
    """Keep the weights in host memory between calls."""
    argument: str = "reward_funcs"
    """The trainer's argument that names the models, for messages."""

    @property
    def trusts(self) -> bool:
        """True if code in a checkpoint may run."""
        return self.trust_remote_code or bool((self.init_kwargs or {}).get("trust_remote_code"))


def hub_kwargs(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Selects the entries of the policy's `init_kwargs` that reward models share (`HUB_KEYS`)."""
    return {key: init_kwargs[key] for key in HUB_KEYS if key in init_kwargs}


def model_name(model: str | nn.Module) -> str:
    """Returns the last path component of a model's source, or the class name of a model without a source."""
    return os.path.basename(model_source(model).replace("\\", "/").rstrip("/")) or type(model).__name__


def load_model(name: str, options: RewardModelOptions) -> nn.Module:
    """Loads a sequence classifier with one label, in the checkpoint's dtype unless `init_kwargs` sets another.

    ValueError if the name leads nowhere, or if the checkpoint has no score head: transformers would initialize a new
    one at random. It refuses a head with several labels itself.
    """
    from transformers import AutoModelForSequenceClassification

    kwargs = dict(options.init_kwargs or {})
    labels = kwargs.pop("num_labels", 1)
    if labels != 1:
        raise ValueError(
            f"reward_model_init_kwargs has num_labels={labels!r}, but a reward is one number a text; take it out"
        )
    kwargs |= {"num_labels": 1, "trust_remote_code": options.trusts, "output_loading_info": True}
    if (why := missing_because(name)) is not None:
        raise ValueError(_not_loaded(name, why, options.argument))
    try:
        with loading_unsharded():
            model, loading_info = AutoModelForSequenceClassification.from_pretrained(name, **kwargs)
    except OSError as error:
        raise OSError(_not_loaded(name, error, options.argument)) from error
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ValueError(
            f"the checkpoint of reward model '{name}' lacks {', '.join(missing[:3])}, so its rewards would be random; "
            "give a sequence-classification model that was trained to score texts"
        )
    return model


def _not_loaded(name: str, why: object, argument: str) -> str:
    return (
        f"{argument} has {name!r}, a text, which stands for a sequence-classification model, and it cannot be "
        f"loaded: {why}; correct the name, or give the function itself"
    )


def load_tokenizer(source: str, name: str, options: RewardModelOptions) -> Any:
    """Loads the tokenizer from the source of a reward model. ValueError if the source is unknown."""
    if not source:
        raise ValueError(
            f"reward model '{name}' does not say where it was loaded from, so that its tokenizer cannot be loaded; "
            "give it in reward_processing_classes"
        )
    from transformers import AutoTokenizer

    kwargs = {key: value for key, value in (options.init_kwargs or {}).items() if key in _TOKENIZER_KEYS}
    return AutoTokenizer.from_pretrained(source, trust_remote_code=options.trusts, **kwargs)


def padding_id(tokenizer: Any, model: nn.Module, name: str) -> int:
    """Returns the tokenizer's padding token, else the model's, else the end-of-sequence token; else ValueError."""
    config = _text_config(model)
    candidates = (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), tokenizer.eos_token_id)
    pad_id = next((token_id for token_id in candidates if isinstance(token_id, int) and token_id >= 0), None)
    if pad_id is None:
        raise ValueError(
            f"the tokenizer of reward model '{name}' has neither a padding nor an end-of-sequence token, so that rows "
            "of different length cannot be scored together; set tokenizer.pad_token"
        )
    return pad_id


@contextmanager
def padding_with(model: nn.Module, pad_id: int) -> Iterator[None]:
    """Context in which a model takes `pad_id` for padding: it scores the last token that is another one."""
    configs = {id(config): config for config in (getattr(model, "config", None), _text_config(model)) if config}
    before = [(config, getattr(config, "pad_token_id", None)) for config in configs.values()]
    try:
        for config, _ in before:
            config.pad_token_id = pad_id
        yield
    finally:
        for config, value in before:
            config.pad_token_id = value


def max_input_tokens(model: nn.Module) -> int | None:
    """Returns the maximum input length of a model; None if its configuration has no limit.

    In a table of learned positions, some families start behind the row of the padding token (RoBERTa).
    """
    limit = getattr(_text_config(model), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:  # relative positions only
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return min(limit, module.num_embeddings - module.padding_idx - 1)
    return limit


def is_placed(model: nn.Module, options: RewardModelOptions) -> bool:
    """True if the model must not be moved: it is quantized or placed by a device map."""
    has_map = getattr(model, "hf_device_map", None) or (options.init_kwargs or {}).get("device_map") is not None
    return bool(has_map or getattr(model, "is_quantized", False))


@contextmanager
def weights_on_device(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """Context in which a frozen model is on `device`; afterwards, also on errors, it is back in host memory.

    The device copies are dropped; nothing is copied back, since frozen weights do not change. Buffers that the model
    has created in between, such as a position table, are moved to host memory.
    """
    host_data: dict[int, torch.Tensor] = {}
    try:
        for tensor in (*model.parameters(), *model.buffers()):
            host_data[id(tensor)] = tensor.data
            tensor.data = tensor.data.to(device, copy=True)
        yield
    finally:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = host_data[id(tensor)] if id(tensor) in host_data else tensor.data.to("cpu")


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
