"""Reward models: sequence classifiers that score prompt and completion together."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from groupgrad.data.prompts import as_text, drop_empty_fields
from groupgrad.errors import RewardError
from groupgrad.metrics import Metric, mean_of
from groupgrad.modeling.systems.oom import collect_what_failed, is_out_of_memory
from groupgrad.rewards.functions import call_error
from groupgrad.rewards.inputs import CallInputs
from groupgrad.rewards.model_loading import (
    RewardModelOptions,
    check_device,
    is_placed,
    load_model,
    load_tokenizer,
    max_input_tokens,
    model_name,
    model_source,
    padding_id,
    set_padding_id,
)
from groupgrad.rewards.offload import HostWeights
from groupgrad.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class ModelScores:
    """What a reward model said of some rollouts."""

    rewards: list[float]
    """One finite number a row."""
    num_truncated: int
    """Rows of which it read the end only."""


class RewardModel:
    """A sequence-classification model whose only output is the reward.

    A name or folder is loaded with one label; a module is used as it is, put into evaluation mode and moved to the
    device unless it is quantized or spread by a device map. A missing processing class is loaded by the model's name.
    Where the tokenizer has no padding token, the model's is used, or else the end-of-sequence token; the model's
    `pad_token_id` is set to it. Conversations are written by the processing class's chat template; plain texts are
    prompt and completion end to end, with the special tokens that the tokenizer adds by default.

    One short text is scored when it is made, so that what cannot work is a ValueError then.
    """

    def __init__(self, model: str | torch.nn.Module, processing_class: Any, options: RewardModelOptions):
        self._options = options
        self.name, self.is_by_name = model_name(model), isinstance(model, str)
        self.model = load_model(model, options) if isinstance(model, str) else model
        self.model.eval()
        self._host = self._place()
        if processing_class is None:
            processing_class = load_tokenizer(model_source(model), self.name, options)
        self._tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self._writer = processing_class if getattr(processing_class, "chat_template", None) else self._tokenizer
        self._pad_id = padding_id(self._tokenizer, self.model, self.name)
        set_padding_id(self.model, self._pad_id)
        self._max_length = max_input_tokens(self.model)
        self._warned = False
        self._try_out()

    def renamed(self, name: str) -> RewardModel:
        """This model, from now on under another name."""
        self.name = name
        return self

    def check_conversations(self) -> None:
        """ValueError if conversations cannot be scored, for want of a chat template."""
        if not getattr(self._writer, "chat_template", None):
            raise ValueError(
                f"the prompts are conversations, but the tokenizer of reward model '{self.name}' has no chat template "
                "to write them with; give a tokenizer that has one in reward_processing_classes, or use text prompts"
            )

    def score(self, inputs: CallInputs) -> ModelScores:
        """One finite reward a row, without gradient. RewardError that names the row if the model gives NaN or infinity,
        or if a row cannot be written for it."""
        rows = [self._encode(inputs, row) for row in range(len(inputs.rollouts))]
        cut = [row for row, ids in enumerate(rows) if self._max_length is not None and len(ids) > self._max_length]
        if cut:
            self._warn_of_cut(len(rows[cut[0]]), inputs.describe(cut[0]))
        for row in cut:
            rows[row] = rows[row][-(self._max_length or 0) :]
        rewards = [0.0] * len(rows)
        self.model.eval()
        with self._on_device():
            for chunk in self._chunks(rows):
                for row, reward in zip(chunk, self._forward_in_parts([rows[row] for row in chunk])):
                    rewards[row] = reward
        for row, reward in enumerate(rewards):
            if not math.isfinite(reward):
                raise RewardError(
                    f"reward model '{self.name}', step {inputs.step}: it gave {reward} for {inputs.describe(row)}; "
                    "load it in a wider dtype (reward_model_init_kwargs={'dtype': 'float32'}) or check its weights"
                )
        return ModelScores(rewards, len(cut))

    def metrics(self, scores: ModelScores) -> dict[str, Metric]:
        """The share of texts that were cut, for a model that can read so many tokens and no more."""
        if self._max_length is None:
            return {}
        return {f"rewards/{self.name}/truncated": mean_of(float(scores.num_truncated), float(len(scores.rewards)))}

    def _place(self) -> HostWeights | None:
        if is_placed(self.model, self._options):
            if self._options.offload:
                raise ValueError(
                    f"reward_model_offload=True, but reward model '{self.name}' is quantized or placed by a device map "
                    "and stays where it is; set reward_model_offload=False, or load it plainly"
                )
            return None
        check_device(self._options.device, self.name)
        if self._options.offload:
            return HostWeights(self.model, self._options.device)
        self.model.to(self._options.device)
        return None

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._host is None else self._host.on_device()

    def _try_out(self) -> None:
        """Score one short text. ValueError if that does not give one finite number."""
        try:
            ids = list(self._tokenizer("A")["input_ids"])[: self._max_length] or [self._pad_id]
            with self._on_device():
                reward = self._forward([ids])[0]
        except Exception as error:  # whatever a model's own code raises
            raise ValueError(
                f"reward model '{self.name}' cannot score a text: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(reward):
            raise ValueError(
                f"reward model '{self.name}' gives {reward} for the text 'A'; load it in a wider dtype "
                "(reward_model_init_kwargs={'dtype': 'float32'}) or check its weights"
            )

    def _encode(self, inputs: CallInputs, row: int) -> list[int]:
        try:
            ids = self._token_ids(inputs.rollouts[row])
        except Exception as error:  # whatever a template raises
            raise call_error(error, self.name, inputs, row) from error
        if not ids:
            raise RewardError(f"reward model '{self.name}', step {inputs.step}: {inputs.describe(row)} has no tokens")
        return ids

    def _token_ids(self, rollout: Rollout) -> list[int]:
        prompt, completion = rollout.prompt.row["prompt"], rollout.completion
        if rollout.prompt.is_conversational:
            reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            # It reads text: images are only named.
            messages = [as_text(message) for message in drop_empty_fields([*prompt, *reply])]
            text = self._writer.apply_chat_template(
                messages, tokenize=False, **(self._options.chat_template_kwargs or {})
            )
            # The template writes the special tokens itself.
            return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        text = prompt + (completion if isinstance(completion, str) else rollout.text)
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    def _warn_of_cut(self, length: int, described: str) -> None:
        """Once; how many there are is logged as a metric."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "reward model '%s' reads at most %d tokens; of longer texts it sees the end only, as of %s, which has "
                "%d. 'rewards/%s/truncated' in the log is their share",
                self.name,
                self._max_length,
                described,
                length,
                self.name,
            )

    def _chunks(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Numbers of the rows of each forward pass. Rows of like length go together, so that little is padding."""
        chunk: list[int] = []
        for row in sorted(range(len(rows)), key=lambda row: len(rows[row])):
            if chunk and (len(chunk) + 1) * len(rows[row]) > self._options.batch_tokens:
                yield chunk
                chunk = []
            chunk.append(row)
        if chunk:
            yield chunk

    def _forward_in_parts(self, rows: list[list[int]]) -> list[float]:
        """The rewards of some rows; where memory runs out, of half of them at a time, and so on."""
        try:
            return self._forward(rows)
        except (RuntimeError, MemoryError) as error:
            if len(rows) < 2 or not is_out_of_memory(error):
                raise
        collect_what_failed()  # here the error is gone
        middle = len(rows) // 2
        return self._forward_in_parts(rows[:middle]) + self._forward_in_parts(rows[middle:])

    @torch.no_grad()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        first = next(self.model.parameters(), None)
        # A first weight that is kept elsewhere and brought in by a hook says nothing of the device.
        device = self._options.device if first is None or first.device.type == "meta" else first.device
        output = self.model(input_ids=ids.to(device), attention_mask=mask.to(device))
        logits = output.logits
        if logits.ndim != 2 or tuple(logits.shape) != (len(rows), 1):
            raise ValueError(
                f"its logits have shape {tuple(logits.shape)} for {len(rows)} rows; a reward model gives one number a "
                "text: use a sequence-classification model with num_labels=1"
            )
        return logits[:, 0].float().tolist()
