"""Rows of a data set to prompts of token ids, and the checks that a data set must pass before training starts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

from groupgrad.errors import UnavailableError
from groupgrad.types import Prompt

# A chat template may add this many tokens to the text of a conversation before a prompt is measured exactly.
TEMPLATE_ALLOWANCE = 1024


class PromptMaker:
    """Tokenises prompts: text as it is, messages through the chat template with a generation prompt."""

    def __init__(
        self, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None, max_context: int | None = None
    ):
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_context = max_context
        """Positions that the model has, prompt and completion together; None if unbounded."""

    def __call__(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row. A prompt that leaves no room for a completion is a ValueError."""
        ids = self.token_ids(row["prompt"])
        if not ids:
            raise ValueError(
                f"the prompt {row['prompt']!r} gives no token at all, so there is nothing to continue; remove the row "
                "or add text to it"
            )
        if self.max_context is not None and len(ids) >= self.max_context:
            raise ValueError(self.too_long_message(row["prompt"], len(ids)))
        return Prompt(ids=ids, row=row, group=group)

    def token_ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a text or of a conversation."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt, add_special_tokens=True, verbose=False)["input_ids"])
        rendered = self.tokenizer.apply_chat_template(
            drop_empty_fields(prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        ids = rendered["input_ids"]
        return list(ids[0] if ids and isinstance(ids[0], list) else ids)

    def too_long_message(self, prompt: Any, num_tokens: int) -> str:
        """What to tell a user whose prompt does not fit."""
        return (
            f"a prompt has {num_tokens} tokens, but the model has {self.max_context} positions for prompt and "
            f"completion together: {_excerpt(prompt)}; filter such rows out of the data set or use a model with a "
            "longer context"
        )


def drop_empty_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the None entries that a columnar store adds to messages that lack a field."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def check_dataset(dataset: Any, argument: str, prompt_maker: PromptMaker, *, may_lack_prompts: bool = False) -> None:
    """Refuse a data set that cannot be trained on; `argument` names it in the message.

    TypeError for something that is no data set; ValueError for a missing `prompt` column, empty or malformed prompts,
    and prompts longer than the model's context (counted, one shown). Of a stream only the first row is looked at. With
    `may_lack_prompts` the column may be missing.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{argument} is a {type(dataset).__name__}; it must be a datasets.Dataset or datasets.IterableDataset "
            "(datasets.Dataset.from_list([...]) makes one from a list of rows)"
        )
    first = next(iter(islice(iter(dataset), 1)), None)
    if first is None:
        raise ValueError(f"{argument} has no rows; give it at least one row with a 'prompt'")
    if "prompt" not in first and may_lack_prompts:
        return
    if "prompt" not in first:
        raise ValueError(
            f"{argument} has the columns {sorted(first)}, but no 'prompt' column; rename the column that holds the "
            "prompts: dataset.rename_column('...', 'prompt')"
        )
    for column in ("image", "images"):
        if column in first and (first[column] or _has_images(dataset, column)):
            raise UnavailableError(
                f"{argument} has the column '{column}', but training on images is not part of this version; remove "
                f"the column: dataset.remove_columns('{column}')"
            )
    prompts = [first["prompt"]] if isinstance(dataset, IterableDataset) else dataset["prompt"]
    _check_prompts(prompts, argument, prompt_maker)


def _has_images(dataset: Any, column: str) -> bool:
    """True if any row has one; nothing is decoded. Of a stream only the first row is known."""
    if isinstance(dataset, IterableDataset):
        return False
    for table in dataset.select_columns(column).with_format("arrow").iter(batch_size=1000):
        values = table.column(column).drop_null()
        is_list = pa.types.is_list(values.type) or pa.types.is_large_list(values.type)
        if pc.sum(pc.list_value_length(values)).as_py() if is_list else len(values):  # pyright: ignore[reportAttributeAccessIssue]
            return True
    return False


def _check_prompts(prompts: Iterable[Any], argument: str, prompt_maker: PromptMaker) -> None:
    too_long: list[tuple[int, Any]] = []
    for number, prompt in enumerate(prompts):
        problem = _malformed(prompt, prompt_maker)
        if problem:
            raise ValueError(f"row {number} of {argument}: {problem}")
        if prompt_maker.max_context is not None and _may_exceed(prompt, prompt_maker.max_context):
            num_tokens = len(prompt_maker.token_ids(prompt))
            if num_tokens >= prompt_maker.max_context:
                too_long.append((num_tokens, prompt))
    if too_long:
        num_tokens, prompt = max(too_long, key=lambda item: item[0])
        raise ValueError(
            f"{len(too_long)} prompts of {argument} are too long; the longest: "
            f"{prompt_maker.too_long_message(prompt, num_tokens)}"
        )


def _malformed(prompt: Any, prompt_maker: PromptMaker) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "its prompt is the empty text; remove the row or write a prompt"
    if not isinstance(prompt, list):
        return f"its prompt is {prompt!r}; a prompt is a text or a list of messages"
    if not prompt:
        return "its prompt is an empty list of messages; remove the row or add a user message"
    for message in prompt:
        if (
            not isinstance(message, dict)
            or "role" not in message
            or (message.get("content") is None and not message.get("tool_calls"))
        ):
            return f"its prompt has the message {message!r}; a message is a dict with 'role' and 'content'"
    if not getattr(prompt_maker.tokenizer, "chat_template", None):
        return (
            "its prompt is a conversation, but the tokenizer has no chat template; set processing_class.chat_template "
            "or use text prompts"
        )
    return None


def _may_exceed(prompt: Any, max_context: int) -> bool:
    """Quick test: a tokenizer gives at most one token a byte, plus what the template adds."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + 2 >= max_context
    size = sum(len(str(message.get("content", "")).encode()) for message in prompt)
    return size + TEMPLATE_ALLOWANCE >= max_context


def _excerpt(prompt: Any, width: int = 200) -> str:
    text = prompt if isinstance(prompt, str) else repr(prompt)
    return repr(text if len(text) <= width else text[: width // 2] + " ... " + text[-width // 2 :])
