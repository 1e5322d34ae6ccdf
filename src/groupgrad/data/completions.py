"""The texts of completions: as reward functions get them, and a turn as the model wrote it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.types import Rollout

THINK = "<think>"
"""The tag that chat templates open a turn with, so that the model begins to reason."""
TAIL_TOKENS = 16
"""Last tokens of a prompt in which an opened tag is looked for; it takes one to eight."""


@dataclass(slots=True, frozen=True)
class CompletionTexts:
    """Decodes completions. `end_ids` are the tokens that end one."""

    tokenizer: Any
    end_ids: Collection[int]
    keep_special: bool = False
    """Reward functions get special tokens too, but for those that end a completion."""

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The texts of completions as reward functions get them."""
        if self.keep_special:
            return [self.with_special_tokens(ids) for ids in rows]
        return self.tokenizer.batch_decode([list(ids) for ids in rows], skip_special_tokens=True)

    def with_special_tokens(self, ids: Sequence[int]) -> str:
        """A text with its special tokens, but for those that end it."""
        end = len(ids)
        while end and ids[end - 1] in self.end_ids:
            end -= 1
        return self.tokenizer.decode(list(ids[:end]), skip_special_tokens=False)

    def of_turn(self, rollout: Rollout) -> str:
        """The last turn as the model wrote it, special tokens and reasoning included, behind what the prompt opened."""
        ids, sampled = rollout.completion_ids, rollout.sampled or [True] * len(rollout.completion_ids)
        end = next((place + 1 for place in reversed(range(len(ids))) if sampled[place]), 0)
        start = next((place + 1 for place in reversed(range(end)) if not sampled[place]), 0)
        before = ids[max(0, start - TAIL_TOKENS) : start] or rollout.prompt.ids[-TAIL_TOKENS:]
        opened = opened_by(self.tokenizer.decode(list(before), skip_special_tokens=False))
        return opened + self.with_special_tokens(ids[start:end])


def opened_by(prompt: str) -> str:
    """The reasoning tag and white space that a rendered prompt ends with; empty without."""
    place = len(prompt.rstrip()) - len(THINK)
    return prompt[place:] if place >= 0 and prompt.startswith(THINK, place) else ""
