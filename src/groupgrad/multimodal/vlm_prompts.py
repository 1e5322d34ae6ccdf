"""Images in prompts and in tool replies: puts them into messages, and makes token ids and model inputs of them."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from groupgrad import compat
from groupgrad.data.images import (
    ImageError,
    ImageSource,
    column_images,
    digest,
    image_blocks,
    image_of_block,
    is_image_block,
    open_image,
    size_of,
)
from groupgrad.data.outside_text import has_marks
from groupgrad.data.prompts import MESSAGES_REMEDY, Encoded, PromptMaker, as_text, drop_empty_fields
from groupgrad.scoring.vlm import concat_media_tensors
from groupgrad.types import Media, Messages, Prompt

_PROBE = "Probe7Text"


class VisionError(ValueError):
    """Images that do not fit their conversation or the processor; the message says what to do."""


def is_processor(processing_class: Any) -> bool:
    """True for a processor of images and text."""
    return getattr(processing_class, "image_processor", None) is not None and callable(processing_class)


def tokenizer_with_processor_template(processor: Any, tokenizer: Any) -> Any:
    """The tokenizer with the processor's chat template; a shallow copy if its own template differs."""
    template = getattr(processor, "chat_template", None)
    if template is None or template == getattr(tokenizer, "chat_template", None):
        return tokenizer
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


class VisionPromptMaker(PromptMaker):
    """Makes prompts of rows with and without images; the processor is called once a prompt.

    Images come from the row's `images` or `image` column and from content blocks. Images of a column fill the image
    blocks without an image; without any image block they go in front of the first user message.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_context: int | None = None,
        *,
        special_tokens: str = "auto",
        image_root: str | None = None,
    ):
        compat.require("pillow", "training on images")
        tokenizer = tokenizer_with_processor_template(processor, tokenizer)
        super().__init__(
            tokenizer, chat_template_kwargs, max_context, special_tokens=special_tokens, image_root=image_root
        )
        self.processor = processor
        self.placeholder: str | None = compat.image_placeholder(processor)
        """Text of one image in a rendered conversation; None if the processor does not name it."""
        self._template_writes: dict[tuple[str, bool], bool] = {}

    def _encode_row(self, row: dict[str, Any], *, check: bool) -> tuple[str | Messages, Encoded]:
        """A row's prompt with its images opened, and its model inputs; `check` runs `check_images` on rows without.

        ImageError or VisionError for images that are unreadable or do not fit the prompt.
        """
        messages = messages_with_images(row, self.image_root)
        if messages is None:
            if check:
                self.check_images(row)
            return super()._encode_row(row, check=False)
        return messages, self.encode(self.render(messages), self.conversation_images(messages))

    def check_images(self, row: dict[str, Any], *, decode: bool = False) -> list[tuple[int, int]]:
        """The (height, width) of a row's images, decoded only with `decode`.

        ImageError or VisionError for images that are missing, unreadable or do not fit the messages, and for texts that
        contain the placeholder of an image.
        """
        messages = messages_with_images(row, self.image_root, opened=False)
        self._check_text(row["prompt"] if messages is None else messages)
        name = column_images(row)[0] or "prompt"
        sizes = []
        for i, image in enumerate(self.conversation_images(messages or [])):
            of_image = _image_source(name, i, self.image_root)
            sizes.append(size_of(open_image(image, of_image) if decode else image, of_image))
        return sizes

    def num_image_tokens(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Number of tokens of images of these (height, width), as the processor computes it.

        More than any context for a processor that does not, so that each prompt with images is encoded and measured.
        """
        if not sizes:
            return 0
        try:
            return sum(self.processor._get_num_multimodal_tokens(image_sizes=list(map(list, sizes))).num_image_tokens)
        except Exception:  # a private method that some processors lack or implement in part
            return sys.maxsize

    def template_messages(self, messages: Messages) -> Messages:
        """Messages in the form that the chat template renders: texts or content blocks, image blocks without image."""
        return [self._mark_message(self._template_message(message)) for message in drop_empty_fields(messages)]

    def prompt_with_images(self, row: dict[str, Any], *, opened: bool) -> str | Messages:
        """The row's prompt with its images in the messages, opened or as the row has them."""
        messages = messages_with_images(row, self.image_root, opened=opened)
        return row["prompt"] if messages is None else messages

    def conversation_images(self, messages: Messages) -> list[Any]:
        """The images in a conversation, in their order."""
        return [image_of_block(block) for block in image_blocks(messages)]

    def encode(self, text: str, images: Sequence[Any] = (), *, is_start: bool = True) -> Encoded:
        """Token ids and model inputs of a rendered text with its images, in the order of their placeholders.

        Only text at the start of a conversation (`is_start`) gets a beginning-of-sequence token. VisionError if the
        numbers of placeholders and images differ, or the processor fails.
        """
        self._check_placeholders(text, len(images))
        begin = self.tokenizer.bos_token
        adds_specials = is_start and not (begin and text.startswith(begin))  # the chat template may have written it
        if not images:
            ids = self.outside_text.encode(text, add_special_tokens=adds_specials, is_continued=True)
            return Encoded(ids, None)
        processor, is_marked = self.processor, has_marks(text)
        if is_marked:
            processor = copy.copy(processor)
            processor.tokenizer = self.outside_text.marking_tokenizer
        try:
            encoded = processor(
                text=[self.outside_text.with_one_mark(text)],
                images=[list(images)],
                return_tensors="pt",
                add_special_tokens=adds_specials,
            )
        except Exception as error:  # processors raise anything
            raise VisionError(
                f"{type(self.processor).__name__} failed at a prompt with {len(images)} images of "
                f"{', '.join(f'{image.width}x{image.height}' for image in images)} pixels: "
                f"{type(error).__name__}: {error}"
            ) from error
        result = _encoded(encoded, images, getattr(self.processor, "image_token_id", None))
        result = self._expanded(result, text) if is_marked else result
        return self._without_superfluous(result) if adds_specials else result

    def _without_superfluous(self, encoded: Encoded) -> Encoded:
        """The inputs without tokens that the tokenizer added and that a prompt must not have."""
        assert encoded.media is not None
        start, num_behind = self.outside_text.superfluous(encoded.ids)
        kept = slice(start, len(encoded.ids) - num_behind)
        types = {name: values[kept] for name, values in encoded.media.token_tensors.items()}
        return Encoded(encoded.ids[kept], replace(encoded.media, token_tensors=types))

    def _expanded(self, encoded: Encoded, text: str) -> Encoded:
        """The inputs with each mark of the text replaced by the ordinary tokens that it stands for."""
        assert encoded.media is not None
        pieces = self.outside_text.expansions(text, encoded.ids)
        lengths = torch.tensor([len(piece) for piece in pieces])
        types = {name: values.repeat_interleave(lengths) for name, values in encoded.media.token_tensors.items()}
        return Encoded([number for piece in pieces for number in piece], replace(encoded.media, token_tensors=types))

    def _check_placeholders(self, text: str, num_images: int) -> None:
        if self.placeholder is None or text.count(self.placeholder) == num_images:
            return
        raise VisionError(
            f"a prompt has {num_images} images, but its rendered text has {text.count(self.placeholder)} times the "
            f"placeholder {self.placeholder!r}; leave the placeholder out of texts, and use a chat template that "
            "writes it once for each content block of the type 'image' (processing_class.chat_template)"
        )

    def _check_text(self, prompt: str | Messages) -> None:
        """VisionError for a text that contains the placeholder of an image."""
        texts = [prompt] if isinstance(prompt, str) else [str(as_text(message).get("content")) for message in prompt]
        if self.placeholder is not None and any(self.placeholder in text for text in texts):
            raise VisionError(
                f"its prompt has the text {self.placeholder!r}, which stands for an image and has "
                "none; use a content block of the type 'image' for an image, or take it out of the text"
            )

    def _template_message(self, message: dict[str, Any]) -> dict[str, Any]:
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, str):
            if self._writes(role, blocks=False) or not self._writes(role, blocks=True):
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list):
            return message
        blocks = [_without_image(block) for block in content]
        is_text = all(block.get("type") == "text" for block in blocks)
        if is_text and not self._writes(role, blocks=True):
            return {**message, "content": "".join(str(block.get("text", "")) for block in blocks)}
        return {**message, "content": blocks}

    def _writes(self, role: str, *, blocks: bool) -> bool:
        """True if the template writes the text of a message of this role, given as text or in content blocks."""
        key = role, blocks
        if key not in self._template_writes:
            self._template_writes[key] = any(
                self._writes_probe(role, blocks, around) for around in (blocks, not blocks)
            )
        return self._template_writes[key]

    def _writes_probe(self, role: str, blocks: bool, around: bool) -> bool:
        """Renders a message between others, which have content blocks if `around`, and searches for its text."""
        before = {"assistant": ["user"], "tool": ["user", "assistant"]}.get(role, [])
        after = ["user"] if role in ("system", "developer") else []
        messages = [
            *({"role": other, "content": _content("Other", around)} for other in before),
            {"role": role, "content": _content(_PROBE, blocks)},
            *({"role": other, "content": _content("Other", around)} for other in after),
        ]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)
        except Exception:  # templates raise anything
            return False
        # A template that prints a list as Python does puts the text in quotes.
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def messages_with_images(row: Mapping[str, Any], root: str = "", *, opened: bool = True) -> Messages | None:
    """The row's conversation with every image in its content block; None for a row without images.

    Images are opened, below the folder `root` if it is not empty, or stay as the row has them. ImageError for an
    unreadable image; VisionError for a text prompt, and for a number of images that is not that of their blocks.
    """
    prompt = row.get("prompt")
    column, images = column_images(row)
    if isinstance(prompt, str) or prompt is None:
        if images:
            raise VisionError(
                f"a row has images in '{column}' and the text prompt {str(prompt)[:80]!r}, but images need "
                f"conversations; {MESSAGES_REMEDY}"
            )
        return None
    blocks = list(image_blocks(prompt))
    if not images and not blocks:
        return None
    messages = [dict(message) for message in drop_empty_fields(prompt)]
    if not blocks:
        _insert_blocks(messages, len(images), column)
    elif (num_empty := sum(image_of_block(block) is None for block in blocks)) != len(images):
        raise VisionError(
            f"a row has {len(images)} images in {f'{column!r}' if column else 'its columns'}, but its messages have "
            f"{num_empty} places for them (content blocks of the type 'image' without an image of their own); give as "
            "many images as places, or leave the blocks out to have all images put before the first user message"
        )
    remaining, numbers = iter(images), itertools.count()

    def filled(block: Any) -> Any:
        if not is_image_block(block):
            return _without_none(block)
        image, name = image_of_block(block), "prompt"
        if image is None:
            image, name = next(remaining), column
        if opened:
            image = open_image(image, _image_source(name, next(numbers), root))
        return {"type": "image", "image": image}

    for message in messages:
        if isinstance(message.get("content"), (list, tuple)):
            message["content"] = [filled(block) for block in message["content"]]
    return messages


def replace_ids(prompt: Prompt, ids: list[int]) -> Prompt:
    """The prompt with other token ids, which a `rollout_func` made of it.

    VisionError if their number of image tokens is not that of the prompt's images.
    """
    media = prompt.media
    if media is None or ids == prompt.ids:
        return replace(prompt, ids=ids)
    token_tensors = {}
    for name, types in media.token_tensors.items():
        type_of = {token: kind for token, kind in zip(prompt.ids, types.tolist()) if kind}
        new_types = [type_of.get(token, 0) for token in ids]
        expected, actual = int((types != 0).sum()), sum(kind != 0 for kind in new_types)
        if actual != expected:
            raise VisionError(
                f"there are {actual} tokens of images among them, but the prompt's {len(media.images)} images are "
                f"{expected} tokens; make them with the trainer's own processor"
            )
        token_tensors[name] = torch.tensor(new_types, dtype=types.dtype)
    return replace(prompt, ids=ids, media=replace(media, token_tensors=token_tensors))


def example_prompt(
    processing_class: Any, *, images: Sequence[Any] | None = None, text: str = "Describe the image."
) -> Prompt | None:
    """A prompt with a small image (or `images`) from the user's processor, to test a model with.

    None for a tokenizer, or a processor without chat template.
    """
    if not is_processor(processing_class):
        return None
    maker = VisionPromptMaker(processing_class, processing_class.tokenizer)
    if not getattr(maker.tokenizer, "chat_template", None):
        return None
    blocks = [{"type": "image", "image": image} for image in images or [_example_image()]]
    return maker({"prompt": [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]}, 0)


def _example_image() -> Any:
    """An RGB image of which no two patches are equal."""
    from PIL import Image

    rows = [[(5 * x, 6 * y, (37 * x + 11 * y) % 256) for x in range(48)] for y in range(40)]
    return Image.fromarray(np.array(rows, dtype=np.uint8))


def _encoded(encoded: Mapping[str, Any], images: Sequence[Any], placeholder: int | None) -> Encoded:
    """Splits a processor's output for one prompt into tensors of tokens and of images.

    Token types are added where the processor returns none: they tell images from placeholders that the policy samples.
    """
    ids = encoded["input_ids"]
    tensors, token_tensors = {}, {}
    for name, value in encoded.items():
        if name in ("input_ids", "attention_mask") or not isinstance(value, torch.Tensor):
            continue
        if name.endswith("token_type_ids"):
            token_tensors[name] = value[0]
        else:
            tensors[name] = value
    if not token_tensors and placeholder is not None:
        token_tensors["mm_token_type_ids"] = (ids[0] == placeholder).long()
    return Encoded(ids[0].tolist(), Media(tuple(images), tensors, token_tensors, digest(images)))


def _image_source(column: str, number: int, root: str) -> ImageSource:
    """The source of one of a row's images; the column `image` has only one."""
    return ImageSource(column, None if column == "image" else number, root=root)


def _insert_blocks(messages: Messages, num_images: int, column: str) -> None:
    """Inserts image blocks in front of the first user message's content."""
    for message in messages:
        if message.get("role") == "user":
            content = message.get("content")
            blocks = _content(content, True) if isinstance(content, str) else list(content or [])
            message["content"] = [*({"type": "image"} for _ in range(num_images)), *blocks]
            return
    raise VisionError(
        f"a row has {num_images} images in '{column}', but no message of the user's to put them in; add one, or "
        "content blocks of the type 'image' where they belong"
    )


def _without_none(block: Any) -> Any:
    """A block without the None values that Arrow adds for missing keys."""
    return {key: value for key, value in block.items() if value is not None} if isinstance(block, Mapping) else block


def _without_image(block: Any) -> dict[str, Any]:
    """A block as templates read it, without the image itself."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    return {"type": "image"} if is_image_block(block) else _without_none(block)


def _content(text: str, blocks: bool) -> Any:
    return [{"type": "text", "text": text}] if blocks else text


class ToolReplyEncoder:
    """Tokenises text that contains tool replies; the processor gets the images of the replies alone.

    Call it with the text, then `media_with_reply` for the row's images.
    """

    def __init__(self, prompt_maker: PromptMaker, replies: Messages):
        self._prompt_maker, self._images = prompt_maker, prompt_maker.conversation_images(replies)
        self._media: Media | None = None

    def __call__(self, text: str) -> list[int]:
        """Token ids of the text, without a token at its beginning."""
        encoded = self._prompt_maker.encode(text, self._images, is_start=False)
        self._media = encoded.media
        return encoded.ids

    def media_with_reply(self, before: Media | None, num_before: int, num_added: int) -> Media | None:
        """The images `before` of a row of `num_before` tokens, followed by those of the replies.

        `num_added` tokens at the end of the encoded text were appended to the row. Returns `before` if the replies have
        no images.
        """
        reply = self._media
        if reply is None:
            return before
        media = [reply] if before is None else [before, reply]
        images = tuple(image for item in media for image in item.images)
        token_tensors, none = {}, torch.zeros(0, dtype=torch.int64)
        for name in dict.fromkeys(name for item in media for name in item.token_tensors):
            old = none if before is None else before.token_tensors.get(name, none)
            new = reply.token_tensors.get(name, none)
            # Negative padding keeps the end of the encoded text.
            padded = pad(old, (0, num_before - len(old))), pad(new, (num_added - len(new), 0))
            token_tensors[name] = torch.cat(padded)
        return Media(images, concat_media_tensors(media), token_tensors, key=digest(images))


def open_reply_images(messages: Messages, root: str) -> Messages:
    """Tool messages with their images opened; an unreadable image turns its message into the error text.

    Paths may not lead out of the folder `root` if it is not empty.
    """
    return [_with_opened_images(message, root) for message in messages]


def _with_opened_images(message: dict[str, Any], root: str) -> dict[str, Any]:
    if not any(image_blocks([message])):
        return message
    source = ImageSource("the tool's reply", root=root)
    try:
        content = [
            {"type": "image", "image": open_image(image_of_block(block), source)} if is_image_block(block) else block
            for block in message["content"]
        ]
    except ImageError as error:
        return {**message, "content": f"Error: {error}"}
    return {**message, "content": content}
