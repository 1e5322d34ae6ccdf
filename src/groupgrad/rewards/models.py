"""Reward models: sequence classifiers that score a prompt and its completion together."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from groupgrad.data.outside_text import OutsideText
from groupgrad.data.prompts import as_text, drop_empty_fields, join_continued
from groupgrad.errors import RewardError
from groupgrad.memory.oom import collect_what_failed, is_out_of_memory
from groupgrad.metrics import mean_of
from groupgrad.models.model_names import model_source
from groupgrad.rewards.call_inputs import CallInputs, CallLog
from groupgrad.rewards.functions import call_error
from groupgrad.rewards.model_loading import (
    RewardModelOptions,
    is_placed,
    load_model,
    load_tokenizer,
    max_input_tokens,
    model_name,
    padding_id,
    padding_with,
    weights_on_device,
)

logger = logging.getLogger(__name__)


class RewardModel:
    """A sequence-classification model with one label; its logit is the reward.

    A name or folder is loaded with one label. A module is used as it is, in evaluation mode, and moved to the device
    unless it is quantized or placed by a device map. Without a processing class, the tokenizer is loaded from the
    model's source. Texts are padded with the tokenizer's padding token, else the model's, else the end-of-sequence
    token; where a text has that token itself, with one that none of them has. Conversations are formatted by the chat
    template; plain texts are prompt and completion end to end, with the tokenizer's default special tokens. Special
    tokens that a message or a completion spells out are read as ordinary text, so that no policy can end its turn for
    the reward model.

    The constructor scores one short text, so a model that cannot work is a ValueError there.
    """

    def __init__(self, model: str | torch.nn.Module, processing_class: Any, options: RewardModelOptions):
        self._options = options
        self.name, self.is_by_name = model_name(model), isinstance(model, str)
        self.model = load_model(model, options) if isinstance(model, str) else model
        self.model.eval()
        self._on_device = self._place()
        if processing_class is None:
            processing_class = load_tokenizer(model_source(model), self.name, options)
        self.processing_class = processing_class
        self._tokenizer = getattr(processing_class, "tokenizer", processing_class)
        has_template = getattr(processing_class, "chat_template", None)
        self._formatter = processing_class if has_template else self._tokenizer
        self._outside_text = OutsideText(self._tokenizer, options.chat_template_kwargs)
        self._pad_id = padding_id(self._tokenizer, self.model, self.name)
        self._max_length = max_input_tokens(self.model)
        self._warned_truncated = False
        self._score_test_text()

    def check_conversations(self) -> None:
        """ValueError if there is no chat template to format conversations with."""
        if not getattr(self._formatter, "chat_template", None):
            raise ValueError(
                f"the prompts are conversations, but the tokenizer of reward model '{self.name}' has no chat template "
                "to write them with; give a tokenizer that has one in reward_processing_classes, or use text prompts"
            )

    def score(self, inputs: CallInputs, log: CallLog, *, may_be_infinite: bool = False) -> list[float]:
        """Returns one reward a row, without gradient.

        A model with a length limit reads the end of a longer text and logs the share of such texts. RewardError, with
        the row, if the model gives NaN or infinity (unless it may), or if the row cannot be tokenized.
        """
        rows = [self._encode(inputs, row) for row in range(len(inputs.rollouts))]
        if self._max_length is not None:
            truncated = [row for row, ids in enumerate(rows) if len(ids) > self._max_length]
            if truncated and not self._warned_truncated:
                self._warned_truncated = True
                logger.warning(
                    "reward model '%s' reads at most %d tokens; of longer texts it sees the end only, as of %s, which "
                    "has %d. 'rewards/%s/truncated' in the log is their share",
                    self.name,
                    self._max_length,
                    inputs.describe(truncated[0]),
                    len(rows[truncated[0]]),
                    self.name,
                )
            for row in truncated:
                rows[row] = rows[row][-self._max_length :]
            log.metrics[f"rewards/{self.name}/truncated"] = mean_of(float(len(truncated)), float(len(rows)))
        rewards = [0.0] * len(rows)
        self.model.eval()
        try:
            with self._on_device():
                for chunk in self._chunks(rows):
                    for row, reward in zip(chunk, self._forward_within_memory([rows[row] for row in chunk])):
                        rewards[row] = reward
        except Exception as error:  # a model's own code may raise anything
            raise call_error(error, self.name, inputs) from error
        for row, reward in enumerate(rewards):
            if not math.isfinite(reward) and not may_be_infinite:
                raise RewardError(
                    f"reward model '{self.name}', step {inputs.step}: it gave {reward} for {inputs.describe(row)}; "
                    "load it in a wider dtype (reward_model_init_kwargs={'dtype': 'float32'}) or check its weights"
                )
        return rewards

    def _place(self) -> Callable[[], AbstractContextManager[None]]:
        """Moves the model to its device, or to host memory if offloaded. Returns the context in which it can score."""
        if is_placed(self.model, self._options):
            if self._options.offload:
                raise ValueError(
                    f"reward_model_offload=True, but reward model '{self.name}' is quantized or placed by a device map "
                    "and stays where it is; set reward_model_offload=False, or load it plainly"
                )
            return nullcontext
        self.model.to("cpu" if self._options.offload else self._options.device)
        if self._options.offload:
            return functools.partial(weights_on_device, self.model, self._options.device)
        return nullcontext

    def _score_test_text(self) -> None:
        """ValueError if a short text does not get one finite reward."""
        try:
            ids = list(self._tokenizer("A")["input_ids"])[: self._max_length] or [self._pad_id]
            with self._on_device():
                reward = self._forward([ids])[0]
        except Exception as error:  # a model's own code may raise anything
            raise ValueError(
                f"reward model '{self.name}' cannot score a text: {type(error).__name__}: {error}"
            ) from error
        if not math.isfinite(reward):
            raise ValueError(
                f"reward model '{self.name}' gives {reward} for the text 'A'; load it in a wider dtype "
                "(reward_model_init_kwargs={'dtype': 'float32'}) or check its weights"
            )

    def _encode(self, inputs: CallInputs, row: int) -> list[int]:
        rollout = inputs.rollouts[row]
        prompt, completion = rollout.prompt.row["prompt"], rollout.completion
        is_conversation = rollout.prompt.is_conversational
        try:
            if is_conversation:
                reply = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
                # The model reads text only; `as_text` replaces images by their names.
                messages = [as_text(message) for message in drop_empty_fields([*prompt, *reply])]
                kwargs = dict(self._options.chat_template_kwargs or {})
                if kwargs.pop("continue_final_message", False):
                    messages = join_continued(messages, len(prompt))
                messages = self._outside_text.mark(messages, with_added=False)
                render = functools.partial(self._formatter.apply_chat_template, tokenize=False, **kwargs)
                text = self._outside_text.render(render, messages)
            else:
                answer = completion if isinstance(completion, str) else rollout.text
                text = prompt + self._outside_text.mark(answer, with_added=False)
            # A template has already written the special tokens.
            ids = self._outside_text.encode(text, add_special_tokens=not is_conversation)
        except Exception as error:  # a chat template may raise anything
            raise call_error(error, self.name, inputs, row=row) from error
        if not ids:
            raise RewardError(f"reward model '{self.name}', step {inputs.step}: {inputs.describe(row)} has no tokens")
        return ids

    def _chunks(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yields the row numbers of each forward pass, sorted by length to keep the padding small."""
        chunk: list[int] = []
        for row in sorted(range(len(rows)), key=lambda row: len(rows[row])):
            if chunk and (len(chunk) + 1) * len(rows[row]) > self._options.batch_tokens:
                yield chunk
                chunk = []
            chunk.append(row)
        if chunk:
            yield chunk

    def _forward_within_memory(self, rows: list[list[int]]) -> list[float]:
        """Scores rows in one forward pass; when it runs out of memory, halves the rows and retries."""
        try:
            return self._forward(rows)
        except (RuntimeError, MemoryError) as error:
            if len(rows) < 2 or not is_out_of_memory(error):
                raise
        collect_what_failed()  # outside the except block, where the exception no longer holds the frames
        middle = len(rows) // 2
        return self._forward_within_memory(rows[:middle]) + self._forward_within_memory(rows[middle:])

    @torch.no_grad()
    def _forward(self, rows: list[list[int]]) -> list[float]:
        width = max(map(len, rows))
        pad_id = self._unused_id(rows)
        ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        weight = next(self.model.parameters(), None)
        # A meta weight is loaded by a hook during the forward pass, so its device is unknown here.
        device = self._options.device if weight is None or weight.device.type == "meta" else weight.device
        with padding_with(self.model, pad_id):
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        if logits.ndim != 2 or tuple(logits.shape) != (len(rows), 1):
            raise ValueError(
                f"its logits have shape {tuple(logits.shape)} for {len(rows)} rows; a reward model gives one number a "
                "text: use a sequence-classification model with num_labels=1"
            )
        return logits[:, 0].float().tolist()

    def _unused_id(self, rows: Sequence[Sequence[int]]) -> int:
        """The padding token, or another id that is in no row: models take the padding id at a row's end for padding."""
        taken = {token for row in rows for token in row}
        return next(
            (token for token in (self._pad_id, *range(len(self._tokenizer))) if token not in taken), self._pad_id
        )
