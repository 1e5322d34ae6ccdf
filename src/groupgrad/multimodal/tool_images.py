"""Images that tools bring into a conversation under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupgrad.data.images import (
    ImageError,
    ImageSource,
    digest,
    image_blocks,
    image_of_block,
    is_image_block,
    open_image,
)
from groupgrad.data.prompts import PromptMaker
from groupgrad.modeling.vlm import concat_media_tensors
from groupgrad.types import Media, Messages


class ToolReplyEncoder:
    """Token ids of a text with tools' replies, whose images alone the processor is given.

    Called with the text in which the replies are; `media_with_reply` then says what was made of the images.
    """

    def __init__(self, prompt_maker: PromptMaker, replies: Messages):
        self._prompt_maker, self._images = prompt_maker, prompt_maker.conversation_images(replies)
        self._media: Media | None = None

    def __call__(self, text: str) -> list[int]:
        """Token ids of the text, nothing put before it."""
        encoded = self._prompt_maker.encode(text, self._images, is_start=False)
        self._media = encoded.media
        return encoded.ids

    def media_with_reply(self, before: Media | None, num_before: int, num_added: int) -> Media | None:
        """The images of a row of `num_before` tokens with those of the replies, of which it gets the last `num_added`
        tokens; `before` if the replies have none."""
        more = self._media
        if more is None:
            return before
        types = {name: _last(more.token_tensors.get(name), num_added) for name in _names(before, more)}
        earlier = {} if before is None else before.token_tensors
        images = more.images if before is None else (*before.images, *more.images)
        return Media(
            images=images,
            tensors=concat_media_tensors([more] if before is None else [before, more]),
            token_tensors={name: torch.cat([_first(earlier.get(name), num_before), types[name]]) for name in types},
            key=digest(images),
        )


def open_reply_images(messages: Messages) -> Messages:
    """Tools' messages with their images opened; one whose image cannot be had says so instead."""
    return [_opened(message) for message in messages]


def _opened(message: dict[str, Any]) -> dict[str, Any]:
    if not any(image_blocks([message])):
        return message
    try:
        content = [_opened_block(block) if is_image_block(block) else block for block in message["content"]]
    except ImageError as error:
        return {**message, "content": f"Error: {error}"}
    return {**message, "content": content}


def _opened_block(block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "image": open_image(image_of_block(block), ImageSource("the tool's reply"))}


def _names(*media: Media | None) -> Sequence[str]:
    return list(dict.fromkeys(name for item in media if item is not None for name in item.token_tensors))


def _first(types: torch.Tensor | None, length: int) -> torch.Tensor:
    """(length,) that begins with `types`, 0 behind them."""
    known = torch.zeros(0, dtype=torch.int64) if types is None else types
    return torch.cat([known, known.new_zeros(length - len(known))])


def _last(types: torch.Tensor | None, length: int) -> torch.Tensor:
    """(length,) that ends with the end of `types`, 0 before it."""
    known = torch.zeros(0, dtype=torch.int64) if types is None else types[max(0, len(types) - length) :]
    return torch.cat([known.new_zeros(length - len(known)), known])
