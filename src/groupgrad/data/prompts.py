"""Rows of a data set to prompts of token ids, and the checks that a data set must pass before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset

from groupgrad.data.columns import first_row, prompt_rows
from groupgrad.data.images import ImageSource, column_images, image_blocks
from groupgrad.types import Media, Messages, Prompt

# A chat template may add this many tokens to the text of a conversation before a prompt is measured exactly.
TEMPLATE_ALLOWANCE = 1024

DECODED_FIRST = 256
"""Images of a data set that are read to the end before training; of the others only the beginning of the file."""


@dataclass(slots=True, frozen=True)
class Encoded:
    """A rendered text with its images as the model takes them."""

    ids: list[int]
    """Placeholders of images included, as many as the model has features of each."""
    media: Media | None
    """None without images."""


class PromptMaker:
    """Tokenises prompts: text as it is, messages through the chat template with a generation prompt.

    Rows with images are refused; `no_images` says why, and what to do (`VisionPromptMaker` takes them).
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_context: int | None = None,
        *,
        no_images: str = "the model reads text alone",
    ):
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.max_context = max_context
        """Positions that the model has, prompt and completion together; None if unbounded."""
        self._no_images = no_images
        self.checked: set[tuple[str, int | None]] = set()
        """Data sets whose rows are known to be good, by fingerprint and context."""

    def __call__(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row. ValueError for one with images, or that leaves no room for a completion."""
        self.check_images(row)
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
            self.template_messages(prompt),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        ids = rendered["input_ids"]
        return list(ids[0] if ids and isinstance(ids[0], list) else ids)

    def check_images(
        self, row: dict[str, Any], place: ImageSource | None = None, *, decode: bool = False
    ) -> list[tuple[int, int]]:
        """The (height, width) of a row's images; ValueError for images that no prompt can be made with. `place` names
        the row in messages. With `decode` they are read to the end."""
        column, images = column_images(row)
        if not images and not isinstance(row["prompt"], str):
            column, images = "prompt", list(image_blocks(row["prompt"]))
        if images:
            raise ValueError(f"there is {replace(place or ImageSource(''), column=column)}, but {self._no_images}")
        return []

    def prompt_with_opened_images(self, row: dict[str, Any]) -> str | Messages:
        """The row's prompt, its images in its messages."""
        return row["prompt"]

    def prompt_with_images(self, row: dict[str, Any]) -> str | Messages:
        """The row's prompt, its images in their messages as they are."""
        return row["prompt"]

    def conversation_images(self, messages: Messages) -> list[Any]:
        """The images in a conversation that prompts are made with, in their order."""
        return []

    def template_messages(self, messages: Messages) -> Messages:
        """The messages in the form that the chat template takes."""
        return [as_text(message) for message in drop_empty_fields(messages)]

    def render(self, messages: Messages) -> str:
        """A conversation as text, generation prompt included, with one placeholder for each image."""
        return self.tokenizer.apply_chat_template(
            self.template_messages(messages), tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )

    def encode(self, text: str, images: Sequence[Any] = (), *, is_start: bool = True) -> Encoded:
        """Token ids of a rendered text, which begins a conversation if `is_start`. ValueError for images."""
        if images:
            raise ValueError(f"there are {len(images)} images in a conversation, but {self._no_images}")
        return Encoded(list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), None)

    def num_image_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of images of these (height, width), as near as can be told without the images."""
        return 0

    def num_tokens(self, row: dict[str, Any]) -> int:
        """Tokens of a row's prompt."""
        return len(self.token_ids(row["prompt"]))

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


def as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a template for text takes it: content blocks become one text, in which an image is only named."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(str(block.get("text", f"[{block.get('type')}]")) for block in content)}


def check_dataset(dataset: Any, argument: str, prompt_maker: PromptMaker, *, may_lack_prompts: bool = False) -> None:
    """Refuse a data set that cannot be trained on; `argument` names it in the message.

    TypeError for something that is no data set; ValueError for a missing `prompt` column, empty or malformed prompts,
    images that cannot be had or do not fit their messages, and prompts longer than the model's context (counted, one
    shown). The first images are decoded, of the others only the file's beginning is read. Of a stream only the first
    row is looked at. With `may_lack_prompts` the column may be missing.
    """
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(
            f"{argument} is a {type(dataset).__name__}; it must be a datasets.Dataset or datasets.IterableDataset "
            "(datasets.Dataset.from_list([...]) makes one from a list of rows)"
        )
    first = first_row(dataset)
    if first is None:
        raise ValueError(f"{argument} has no rows; give it at least one row with a 'prompt'")
    if "prompt" not in first and may_lack_prompts:
        return
    if "prompt" not in first:
        raise ValueError(
            f"{argument} has the columns {sorted(first)}, but no 'prompt' column; rename the column that holds the "
            "prompts: dataset.rename_column('...', 'prompt')"
        )
    # An evaluation set comes here before every evaluation.
    known = (str(getattr(dataset, "_fingerprint", "")), prompt_maker.max_context)
    if known[0] and known in prompt_maker.checked:
        return
    _check_prompts(dataset, argument, prompt_maker)
    prompt_maker.checked.add(known)


def _check_prompts(dataset: Dataset | IterableDataset, argument: str, prompt_maker: PromptMaker) -> None:
    too_long: list[tuple[int, Any]] = []
    is_tried, num_decoded = False, 0
    for number, row in enumerate(prompt_rows(dataset)):
        prompt = row["prompt"]
        problem = _malformed(prompt, prompt_maker)
        if problem:
            raise ValueError(f"row {number} of {argument}: {problem}")
        sizes = prompt_maker.check_images(
            row, ImageSource("image", number, argument), decode=num_decoded < DECODED_FIRST
        )
        num_decoded += len(sizes)
        longest = prompt_maker.max_context
        if longest is not None and _may_exceed(prompt, longest - prompt_maker.num_image_tokens(sizes)):
            with _named(number, argument):
                num_tokens = prompt_maker.num_tokens(row)
            if num_tokens >= longest:
                too_long.append((num_tokens, prompt))
                continue
        if sizes and not is_tried:
            # Do its images, the processor and the chat template go together?
            with _named(number, argument):
                prompt_maker(row, 0)
            is_tried = True
    if too_long:
        num_tokens, prompt = max(too_long, key=lambda item: item[0])
        raise ValueError(
            f"{len(too_long)} prompts of {argument} are too long; the longest: "
            f"{prompt_maker.too_long_message(prompt, num_tokens)}"
        )


@contextmanager
def _named(number: int, argument: str) -> Iterator[None]:
    """What is wrong with a row inside is said with the row's number."""
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
    """Quick test: a tokenizer gives at most one token a byte, plus what the template adds."""
    if isinstance(prompt, str):
        return len(prompt.encode()) + 2 >= max_context
    size = sum(len(str(as_text(message).get("content", "")).encode()) for message in prompt)
    return size + TEMPLATE_ALLOWANCE >= max_context


def _excerpt(prompt: Any, width: int = 200) -> str:
    text = prompt if isinstance(prompt, str) else repr(prompt)
    return repr(text if len(text) <= width else text[: width // 2] + " ... " + text[-width // 2 :])
