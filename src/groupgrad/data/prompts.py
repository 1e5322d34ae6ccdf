"""Makes prompts of token ids from data-set rows, and checks a data set before training."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset

from groupgrad.data.columns import first_row, prompt_rows
from groupgrad.data.images import column_images, image_blocks, is_plain_text
from groupgrad.data.outside_text import OutsideText
from groupgrad.types import Media, Messages, Prompt

logger = logging.getLogger(__name__)

# Tokens that a chat template may add before the length of a prompt is measured exactly.
TEMPLATE_ALLOWANCE = 1024

RENDERED_FIRST = 1024
"""Conversations of a data set that are rendered before training, to test the chat template on them."""

DECODED_FIRST = 256
"""Images of a data set that are decoded before training; of the others only the file header is read."""


@dataclass(slots=True, frozen=True)
class Encoded:
    """Model inputs of a rendered text with its images."""

    ids: list[int]
    """Token ids with one placeholder for each feature of an image."""
    media: Media | None
    """None without images."""


class PromptMaker:
    """Tokenises prompts: text as it is, messages through the chat template with a generation prompt.

    Rows with images are rejected with the reason and remedy in `no_images`; `VisionPromptMaker` accepts them.

    Special tokens in the texts of messages are encoded as ordinary text, so that a row or a tool cannot end its turn
    and speak as somebody else. Those of a text prompt are kept, since it may be a rendered conversation.
    `special_tokens` changes that for prompts: "split" for text prompts too, "keep" for neither. The messages of tools
    are always split.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_context: int | None = None,
        *,
        special_tokens: str = "auto",
        image_root: str | None = None,
        no_images: str = "the model reads text alone",
    ):
        self.tokenizer = tokenizer
        self.outside_text = OutsideText(tokenizer, chat_template_kwargs)
        self._special_tokens = special_tokens
        self.image_root = image_root or ""
        """Folder of the images that are given by paths, which may not lead out of it; empty: any path."""
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.continues_turns = bool(self.chat_template_kwargs.pop("continue_final_message", False))
        """A conversation that ends with an assistant's message is rendered up to its text, which the model continues;
        otherwise the template closes that turn, and the model begins another."""
        self._said_ending = False
        self.max_context = max_context
        """Maximum length of prompt and completion together; None without a limit."""
        self.num_embeddings: int | None = None
        """Rows of the model's embeddings, where the tokenizer has more tokens; None otherwise."""
        self.keeps_special_tokens = False
        """The texts of completions have special tokens, but for those that end them."""
        self._no_images = no_images
        self.checked: set[tuple[str, int | None]] = set()
        """(fingerprint, max_context) of the data sets that passed `check_dataset`."""

    def __call__(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row. ValueError if it has images, no tokens, or no room for a completion."""
        prompt, encoded = self._encode_row(row, check=True)
        if not encoded.ids:
            raise ValueError(
                f"the prompt {row['prompt']!r} gives no token at all, so there is nothing to continue; remove the row "
                "or add text to it"
            )
        if self.num_embeddings is not None and max(encoded.ids) >= self.num_embeddings:
            raise ValueError(self._unknown_token_message(prompt, max(encoded.ids)))
        if self.max_context is not None and len(encoded.ids) >= self.max_context:
            raise ValueError(self.too_long_message(prompt, len(encoded.ids)))
        row = row if prompt is row["prompt"] else {**row, "prompt": prompt}
        return Prompt(encoded.ids, row, group, encoded.media)

    def _encode_row(self, row: dict[str, Any], *, check: bool) -> tuple[str | Messages, Encoded]:
        """A row's prompt with its images opened, and its model inputs; `check` rejects rows with images."""
        if check and not is_plain_text(row):
            self.check_images(row)
        return row["prompt"], Encoded(self.token_ids(row["prompt"]), None)

    def token_ids(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Token ids of a text or a conversation."""
        if isinstance(prompt, str):
            text = self._mark(prompt) if self._special_tokens == "split" else prompt
            return self.outside_text.encode(text, add_special_tokens=True, is_continued=True)
        return self.encode(self.render(prompt)).ids

    def check_images(self, row: dict[str, Any], *, decode: bool = False) -> list[tuple[int, int]]:
        """The (height, width) of a row's images, decoded only with `decode`. ValueError for rejected images."""
        column, images = column_images(row)
        if not images and not isinstance(row["prompt"], str):
            column, images = "prompt", list(image_blocks(row["prompt"]))
        if images:
            raise ValueError(f"there is an image in '{column}', but {self._no_images}")
        return []

    def prompt_with_images(self, row: dict[str, Any], *, opened: bool) -> str | Messages:
        """The row's prompt with its images in the messages, opened or as the row has them."""
        return row["prompt"]

    def conversation_images(self, messages: Messages) -> list[Any]:
        """The images of a conversation that the model takes, in their order."""
        return []

    def template_messages(self, messages: Messages) -> Messages:
        """Messages in the form that the chat template renders, with marks for control tokens in their texts."""
        return [self._mark_message(as_text(message)) for message in drop_empty_fields(messages)]

    def _mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": self._joined_where_a_token_is_split(content)}
        if message.get("role") == "tool":
            return self.outside_text.mark(message, with_added=True)
        return message if self._special_tokens == "keep" else self._mark(message)

    def _joined_where_a_token_is_split(self, blocks: list[Any]) -> list[Any]:
        """Content blocks; neighbours are one block where their texts make a control token together."""
        joined: list[Any] = []
        for block in blocks:
            text, last = _block_text(block), _block_text(joined[-1]) if joined else None
            if text is not None and last is not None and self.outside_text.is_split_between(last, text):
                joined[-1] = {**joined[-1], "text": last + text}
            else:
                joined.append(block)
        return joined

    def _mark(self, value: Any) -> Any:
        return self.outside_text.mark(value, with_added=False)

    def ending(self, messages: Messages) -> dict[str, bool]:
        """Options of the chat template for the end of a prompt: a generation prompt, or the last turn left open.

        The first turn of an assistant at the end of a prompt that is not continued is said in a warning.
        """
        if not messages or messages[-1].get("role") != "assistant":
            return {"add_generation_prompt": True}
        if self.continues_turns:
            return {"continue_final_message": True}
        if not self._said_ending:
            self._said_ending = True
            logger.warning(
                "a prompt ends with an assistant's message (%s), which the chat template closes, and completions are "
                "further turns behind it; set chat_template_kwargs={'continue_final_message': True} to have them "
                "continue it",
                excerpt(messages[-1].get("content")),
            )
        return {"add_generation_prompt": True}

    def render(self, messages: Messages) -> str:
        """Renders a conversation with generation prompt, and one placeholder for each image."""
        options = {**self.ending(messages), **self.chat_template_kwargs}
        render = partial(self.tokenizer.apply_chat_template, tokenize=False, **options)
        return self.outside_text.render(render, self.template_messages(messages))

    def encode(self, text: str, images: Sequence[Any] = (), *, is_start: bool = True) -> Encoded:
        """Token ids of a rendered text; `is_start` marks the start of a conversation. ValueError for images."""
        if images:
            raise ValueError(f"there are {len(images)} images in a conversation, but {self._no_images}")
        return Encoded(self.outside_text.encode(text, add_special_tokens=False), None)

    def num_image_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Number of tokens of images of these (height, width)."""
        return 0

    def num_tokens(self, row: dict[str, Any]) -> int:
        """Number of tokens of a row's prompt, images included."""
        return len(self._encode_row(row, check=False)[1].ids)

    def _unknown_token_message(self, prompt: Any, token: int) -> str:
        return (
            f"a prompt has the token {token}, but the model's embeddings have {self.num_embeddings} rows: "
            f"{excerpt(prompt)}; remove that token from the data set, or enlarge the embeddings with "
            "model.resize_token_embeddings(...)"
        )

    def too_long_message(self, prompt: Any, num_tokens: int) -> str:
        """Error message for a prompt that does not fit the model's context."""
        return (
            f"a prompt has {num_tokens} tokens, but the model has {self.max_context} positions for prompt and "
            f"completion together: {excerpt(prompt)}; filter such rows out of the data set or use a model with a "
            "longer context"
        )


MESSAGES_REMEDY = (
    'make the prompt a list of messages, [{"role": "user", "content": ...}], to which the trainer applies the chat '
    "template itself"
)
"""The mend for a text where a conversation is needed."""


def _block_text(block: Any) -> str | None:
    """The text of a content block of text; None for another block."""
    is_text = isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)
    return block["text"] if is_text else None


def drop_empty_fields(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the None values that Arrow adds for missing fields."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def join_continued(messages: Messages, number: int) -> Messages:
    """Messages with the one at `number` joined to the one before it, if both are an assistant's: one turn in two parts.

    Their contents are texts.
    """
    if not 0 < number < len(messages) or {m.get("role") for m in messages[number - 1 : number + 1]} != {"assistant"}:
        return messages
    first, second = messages[number - 1 : number + 1]
    joined = {**second, "content": (first.get("content") or "") + (second.get("content") or "")}
    return [*messages[: number - 1], joined, *messages[number + 1 :]]


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content blocks joined to one text; an image becomes its block type in brackets."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(str(block.get("text", f"[{block.get('type')}]")) for block in content)}


def check_dataset(
    dataset: Any, argument: str, prompt_maker: PromptMaker, *, may_lack_prompts: bool = False, renders: bool = True
) -> None:
    """Rejects a data set that cannot be trained on; `argument` names it in the message.

    TypeError for another class or rows that are no dicts; ValueError for a missing `prompt` column (unless
    `may_lack_prompts`), empty or malformed prompts, images that are unreadable or do not fit their messages, and
    prompts longer than the context. The first `DECODED_FIRST` images are decoded, of the others only the header is
    read. Of a stream only the first row is checked. With `renders` the first conversations are rendered, as they will
    be.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{argument} is a {type(dataset).__name__}; it must be a datasets.Dataset or datasets.IterableDataset: "
            "of a DatasetDict give one split, such as dataset['train'], and of a list of rows Dataset.from_list([...])"
        )
    first = first_row(dataset)
    is_read_as_dicts = not isinstance(dataset, Dataset) or dataset.format["type"] not in ("arrow", "pandas", "polars")
    if not is_read_as_dicts or not isinstance(first, (dict, type(None))):
        raise TypeError(f"{argument} has a format whose rows are no dicts; give dataset.with_format(None)")
    if first is None:
        raise ValueError(f"{argument} has no rows; give it at least one row with a 'prompt'")
    if "prompt" not in first and may_lack_prompts:
        return
    if "prompt" not in first:
        raise ValueError(
            f"{argument} has the columns {sorted(first)}, but no 'prompt' column; rename the column that holds the "
            "prompts: dataset.rename_column('...', 'prompt')"
        )
    # Every evaluation calls this again with the same data set.
    key = (str(getattr(dataset, "_fingerprint", "")), prompt_maker.max_context)
    if key[0] and key in prompt_maker.checked:
        return
    _check_prompts(dataset, argument, prompt_maker, RENDERED_FIRST if renders else 0)
    prompt_maker.checked.add(key)


def _check_prompts(
    dataset: Dataset | IterableDataset, argument: str, prompt_maker: PromptMaker, num_rendered: int
) -> None:
    too_long: list[tuple[int, Any]] = []
    is_encoded, num_decoded = False, 0
    for number, row in enumerate(prompt_rows(dataset)):
        prompt = row["prompt"]
        problem = _malformed(prompt, prompt_maker)
        if problem:
            raise ValueError(f"row {number} of {argument}: {problem}")
        with _named(number, argument):
            sizes = prompt_maker.check_images(row, decode=num_decoded < DECODED_FIRST)
        num_decoded += len(sizes)
        if number < num_rendered and not isinstance(prompt, str) and not sizes:
            _check_rendering(prompt, number, argument, prompt_maker)
        limit = prompt_maker.max_context
        if limit is not None and _may_exceed(prompt, limit - prompt_maker.num_image_tokens(sizes)):
            with _named(number, argument):
                num_tokens = prompt_maker.num_tokens(row)
            if num_tokens >= limit:
                too_long.append((num_tokens, prompt))
                continue
        if sizes and not is_encoded:
            # One prompt is encoded to test that its images, the processor and the chat template fit together.
            with _named(number, argument):
                prompt_maker(row, 0)
            is_encoded = True
    if too_long:
        num_tokens, prompt = max(too_long, key=lambda item: item[0])
        raise ValueError(
            f"{len(too_long)} prompts of {argument} are too long; the longest: "
            f"{prompt_maker.too_long_message(prompt, num_tokens)}"
        )


def _check_rendering(prompt: Messages, number: int, argument: str, prompt_maker: PromptMaker) -> None:
    """ValueError if the chat template raises on a conversation."""
    try:
        prompt_maker.render(prompt)
    except Exception as error:  # templates raise anything
        raise ValueError(
            f"row {number} of {argument}: the chat template cannot render {excerpt(prompt)}: {type(error).__name__}: "
            f"{error}; change the row's messages, chat_template_kwargs or processing_class.chat_template"
        ) from error


@contextmanager
def _named(number: int, argument: str) -> Iterator[None]:
    """Adds the row's number to the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"row {number} of {argument}: {error}") from error


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
    """False if the prompt is certainly short enough: a text has at most one token a byte, plus the template's."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + 2 >= max_context
    size = sum(len(str(as_text(message).get("content", "")).encode()) for message in prompt)
    return size + TEMPLATE_ALLOWANCE >= max_context


def excerpt(prompt: Any, width: int = 200) -> str:
    """The beginning and the end of a prompt, for a message."""
    text = prompt if isinstance(prompt, str) else repr(prompt)
    return repr(text if len(text) <= width else text[: width // 2] + " ... " + text[-width // 2 :])
