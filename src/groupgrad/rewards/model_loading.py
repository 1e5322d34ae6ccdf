"""Reward models and their tokenizers: where they come from, and what of them cannot work."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from groupgrad.modeling.systems.zero3 import loaded_whole

logger = logging.getLogger(__name__)

HUB_KEYS = ("cache_dir", "local_files_only", "proxies", "token")
"""Entries of the policy's `model_init_kwargs` that say how files are fetched and nothing of the model: reward models
and their tokenizers are fetched in the same way."""

_TOKENIZER_KEYS = ("revision", "subfolder", *HUB_KEYS)
_NAMES_SHOWN = 3


@dataclass(slots=True, frozen=True)
class RewardModelOptions:
    """How reward models are loaded and run."""

    device: torch.device | str = "cpu"
    """Where they are computed, but for those that a device map has placed and quantized ones, which stay."""
    init_kwargs: dict[str, Any] | None = None
    """Keyword arguments for loading by name; never changed. None of the policy's are used beside them."""
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    batch_tokens: int = 16_384
    """Tokens, padding included, that one forward pass reads at most; a longer text is read alone."""
    offload: bool = False
    """Keep them in host memory between two calls."""

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise ValueError(
                f"batch_tokens={self.batch_tokens}: a forward pass reads at least one token; set it to 1 or more"
            )
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ValueError(
                f"reward_model_device={self.device!r} is no device; set it to 'cpu', 'cuda', 'cuda:1' or the like"
            ) from error

    @property
    def trusts(self) -> bool:
        """Code that comes with a checkpoint may run."""
        return self.trust_remote_code or bool((self.init_kwargs or {}).get("trust_remote_code"))


def hub_kwargs(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The entries of the policy's `init_kwargs` that reward models share, `HUB_KEYS`."""
    return {key: init_kwargs[key] for key in HUB_KEYS if key in init_kwargs}


def model_name(model: str | nn.Module) -> str:
    """The last path component of a model's name, or its class name if it has none."""
    return os.path.basename(model_source(model).replace("\\", "/").rstrip("/")) or type(model).__name__


def model_source(model: str | nn.Module) -> str:
    """The name or folder that a model was loaded from; empty if it does not say."""
    return model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def load_model(name: str, options: RewardModelOptions) -> nn.Module:
    """A sequence classifier with one label, from a folder or by name, in the checkpoint's dtype unless told otherwise.

    ValueError if the checkpoint has no such head, or one with several labels: its rewards would be random numbers.
    """
    from transformers import AutoModelForSequenceClassification

    kwargs = dict(options.init_kwargs or {})
    labels = kwargs.pop("num_labels", 1)
    if labels != 1:
        raise ValueError(
            f"reward_model_init_kwargs has num_labels={labels!r}, but a reward is one number a text; take it out"
        )
    kwargs |= {"num_labels": 1, "trust_remote_code": options.trusts, "output_loading_info": True}
    # Without this the library's error says only that sizes differ, and nothing of labels.
    kwargs["ignore_mismatched_sizes"] = True
    with loaded_whole():
        model, report = AutoModelForSequenceClassification.from_pretrained(name, **kwargs)
    mismatched = [entry[0] if isinstance(entry, (tuple, list)) else entry for entry in report["mismatched_keys"]]
    if mismatched:
        raise ValueError(
            f"reward model '{name}' cannot be loaded with one label: {_some(mismatched)} has another size in its "
            "checkpoint. A reward model gives one number a text; for a classifier with several labels give a reward "
            "function that calls it"
        )
    if report["missing_keys"]:
        raise ValueError(
            f"the checkpoint of reward model '{name}' lacks {_some(sorted(report['missing_keys']))}, so its rewards "
            "would be random; give a sequence-classification model that was trained to score texts"
        )
    return model


def load_tokenizer(source: str, name: str, options: RewardModelOptions) -> Any:
    """The tokenizer that lies beside a reward model. ValueError if the model does not say where that is."""
    if not source:
        raise ValueError(
            f"reward model '{name}' does not say where it was loaded from, so that its tokenizer cannot be loaded; "
            "give it in reward_processing_classes"
        )
    from transformers import AutoTokenizer

    given = options.init_kwargs or {}
    kwargs = {key: given[key] for key in _TOKENIZER_KEYS if key in given}
    return AutoTokenizer.from_pretrained(source, trust_remote_code=options.trusts, **kwargs)


def padding_id(tokenizer: Any, model: nn.Module, name: str) -> int:
    """The tokenizer's padding token, or the model's, or the end-of-sequence token. ValueError if there is none.

    Rows are padded by the caller, so that a tokenizer that others use too stays as it is.
    """
    config = _text_config(model)
    for found in (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), tokenizer.eos_token_id):
        if isinstance(found, int) and found >= 0:
            return found
    raise ValueError(
        f"the tokenizer of reward model '{name}' has neither a padding nor an end-of-sequence token, so that rows "
        "of different length cannot be scored together; set tokenizer.pad_token"
    )


def set_padding_id(model: nn.Module, pad_id: int) -> None:
    """Write the padding id into the model's configuration, by which it finds each row's last token."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.pad_token_id = _text_config(model).pad_token_id = pad_id


def max_input_tokens(model: nn.Module) -> int | None:
    """Tokens that the model can read; None if its configuration sets no bound.

    Of a table of learned positions some families leave out the first rows, those up to the padding token's.
    """
    limit = getattr(_text_config(model), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:  # relative positions only
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return min(limit, module.num_embeddings - module.padding_idx - 1)
    return limit


def check_device(device: torch.device | str, name: str) -> None:
    """ValueError if nothing can be put on `device`."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"reward_model_device='{device}' cannot be used for reward model '{name}': {str(error).splitlines()[0]}; "
            "set it to a device that this machine has, or leave it unset"
        ) from error


def is_placed(model: nn.Module, options: RewardModelOptions) -> bool:
    """True if the model is to stay where it is: quantized, or spread by a device map."""
    mapped = getattr(model, "hf_device_map", None) or (options.init_kwargs or {}).get("device_map") is not None
    return bool(mapped or getattr(model, "is_quantized", False))


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
