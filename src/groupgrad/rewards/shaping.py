"""Rewards for the `<think>` format, completion length and repetition; those with settings are made by a factory.

The `__name__` of a factory's function, which names its metric, does not depend on the arguments.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from groupgrad.concurrency.callables import innermost, is_async
from groupgrad.rewards.accuracy import accuracy_reward, requires_math_verify
from groupgrad.rewards.text import turn_text

RewardFunction = Callable[..., "list[float | None]"]


def think_format_reward(
    completions: list[Any], raw_completions: list[str] | None = None, **kwargs: Any
) -> list[float | None]:
    """1.0 for a completion that starts with its only `<think>` and has a `</think>`, else 0.0.

    `completions` are texts or message lists, of which the assistant's last message counts. Nothing, not even a space,
    may come before `<think>`; any text may follow `</think>`. In training the `raw_completions` count, in which
    `<think>` may be a special token, part of the prompt, or split from the message.
    """
    texts = raw_completions or [turn_text(completion) for completion in completions]
    return [float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts]


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardFunction:
    """Builds a reward that falls from 0 to -1 over the last `soft_punish_cache` tokens before `max_completion_len`.

    With y completion tokens, limit L and cache K: 0 for y <= L - K, (L - K - y) / K for L - K < y <= L, -1 beyond
    (arXiv:2503.14476, eq. 13). K = 0 has no ramp. ValueError unless 0 <= K <= L.
    """
    if not 0 <= soft_punish_cache <= max_completion_len:
        raise ValueError(
            f"soft_punish_cache={soft_punish_cache} is not between 0 and max_completion_len={max_completion_len}: the "
            "ramp must lie inside the limit; set a smaller cache"
        )
    return _with_settings(
        soft_overlong_punishment_reward, max_completion_len=max_completion_len, soft_punish_cache=soft_punish_cache
    )


def soft_overlong_punishment_reward(
    completion_ids: list[list[int]], *, max_completion_len: int, soft_punish_cache: int, **kwargs: Any
) -> list[float | None]:
    """0 for short completions, down to -1 for those at the limit or beyond."""
    over = [min(max_completion_len - soft_punish_cache - len(ids), 0) for ids in completion_ids]
    return [max(length / max(soft_punish_cache, 1), -1.0) for length in over]


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> RewardFunction:
    """Builds an accuracy reward scaled by length: short correct answers gain more, short wrong ones lose more.

    With p = min(tokens / max_len, 1) the reward is low + (high - low) / 2 * (1 + cos(pi * p)) (arXiv:2502.03373,
    section 4.1): from `max_value_correct` down to `min_value_correct` for correct answers, from `min_value_wrong` up
    to `max_value_wrong` for wrong ones. None where `accuracy_reward` gives None. ValueError for a minimum above its
    maximum.
    """
    ranges = {"wrong": (min_value_wrong, max_value_wrong), "correct": (min_value_correct, max_value_correct)}
    for answer, (low, high) in ranges.items():
        if low > high:
            raise ValueError(f"min_value_{answer}={low} is above max_value_{answer}={high}; swap them")

    return _with_settings(
        cosine_scaled_reward,
        max_len=max_len,
        wrong=(min_value_wrong, max_value_wrong),
        correct=(max_value_correct, min_value_correct),
    )


@requires_math_verify
def cosine_scaled_reward(
    completions: list[Any],
    solution: list[Any],
    completion_ids: list[list[int]],
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    *,
    max_len: int,
    wrong: tuple[float, float],
    correct: tuple[float, float],
    **kwargs: Any,
) -> list[float | None]:
    """Accuracy scaled by completion length along half a cosine wave.

    `wrong` and `correct` are the rewards of completions without tokens and of those of `max_len` tokens or more.
    """
    rewards: list[float | None] = []
    accuracies = accuracy_reward(completions, solution, log_extra=log_extra, log_metric=log_metric)
    for accuracy, ids in zip(accuracies, completion_ids):
        start, end = correct if accuracy else wrong
        progress = min(len(ids) / max_len, 1.0)
        scaled = end + (start - end) / 2 * (1 + math.cos(math.pi * progress))
        rewards.append(None if accuracy is None else scaled)
    return rewards


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """Builds a reward of `max_penalty` times the share of repeated token n-grams: (1 - distinct / all) * max_penalty.

    0 for a completion shorter than `ngram_size` tokens (arXiv:2502.03373, appendix). ValueError for max_penalty > 0,
    which would reward repetition.
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty={max_penalty} is positive and would reward repetition; set it to 0 or less")

    return _with_settings(repetition_penalty_reward, ngram_size=ngram_size, max_penalty=max_penalty)


def repetition_penalty_reward(
    completion_ids: list[list[int]], *, ngram_size: int, max_penalty: float, **kwargs: Any
) -> list[float | None]:
    """0 without repeated n-grams, closer to `max_penalty` the more n-grams repeat."""
    return [_repeated_share(ids, ngram_size) * max_penalty for ids in completion_ids]


def get_length_penalized_reward(reward: RewardFunction, penalty: float = 0.5) -> RewardFunction:
    """Builds `reward` with a linear penalty for length among the right answers of a group.

    Of completions with a reward of 1 or more, the shortest of the group keeps its reward, the longest loses `penalty`,
    and one between them a part of it in proportion to its tokens; others keep theirs. So lengths compete only where
    answers are right, whatever length the task takes (arXiv:2501.12599 has a linear penalty for length
    around the middle, and for wrong answers too). A group is a run of equal prompts. ValueError for an
    `async` function, and for a penalty outside 0 to 1, with which a long right answer counts less than a wrong one.
    """
    if is_async(reward):
        raise ValueError(
            f"{getattr(reward, '__name__', reward)} is async, and the penalty needs its rewards at once; give a plain "
            "function"
        )
    if not 0 <= penalty <= 1:
        raise ValueError(f"penalty={penalty} is not between 0 and 1: a long right answer must not count as wrong")
    return _LengthPenalized(reward, penalty)


class _LengthPenalized:
    """A reward function with a penalty for length; its arguments are those of the reward, and what it needs itself."""

    def __init__(self, reward: RewardFunction, penalty: float):
        # Such as the `check_ready` of `accuracy_reward`.
        self.__dict__.update(getattr(innermost(reward), "__dict__", {}))
        self._reward, self._penalty = reward, penalty
        self.__name__ = f"length_penalized_{getattr(reward, '__name__', 'reward')}"
        parameters = dict(inspect.signature(reward).parameters)
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self._takes = set(parameters)
        own = [name for name in ("prompts", "completion_ids") if name not in parameters]
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in own]
        variadic = [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
        plain = [one.replace(kind=one.KEYWORD_ONLY) for one in parameters.values() if one not in variadic]
        self.__signature__ = inspect.Signature([*plain, *added, *variadic])

    def __call__(self, **arguments: Any) -> list[float | None]:
        given = {name: value for name, value in arguments.items() if self._takes_all or name in self._takes}
        prompts, lengths = arguments["prompts"], [len(ids) for ids in arguments["completion_ids"]]
        rewards = list(self._reward(**given))
        for _, rows in itertools.groupby(range(len(rewards)), key=lambda row: prompts[row]):
            right = {row: reward for row in rows if (reward := rewards[row]) is not None and reward >= 1.0}
            counts = [lengths[row] for row in right]
            for row, reward in right.items():
                longer = (lengths[row] - min(counts)) / max(1, max(counts) - min(counts))
                rewards[row] = reward - self._penalty * longer
        return rewards


def _with_settings(function: RewardFunction, **settings: Any) -> RewardFunction:
    """The function with these arguments set, under its own name; it can be pickled."""
    bound: Any = functools.partial(function, **settings)
    bound.__name__, bound.__doc__ = function.__name__, function.__doc__
    return bound


def _repeated_share(ids: Sequence[int], size: int) -> float:
    count = len(ids) - size + 1
    if count <= 0:
        return 0.0
    return 1 - len({tuple(ids[start : start + size]) for start in range(count)}) / count
