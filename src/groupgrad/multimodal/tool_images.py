"""Images in tool replies: opening, tokenisation, and concatenation with the images of the row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

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
from groupgrad.scoring.vlm import concat_media_tensors
from groupgrad.types import Media, Messages


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
