"""Records of sequences, their shared prompts, and the keys and values that finished sequences leave in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from groupgrad.engines.base import Request
from groupgrad.engines.native.kv_cache import OffloadedKV
from groupgrad.scoring.vlm import PromptImages
from groupgrad.types import Media

PromptKey = tuple[tuple[int, ...], str]
"""Token ids of a prompt and the `image_key` of its images. Requests with equal keys have the same prompt."""


@dataclass(eq=False)
class Group:
    """A distinct prompt, computed and stored once for all sequences that continue it."""

    prompt_ids: list[int]
    number: int
    """Groups are numbered in the order in which they arrive."""
    media: Media | None = None
    prompt_images: PromptImages | None = None
    """Computed from `media` when the prompt is first prefilled."""
    slot: int = -1
    """In the cache's prompt buffer; -1: not stored."""
    ref_count: int = 0
    """Running sequences and offloaded prefixes that need the stored prompt."""
    num_fresh: int = 0
    """Sequences that begin directly after the prompt and have no token yet."""
    first_logits: torch.Tensor | None = None
    """(V,) logits after the prompt's last token, while the prompt is stored and fresh sequences remain."""

    @property
    def position_shift(self) -> int:
        """Position of a token minus the number of tokens before it, for tokens after the prompt's images."""
        return 0 if self.prompt_images is None else self.prompt_images.shift


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One completion, waiting or running.

    Its tokens are the group's prompt and a suffix of `history_ids` and `sampled_ids`.
    """

    ticket: int
    request: Request
    group: Group
    history_ids: list[int] = field(default_factory=list)
    """Tokens between the group's prompt and the completion: earlier turns, and the replies to them."""
    sampled_ids: list[int] = field(default_factory=list)
    """Sampled tokens; the keys and values of the last one are not stored yet."""
    table_row: int = -1
    """Row in the sampler's tables; -1: none yet."""
    finish_reason: Literal["eos", "length"] | None = None
    admission: int = 0
    """Admissions are numbered; the highest number is preempted first."""
    num_restored: int = 0
    """Suffix tokens whose keys and values were restored at the last admission."""

    @property
    def is_fresh(self) -> bool:
        """True for a sequence that begins directly after its group's prompt and has no token yet."""
        return not self.history_ids and not self.sampled_ids

    @property
    def num_stored(self) -> int:
        """Suffix tokens whose keys and values are stored while the sequence runs."""
        return len(self.history_ids) + max(0, len(self.sampled_ids) - 1)

    @property
    def max_length(self) -> int:
        """Longest suffix that the sequence may reach."""
        return len(self.history_ids) + self.request.max_new_tokens

    @property
    def suffix_ids(self) -> list[int]:
        """All tokens after the group's prompt."""
        return [*self.history_ids, *self.sampled_ids]


@dataclass(slots=True, eq=False)
class RetainedPrefix:
    """Tokens of a finished sequence, for the request that continues it."""

    group: Group
    suffix_ids: list[int]
    """All tokens after the group's prompt. The last one has no keys and values, since it was sampled last."""
    offloaded: OffloadedKV | None = None
    """Keys and values of the suffix without its last token; None if they were dropped and must be computed again."""
    is_claimed: bool = False
    """True once the request that continues it has arrived."""


def image_key(media: Media | None) -> str:
    """Equal for equal images; empty without images."""
    return "" if media is None else media.key
