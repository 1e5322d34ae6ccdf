"""Rollouts that a user's function makes (`rollout_func`)."""

from __future__ import annotations

import logging
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Engine, Request, SamplingOptions
from groupgrad.errors import RolloutError
from groupgrad.metrics import Metric
from groupgrad.multimodal.vlm_prompts import VisionError, with_other_ids
from groupgrad.rewards.inputs import copy_containers, short_repr
from groupgrad.rollout.base import GenerationRequest
from groupgrad.rollout.statistics import ending_metrics
from groupgrad.types import FinishReason, Prompt, Rollout, Trace

logger = logging.getLogger(__name__)

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("env_mask", "logprob_token_ids")
NAN = float("nan")


@dataclass(slots=True, frozen=True)
class _Answer:
    """What the function returned, one entry a row in each list."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]] | None
    env_mask: list[list[bool]] | None
    extra: dict[str, list[Any]]


class CustomRollouts:
    """Asks `function(prompts, trainer)` for a round's completions.

    `prompts` are this rank's, as they are in the data set, each once for every completion that it is to get. The
    function returns a dict: `prompt_ids`, `completion_ids` and `logprobs` (or None for it) with one list a prompt
    given; optionally `env_mask` (1 for tokens that the model produced, 0 for others) and `logprob_token_ids` (the
    tokens that the entries of `logprobs` belong to, if there are several at a place). Whatever else it returns reaches
    the reward functions under its name: lists of one value a row, or one value for all.

    An empty completion is a failed rollout: it is counted and not scored.

    A function may also follow the other reading of the documents, in which it makes `num_generations` completions of
    each prompt itself: it is known by the number of its rows, and gets each prompt once from then on.
    """

    is_exact = False
    """Its log-probs are the function's own affair: training computes what it needs."""

    def __init__(self, function: Any, trainer: Any, prompt_maker: PromptMaker, eos_ids: Sequence[int]):
        self._function, self._trainer, self._prompt_maker = function, trainer, prompt_maker
        self._end_ids = frozenset(eos_ids)
        embeddings = getattr(getattr(trainer, "model", None), "get_input_embeddings", lambda: None)()
        self._num_embeddings = int(getattr(embeddings, "num_embeddings", 0) or 0)
        self._makes_groups = False

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number. RolloutError for an answer that cannot be used."""
        if not request.rows:
            return []
        size = request.num_generations
        groups = [row // size for row in request.rows]
        rows, places = list(request.rows), list(range(len(groups)))
        asked = groups
        if self._makes_groups:
            asked = list(dict.fromkeys(groups))
        prompts = {group: self._prompt_maker.shown(row) for group, row in request.rows_by_group.items()}
        returned = self._function([copy_containers(prompts[group]) for group in asked], self._trainer)
        count = _num_rows(returned)
        if count == len(groups) * size and size > 1 and not self._makes_groups:
            # The first copy of each prompt got a whole group; those of the other copies are not needed.
            logger.info("rollout_func makes num_generations=%d completions of each prompt; it gets each once", size)
            self._makes_groups = True
            firsts = {group: groups.index(group) for group in groups}
            places = [firsts[group] * size + groups[:i].count(group) for i, group in enumerate(groups)]
        elif count != len(groups):
            wanted = (
                f"num_generations={size} completions of each, {len(groups)} rows, as it made groups before"
                if self._makes_groups
                else f"one for each prompt given, which are {len(groups)} here with each prompt once for every "
                f"completion (num_generations={size})"
            )
            raise RolloutError(f"rollout_func returned {count} rows for {len(asked)} prompts; return {wanted}")
        answer = _read(returned, count)
        self._check_lengths(answer)
        made = {group: self._made(row, group) for group, row in request.rows_by_group.items()}
        return [self._rollout(request.step, row, made[row // size], answer, place) for row, place in zip(rows, places)]

    def _made(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row as the function was given it, without ids of our own unless it has images."""
        if self._prompt_maker.check_images(row):
            return self._prompt_maker(row, group)
        return Prompt([], row, group)

    def _check_lengths(self, answer: _Answer) -> None:
        """RolloutError for ids that are none of the vocabulary, and rows that the model has no positions for."""
        size, longest = self._num_embeddings or len(self._prompt_maker.tokenizer), self._prompt_maker.max_context
        for row, (prompt, completion) in enumerate(zip(answer.prompt_ids, answer.completion_ids)):
            largest = max((*prompt, *completion))
            if largest >= size:
                raise RolloutError(
                    f"rollout_func returned the token id {largest} in row {row}, but the model has {size}; return ids "
                    "of the trainer's own tokenizer"
                )
            if longest is not None and len(prompt) + len(completion) > longest:
                raise RolloutError(
                    f"rollout_func returned {len(prompt)} prompt_ids and {len(completion)} completion_ids in row "
                    f"{row}, but the model has {longest} positions for both together; end rollouts earlier"
                )

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Why rollouts ended."""
        return ending_metrics(rollouts)

    def close(self) -> None:
        """Nothing is held."""

    def _rollout(self, step: int, row: int, made: Prompt, answer: _Answer, place: int) -> Rollout:
        ids = answer.completion_ids[place]
        sampled = None if answer.env_mask is None else answer.env_mask[place]
        try:
            prompt = with_other_ids(made, answer.prompt_ids[place])
        except VisionError as error:
            raise RolloutError(f"rollout_func returned prompt_ids for row {place} that do not fit: {error}") from error
        text = self._prompt_maker.tokenizer.decode(ids, skip_special_tokens=True)
        return Rollout(
            prompt=prompt,
            index=row,
            completion_ids=ids,
            finish_reason=self._finish_reason(ids),
            trace=None if ids else Trace(0, problem="rollout_func returned an empty completion"),
            completion=[{"role": "assistant", "content": text}] if prompt.is_conversational else text,
            text=text,
            sampled=sampled,
            sampling_logprobs=None if answer.logprobs is None else answer.logprobs[place],
            policy_version=step,
            extra={name: values[place] for name, values in answer.extra.items()},
        )

    def _finish_reason(self, ids: list[int]) -> FinishReason:
        if not ids:
            return "error"
        return "eos" if ids[-1] in self._end_ids else "length"


def sample_completions(
    engine: Engine, prompt_maker: PromptMaker, sampling: SamplingOptions, prompts: Sequence[Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """One completion for each prompt (text or messages), in the form in which a rollout function returns them."""
    made = [prompt_maker({"prompt": prompt}, group) for group, prompt in enumerate(prompts)]
    longest = prompt_maker.max_context
    rooms = [sampling.max_new_tokens if longest is None else longest - len(prompt.ids) for prompt in made]
    requests = [
        Request(prompt.ids, seed, min(room, sampling.max_new_tokens), media=prompt.media)
        for prompt, seed, room in zip(made, seeds, rooms)
    ]
    samples = engine.sample(requests, sampling)
    return {
        "prompt_ids": [list(prompt.ids) for prompt in made],
        "completion_ids": [sample.ids for sample in samples],
        "logprobs": None if any(sample.logprobs is None for sample in samples) else [s.logprobs for s in samples],
    }


def _num_rows(returned: Any) -> int:
    if not isinstance(returned, Mapping):
        raise RolloutError(f"rollout_func returned {short_repr(returned)}; return a dict with {', '.join(REQUIRED)}")
    missing = [name for name in REQUIRED if name not in returned]
    if missing:
        raise RolloutError(
            f"rollout_func returned a dict with {', '.join(map(str, returned)) or 'nothing'}, but without "
            f"{', '.join(missing)}; return {', '.join(REQUIRED)}, each with one list a row"
        )
    lists = {name: returned[name] for name in (*REQUIRED, *OPTIONAL) if returned.get(name) is not None}
    for name, values in lists.items():
        if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__"):
            raise RolloutError(f"rollout_func returned {name}={short_repr(values)}; return one list a row")
    for name in ("prompt_ids", "completion_ids"):
        if name not in lists:
            raise RolloutError(f"rollout_func returned {name}=None; return one list of token ids a row")
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise RolloutError(
            f"rollout_func returned lists of different lengths: {lengths}; each needs one entry for every row"
        )
    return lengths["completion_ids"]


def _read(returned: Mapping[str, Any], count: int) -> _Answer:
    """What was returned, checked row by row."""
    prompt_ids = [_ids(ids, "prompt_ids", row) for row, ids in enumerate(returned["prompt_ids"])]
    completion_ids = [_ids(ids, "completion_ids", row) for row, ids in enumerate(returned["completion_ids"])]
    for row, ids in enumerate(prompt_ids):
        if not ids:
            raise RolloutError(f"rollout_func returned no prompt_ids for row {row}; a prompt has at least one token")
    logprobs = None
    if returned["logprobs"] is not None:
        tokens = returned.get("logprob_token_ids") or [None] * count
        rows = zip(returned["logprobs"], tokens, completion_ids)
        logprobs = [_logprobs(values, ids_there, ids, row) for row, (values, ids_there, ids) in enumerate(rows)]
    env_mask = None
    if returned.get("env_mask") is not None:
        masks = zip(returned["env_mask"], completion_ids)
        env_mask = [_flags(mask, len(ids), row) for row, (mask, ids) in enumerate(masks)]
    others = {name: value for name, value in returned.items() if name not in REQUIRED and name not in OPTIONAL}
    return _Answer(prompt_ids, completion_ids, logprobs, env_mask, {n: _column(n, v, count) for n, v in others.items()})


def _as_list(values: Any, name: str, row: int) -> list[Any]:
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Sequence):
        raise RolloutError(
            f"rollout_func returned {short_repr(values)} for {name} of row {row}; return a list for each row"
        )
    return list(found)


def _ids(values: Any, name: str, row: int) -> list[int]:
    ids = _as_list(values, name, row)
    wrong = next((token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0), None)
    if wrong is not None:
        raise RolloutError(f"rollout_func returned {short_repr(wrong)} among {name} of row {row}; return token ids")
    return ids


def _logprobs(values: Any, tokens: Any, ids: list[int], row: int) -> list[float]:
    """One log-prob a token: the entry itself or, of several at a place, that of the token chosen; NaN if it is None."""
    given = _as_list(values, "logprobs", row)
    if len(given) != len(ids):
        raise RolloutError(
            f"rollout_func returned {len(given)} logprobs for {len(ids)} completion_ids in row {row}; return one for "
            "each token"
        )
    names = None if tokens is None else _as_list(tokens, "logprob_token_ids", row)
    if names is not None and len(names) != len(ids):
        raise RolloutError(
            f"rollout_func returned {len(names)} logprob_token_ids for {len(ids)} completion_ids in row {row}; give "
            "them the shape of logprobs"
        )
    chosen = []
    for place, (value, token) in enumerate(zip(given, ids)):
        if isinstance(value, (list, tuple)):
            there = [token] if names is None else _as_list(names[place], "logprob_token_ids", row)
            value = dict(zip(there, value)).get(token)
        if value is not None and not isinstance(value, numbers.Real):
            raise RolloutError(f"rollout_func returned {short_repr(value)} among logprobs of row {row}; return numbers")
        chosen.append(NAN if value is None else float(value))
    return chosen


def _flags(mask: Any, length: int, row: int) -> list[bool]:
    flags = _as_list(mask, "env_mask", row)
    if len(flags) != length or any(flag not in (0, 1) for flag in flags):
        raise RolloutError(
            f"rollout_func returned {len(flags)} env_mask entries ({short_repr(flags)}) for {length} completion_ids in "
            f"row {row}; return 1 for each token that the model produced and 0 for each other one"
        )
    return [bool(flag) for flag in flags]


def _column(name: str, value: Any, count: int) -> list[Any]:
    """One value a row for the reward functions."""
    is_single = getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__")
    if is_single or isinstance(value, (str, bytes, Mapping)):
        return [value] * count
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(values) != count:
        raise RolloutError(
            f"rollout_func returned {len(values)} values of '{name}' for {count} rows; return one a row, or a single "
            "value for all"
        )
    return values
