"""Reward models: sequence classifiers that score prompt and completion together."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from groupgrad.data.prompts import drop_empty_fields
from groupgrad.errors import RewardError
from groupgrad.rewards.inputs import CallInputs
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)

POLICY_ONLY_KEYS = frozenset(
    {
        "revision",
        "code_revision",
        "subfolder",
        "variant",
        "config",
        "state_dict",
        "quantization_config",
        "load_in_4bit",
        "load_in_8bit",
        "attn_implementation",
        "experts_implementation",
        "device_map",
        "device_mesh",
        "tp_plan",
        "tp_size",
        "max_memory",
        "offload_folder",
        "use_cache",
        "num_labels",
    }
)
"""Entries of `model_init_kwargs` that say something of the policy's own checkpoint, architecture or placement. They are
left out when a reward model is loaded; `dtype`, `cache_dir`, `token` and the like are passed on."""


@dataclass(slots=True, frozen=True)
class RewardModelOptions:
    """How reward models are loaded and run."""

    device: torch.device | str = "cpu"
    model_init_kwargs: dict[str, Any] | None = None
    """Keyword arguments for loading by name; never changed, `POLICY_ONLY_KEYS` left out."""
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    max_batch_rows: int = field(default=16)
    """Rows in one forward pass."""


class RewardModel:
    """A sequence-classification model whose first output is the reward.

    A name or folder is loaded with one label; a module is used as it is, put into evaluation mode and moved to the
    device unless it is quantized or spread over devices. A missing processing class is loaded by the model's name.
    Where the tokenizer has no padding token its end-of-sequence token is used; the model's `pad_token_id` is set to it.
    Conversations are written by the tokenizer's chat template; plain texts are prompt and completion end to end, with
    the special tokens that the tokenizer adds by default.
    """

    def __init__(self, model: str | torch.nn.Module, processing_class: Any, options: RewardModelOptions):
        self._options = options
        self.name = model_name(model)
        source = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
        self.model = load_model(model, options) if isinstance(model, str) else model
        self.model.eval()
        if not getattr(self.model, "hf_device_map", None) and not getattr(self.model, "is_quantized", False):
            self.model.to(options.device)
        self._tokenizer = _load_tokenizer(source, self.name, processing_class, options)
        self._pad_id = _padding_id(self._tokenizer, self.name)
        self._max_length = _prepare_config(self.model, self._pad_id)
        self._warned = False

    def renamed(self, name: str) -> RewardModel:
        """This model, from now on under another name."""
        self.name = name
        return self

    def score(self, inputs: CallInputs) -> list[float]:
        """One finite reward a row. RewardError that names the row if the model gives NaN or infinity. No gradient."""
        rows = [self._encode(rollout) for rollout in inputs.rollouts]
        for row, ids in enumerate(rows):
            if not ids:
                raise RewardError(
                    f"reward model '{self.name}', step {inputs.step}: {inputs.describe(row)} has no tokens"
                )
        rewards = [0.0] * len(rows)
        # Rows of like length share a forward pass, so that little of it is padding.
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        self.model.eval()
        for start in range(0, len(order), self._options.max_batch_rows):
            chunk = order[start : start + self._options.max_batch_rows]
            for row, reward in zip(chunk, self._forward([rows[row] for row in chunk])):
                rewards[row] = reward
        for row, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise RewardError(
                    f"reward model '{self.name}', step {inputs.step}: it gave {reward} for {inputs.describe(row)}; "
                    "load it in a wider dtype (model_init_kwargs={'dtype': 'float32'}) or check its weights"
                )
        return rewards

    def _encode(self, rollout: Rollout) -> list[int]:
        prompt, completion = rollout.prompt.row["prompt"], rollout.completion
        if rollout.prompt.is_conversational:
            reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            text = self._tokenizer.apply_chat_template(
                drop_empty_fields([*prompt, *reply]), tokenize=False, **(self._options.chat_template_kwargs or {})
            )
            # The template writes the special tokens itself.
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(prompt + (completion if isinstance(completion, str) else rollout.text))["input_ids"]
        if self._max_length is not None and len(ids) > self._max_length:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "reward model '%s' reads at most %d tokens; of longer texts (this one: %d) it sees the end only",
                    self.name,
                    self._max_length,
                    len(ids),
                )
            ids = ids[-self._max_length :]
        return ids

    @torch.no_grad()
    def _forward(self, rows: Sequence[list[int]]) -> list[float]:
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        device = next(self.model.parameters()).device
        output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
        logits = output.logits
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(
                f"its logits have shape {tuple(logits.shape)} for {len(rows)} rows; a reward model gives one row of "
                "scores a text: use a sequence-classification model"
            )
        return logits[:, 0].float().tolist()


def model_name(model: str | torch.nn.Module) -> str:
    """The last path component of a model's name, or its class name if it has none."""
    path = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return os.path.basename(str(path or "").replace("\\", "/").rstrip("/")) or type(model).__name__


def load_model(name: str, options: RewardModelOptions) -> torch.nn.Module:
    """A sequence classifier with one label, from a folder or by name."""
    from transformers import AutoModelForSequenceClassification

    given = options.model_init_kwargs or {}
    kwargs = {key: value for key, value in given.items() if key not in POLICY_ONLY_KEYS}
    kwargs["trust_remote_code"] = options.trust_remote_code or bool(given.get("trust_remote_code"))
    return AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **kwargs)


def _load_tokenizer(source: str | None, name: str, processing_class: Any, options: RewardModelOptions) -> Any:
    if processing_class is None:
        if not source:
            raise ValueError(
                f"reward model '{name}' does not say where it was loaded from, so that its tokenizer cannot be loaded; "
                "give it in reward_processing_classes"
            )
        from transformers import AutoTokenizer

        trust = options.trust_remote_code or bool((options.model_init_kwargs or {}).get("trust_remote_code"))
        processing_class = AutoTokenizer.from_pretrained(source, trust_remote_code=trust)
    return getattr(processing_class, "tokenizer", processing_class)


def _padding_id(tokenizer: Any, name: str) -> int:
    # Rows are padded here, not by the tokenizer, so that a tokenizer that others use too stays as it is.
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad_id is None:
        raise ValueError(
            f"the tokenizer of reward model '{name}' has neither a padding nor an end-of-sequence token, so that rows "
            "of different length cannot be scored together; set tokenizer.pad_token"
        )
    return pad_id


def _prepare_config(model: torch.nn.Module, pad_id: int) -> int | None:
    """Tell the model the padding id, by which it finds each row's last token; gives the length it can read, if any."""
    config: Any = getattr(model, "config", None)
    if config is None:
        return None
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    config.pad_token_id = text_config.pad_token_id = pad_id
    return getattr(text_config, "max_position_embeddings", None)
