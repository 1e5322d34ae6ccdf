"""Prompts with images: rows to messages with pictures in their places, and those to token ids and model inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from groupgrad import compat
from groupgrad.data.images import (
    ImageSource,
    column_images,
    digest,
    image_blocks,
    image_of_block,
    is_image_block,
    open_image,
    size_of,
)
from groupgrad.data.prompts import Encoded, PromptMaker, as_text, drop_empty_fields
from groupgrad.types import Media, Messages, Prompt

SIZES_TRIED = 64
"""Sizes of images that a processor is tried at, if it does not say how many tokens they are."""

_PROBE = "Probe7Text"


class VisionError(ValueError):
    """A conversation and its images that do not fit each other, or the processor; the message says what to do."""


def is_processor(processing_class: Any) -> bool:
    """True if it makes model inputs of images as well as of text."""
    return getattr(processing_class, "image_processor", None) is not None and callable(processing_class)


def tokenizer_with_processor_template(processor: Any, tokenizer: Any) -> Any:
    """The tokenizer with the processor's chat template, a copy if it has another or none. It shares its vocabulary."""
    template = getattr(processor, "chat_template", None)
    if template is None or template == getattr(tokenizer, "chat_template", None):
        return tokenizer
    speaking = copy.copy(tokenizer)
    speaking.chat_template = template
    return speaking


class VisionPromptMaker(PromptMaker):
    """Makes prompts of rows with and without images; the processor is called once a prompt, for that prompt alone.

    Images come from the row's `images` or `image` column and from content blocks. Those of a column take the places of
    the blocks without an image of their own, or the front of the first user message if there is no block at all.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_context: int | None = None,
    ):
        compat.require("pillow", "training on images")
        super().__init__(tokenizer_with_processor_template(processor, tokenizer), chat_template_kwargs, max_context)
        self.processor = processor
        self.placeholder: str | None = getattr(processor, "image_token", None)
        """The text that stands for one image in a rendered conversation; None if the processor does not say."""
        self._shown: dict[tuple[str, bool], bool] = {}
        self._tokens_of_size: dict[tuple[int, int], int] = {}

    def __call__(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row, with its images in the messages of `Prompt.row`.

        ImageError or VisionError for images that cannot be had or do not fit; ValueError for a prompt that leaves no
        room for a completion.
        """
        messages = messages_with_images(row)
        if messages is None:
            return super().__call__(row, group)
        encoded = self.encode(self.render(messages), conversation_images(messages))
        if self.max_context is not None and len(encoded.ids) >= self.max_context:
            raise ValueError(self.too_long_message(messages, len(encoded.ids)))
        return Prompt(ids=encoded.ids, row={**row, "prompt": messages}, group=group, media=encoded.media)

    def check_images(
        self, row: dict[str, Any], place: ImageSource | None = None, *, decode: bool = False
    ) -> list[tuple[int, int]]:
        """The (height, width) of a row's images, which are only decoded with `decode`.

        ImageError or VisionError for images that are missing, cannot be read or do not fit the messages, and for a text
        that has placeholders of its own.
        """
        try:
            messages = messages_with_images(row, place, opened=False)
        except VisionError as error:
            raise VisionError(f"{_row_name(place)}{error}") from error
        if messages is None:
            self._check_text(row["prompt"], place)
            return []
        self._check_text(messages, place)
        name = column_images(row)[0] or "prompt"
        sizes = []
        for i, image in enumerate(conversation_images(messages)):
            at = _place_of(name, i, place)
            sizes.append(size_of(open_image(image, at) if decode else image, at))
        return sizes

    def num_image_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Tokens of images of these (height, width): the placeholders that the processor says; if it does not say,
        what it makes of a blank image of the size, and for sizes after the first `SIZES_TRIED` the most it made so
        far."""
        if not sizes:
            return 0
        try:
            return sum(self.processor._get_num_multimodal_tokens(image_sizes=list(map(list, sizes))).num_image_tokens)
        except Exception:  # a method of the library's own, which not every processor has, or has in full
            return sum(map(self._num_tokens_of_blank, sizes))

    def _num_tokens_of_blank(self, size: tuple[int, int]) -> int:
        from PIL import Image

        if size not in self._tokens_of_size and len(self._tokens_of_size) >= SIZES_TRIED:
            return max(self._tokens_of_size.values())
        if size not in self._tokens_of_size:
            height, width = size
            try:
                text = self.placeholder or self.render([{"role": "user", "content": [{"type": "image"}]}])
                found = len(self.encode(text, [Image.new("RGB", (width, height))]).ids)
            except Exception:  # templates and processors raise what they like; the row itself will tell
                found = 0
            self._tokens_of_size[size] = found
        return self._tokens_of_size[size]

    def num_tokens(self, row: dict[str, Any]) -> int:
        """Tokens of a row's prompt, images included."""
        messages = messages_with_images(row)
        if messages is None:
            return super().num_tokens(row)
        return len(self.encode(self.render(messages), conversation_images(messages)).ids)

    def token_ids(self, prompt: str | Messages) -> list[int]:
        """Token ids of a text or of a conversation without images."""
        if isinstance(prompt, str):
            return super().token_ids(prompt)
        return self.encode(self.render(prompt)).ids

    def template_messages(self, messages: Messages) -> Messages:
        """The messages in the form that the chat template shows: texts or content blocks, images as bare blocks."""
        return [self._readable(message) for message in drop_empty_fields(messages)]

    def prompt_with_images(self, row: dict[str, Any]) -> str | Messages:
        """The row's prompt, its images in their messages as they are."""
        messages = messages_with_images(row, opened=False)
        return row["prompt"] if messages is None else messages

    def conversation_images(self, messages: Messages) -> list[Any]:
        """The images in a conversation, in their order."""
        return conversation_images(messages)

    def prompt_with_opened_images(self, row: dict[str, Any]) -> str | Messages:
        """The row's prompt, its images opened and in its messages."""
        messages = messages_with_images(row)
        return row["prompt"] if messages is None else messages

    def encode(self, text: str, images: Sequence[Any] = (), *, is_start: bool = True) -> Encoded:
        """Token ids and model inputs of a rendered text with its images, in the order of their placeholders.

        Unless it begins a conversation (`is_start`) no token is put before it. VisionError if there are not as many
        placeholders as images, or the processor fails at them.
        """
        self._check_places(text, len(images))
        adds_specials = is_start and self._adds_specials(text)
        if not images:
            made = self.tokenizer(text, add_special_tokens=adds_specials, verbose=False)
            return Encoded(list(made["input_ids"]), None)
        try:
            made = self.processor(
                text=[text],
                images=[list(images)],
                return_tensors="pt",
                add_special_tokens=adds_specials,
            )
        except Exception as error:  # processors raise what their parts raise
            raise VisionError(
                f"{type(self.processor).__name__} failed at a prompt with {len(images)} images of "
                f"{', '.join(f'{image.width}x{image.height}' for image in images)} pixels: "
                f"{type(error).__name__}: {error}"
            ) from error
        return _encoded(made, images, getattr(self.processor, "image_token_id", None))

    def _adds_specials(self, text: str) -> bool:
        """Processors leave it to the tokenizer to begin a text, unless the template has begun it already."""
        begin = self.tokenizer.bos_token
        return not (begin and text.startswith(begin))

    def _check_places(self, text: str, num_images: int) -> None:
        if self.placeholder is None or text.count(self.placeholder) == num_images:
            return
        raise VisionError(
            f"a prompt has {num_images} images, but its rendered text has {text.count(self.placeholder)} times the "
            f"placeholder {self.placeholder!r}; leave the placeholder out of texts, and use a chat template that "
            "writes it once for each content block of the type 'image' (processing_class.chat_template)"
        )

    def _check_text(self, prompt: str | Messages, place: ImageSource | None) -> None:
        """VisionError for a text in which the placeholder of an image is written out."""
        texts = [prompt] if isinstance(prompt, str) else [str(as_text(message).get("content")) for message in prompt]
        if self.placeholder is not None and any(self.placeholder in text for text in texts):
            raise VisionError(
                f"{_row_name(place)}its prompt has the text {self.placeholder!r}, which stands for an image and has "
                "none; use a content block of the type 'image' for an image, or take it out of the text"
            )

    def _readable(self, message: dict[str, Any]) -> dict[str, Any]:
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, str):
            if self._shows(role, blocks=False) or not self._shows(role, blocks=True):
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            return message
        blocks = [_bare(block) for block in content]
        texts = all(block.get("type") == "text" for block in blocks)
        if texts and not self._shows(role, blocks=True):
            return {**message, "content": "".join(str(block.get("text", "")) for block in blocks)}
        return {**message, "content": blocks}

    def _shows(self, role: str, *, blocks: bool) -> bool:
        """Whether the template writes the text of such a message, as text or in content blocks."""
        if (role, blocks) not in self._shown:
            self._shown[role, blocks] = any(self._tries(role, blocks, around) for around in (blocks, not blocks))
        return self._shown[role, blocks]

    def _tries(self, role: str, blocks: bool, around: bool) -> bool:
        before = {"assistant": ["user"], "tool": ["user", "assistant"]}.get(role, [])
        after = ["user"] if role in ("system", "developer") else []
        messages = [
            *({"role": other, "content": _said("Other", around)} for other in before),
            {"role": role, "content": _said(_PROBE, blocks)},
            *({"role": other, "content": _said("Other", around)} for other in after),
        ]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)
        except Exception:  # templates raise what they like
            return False
        # A list that is written as Python shows it has its keys around the text.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def messages_with_images(
    row: Mapping[str, Any], at: ImageSource | None = None, *, opened: bool = True
) -> Messages | None:
    """The row's conversation with every image in its content block; None for a row without images.

    Unless they are to be `opened`, images stay as the row has them; `at` names the row in messages. ImageError for one
    that cannot be had; VisionError for a text prompt, and for columns and blocks that do not fit each other.
    """
    prompt = row.get("prompt")
    column, given = column_images(row)
    if isinstance(prompt, str) or prompt is None:
        if given:
            raise VisionError(
                f"a row has images in '{column}' and the text prompt {str(prompt)[:80]!r}, but images need "
                'conversations; make the prompt a list of messages: [{"role": "user", "content": ...}]'
            )
        return None
    blocks = list(image_blocks(prompt))
    if not given and not blocks:
        return None
    messages = [dict(message) for message in drop_empty_fields(prompt)]
    if not blocks:
        _put_in_front(messages, len(given), column)
    elif (places := sum(image_of_block(block) is None for block in blocks)) != len(given):
        raise VisionError(
            f"a row has {len(given)} images in {f'{column!r}' if column else 'its columns'}, but its messages have "
            f"{places} places for them (content blocks of the type 'image' without an image of their own); give as "
            "many images as places, or leave the blocks out to have all images put before the first user message"
        )
    waiting, number = iter(given), 0
    for message in messages:
        if not isinstance(message.get("content"), (list, tuple)):
            continue
        filled: list[Any] = []
        for block in message["content"]:
            if not is_image_block(block):
                filled.append(_filled(block))
                continue
            image, name = image_of_block(block), "prompt"
            if image is None:
                image, name = next(waiting), column
            place = _place_of(name, number, at)
            number += 1
            filled.append({"type": "image", "image": open_image(image, place) if opened else image})
        message["content"] = filled
    return messages


def conversation_images(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images in a conversation's blocks, in their order."""
    return [image_of_block(block) for block in image_blocks(messages)]


def replace_ids(prompt: Prompt, ids: list[int]) -> Prompt:
    """The prompt with token ids that somebody else made of it. VisionError if they have not as many placeholders of
    images as the prompt's images are tokens."""
    media = prompt.media
    if media is None or ids == prompt.ids:
        return replace(prompt, ids=ids)
    token_tensors = {}
    for name, types in media.token_tensors.items():
        type_of = {token: kind for token, kind in zip(prompt.ids, types.tolist()) if kind}
        found = [type_of.get(token, 0) for token in ids]
        wanted, given = int((types != 0).sum()), sum(kind != 0 for kind in found)
        if given != wanted:
            raise VisionError(
                f"there are {given} tokens of images among them, but the prompt's {len(media.images)} images are "
                f"{wanted} tokens; make them with the trainer's own processor"
            )
        token_tensors[name] = torch.tensor(found, dtype=types.dtype)
    return replace(prompt, ids=ids, media=replace(media, token_tensors=token_tensors))


def example_prompt(
    processing_class: Any, *, images: Sequence[Any] | None = None, text: str = "Describe the image."
) -> Prompt | None:
    """A prompt with a small picture (or `images`), made by the user's processor as those of the data set are, to try a
    model on. None if it is no processor, or has no chat template to place images with."""
    if not is_processor(processing_class):
        return None
    maker = VisionPromptMaker(processing_class, processing_class.tokenizer)
    if not getattr(maker.tokenizer, "chat_template", None):
        return None
    blocks = [{"type": "image", "image": image} for image in images or [_example_picture()]]
    return maker({"prompt": [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]}, 0)


def _example_picture() -> Any:
    """Stripes of all colours: no two patches look alike."""
    from PIL import Image

    rows = [[(5 * x, 6 * y, (37 * x + 11 * y) % 256) for x in range(48)] for y in range(40)]
    return Image.fromarray(np.array(rows, dtype=np.uint8))


def _encoded(made: Mapping[str, Any], images: Sequence[Any], placeholder: int | None) -> Encoded:
    """What a processor gave for one prompt, taken apart into what belongs to tokens and what to images.

    Which tokens are images is always said, so that nobody takes a placeholder that the policy samples for one.
    """
    ids = made["input_ids"]
    tensors, token_tensors = {}, {}
    for name, value in made.items():
        if name in ("input_ids", "attention_mask") or not isinstance(value, torch.Tensor):
            continue
        if name.endswith("token_type_ids"):
            token_tensors[name] = value[0]
        else:
            tensors[name] = value
    if not token_tensors and placeholder is not None:
        token_tensors["mm_token_type_ids"] = (ids[0] == placeholder).long()
    return Encoded(ids[0].tolist(), Media(tuple(images), tensors, token_tensors, digest(images)))


def _place_of(column: str, number: int, row: ImageSource | None) -> ImageSource:
    """The place of one of a row's images; a column `image` has one alone."""
    return replace(row or ImageSource(column), column=column, number=None if column == "image" else number)


def _row_name(place: ImageSource | None) -> str:
    """The beginning of a message about a row."""
    return "" if place is None else f"row {place.row} of {place.dataset}: "


def _put_in_front(messages: Messages, num_images: int, column: str) -> None:
    """Places for images before whatever the first user message says."""
    for message in messages:
        if message.get("role") == "user":
            content = message.get("content")
            said = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
            message["content"] = [*({"type": "image"} for _ in range(num_images)), *said]
            return
    raise VisionError(
        f"a row has {num_images} images in '{column}', but no message of the user's to put them in; add one, or "
        "content blocks of the type 'image' where they belong"
    )


def _filled(block: Any) -> Any:
    """A block without the None entries that a columnar store adds."""
    return {key: value for key, value in block.items() if value is not None} if isinstance(block, Mapping) else block


def _bare(block: Any) -> dict[str, Any]:
    """A block as templates know it, without the image itself."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    return {"type": "image"} if is_image_block(block) else _filled(block)


def _said(text: str, blocks: bool) -> Any:
    return [{"type": "text", "text": text}] if blocks else text
