"""Rollouts produced by a user's function (`rollout_func`)."""

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
from groupgrad.multimodal.vlm_prompts import VisionError, replace_ids
from groupgrad.rewards.call_inputs import copy_containers, short_repr
from groupgrad.rollout.requests import GenerationRequest
from groupgrad.rollout.single_turn import completion_budget
from groupgrad.rollout.statistics import ending_metrics
from groupgrad.types import FinishReason, Prompt, Rollout, Trace

logger = logging.getLogger(__name__)

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("env_mask", "logprob_token_ids")
NAN = float("nan")


@dataclass(slots=True, frozen=True)
class _ReturnedRow:
    """One row of the function's return value."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    sampled: list[bool] | None
    """From `env_mask`."""
    extra: dict[str, Any]


class CustomRollouts:
    """Calls `function(prompts, trainer)` for the completions of a generation batch.

    `prompts` are this rank's, as they are in the data set, each once for every completion that it is to get. The
    function returns a dict: `prompt_ids`, `completion_ids` and `logprobs` (or None for it) with one list for each
    prompt; optionally `env_mask` (1 for tokens that the model produced, 0 for others) and `logprob_token_ids` (the
    tokens that the entries of `logprobs` belong to, if there are several at a position). All other entries reach the
    reward functions under their names: lists of one value a row, or one value for all rows.

    An empty completion is a failed rollout: it is counted and not scored.

    TRL's documents allow a second reading, in which the function makes `num_generations` completions of each prompt
    itself. The number of returned rows reveals it; such a function then gets each prompt once.
    """

    is_exact = False
    """Training computes its own log-probs, because the function may have sampled with other weights."""

    def __init__(self, function: Any, trainer: Any, prompt_maker: PromptMaker, eos_ids: Sequence[int]):
        self._function, self._trainer, self._prompt_maker = function, trainer, prompt_maker
        self._eos_ids = frozenset(eos_ids)
        embeddings = getattr(getattr(trainer, "model", None), "get_input_embeddings", lambda: None)()
        self._num_embeddings = int(getattr(embeddings, "num_embeddings", 0) or 0)
        self._makes_groups = False

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number. RolloutError if the return value cannot be used."""
        if not request.rows:
            return []
        size = request.num_generations
        groups = [row // size for row in request.rows]
        passed_groups = list(dict.fromkeys(groups)) if self._makes_groups else groups
        messages = {
            group: self._prompt_maker.prompt_with_images(row, opened=True)
            for group, row in request.rows_by_group.items()
        }
        returned = self._function([copy_containers(messages[group]) for group in passed_groups], self._trainer)
        num_returned = _num_rows(returned)
        selected = self._select_rows(groups, size, len(passed_groups), num_returned)
        returned_rows = _read_rows(returned, num_returned)
        self._check_lengths(returned_rows)
        prompts = {group: self._prompt(row, group) for group, row in request.rows_by_group.items()}
        return [
            self._rollout(request.step, row, prompts[row // size], returned_rows[place], place)
            for row, place in zip(request.rows, selected)
        ]

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """The shares of finish reasons."""
        return ending_metrics(rollouts)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _select_rows(self, groups: list[int], size: int, num_passed: int, num_returned: int) -> list[int]:
        """The returned row of each requested one; RolloutError for a wrong number of rows."""
        if num_returned == len(groups) * size and size > 1 and not self._makes_groups:
            logger.info("rollout_func makes num_generations=%d completions of each prompt; it gets each once", size)
            self._makes_groups = True
            # The first copy of each prompt got a whole group; the groups of the other copies are dropped.
            first_copy = {group: groups.index(group) for group in groups}
            return [first_copy[group] * size + groups[:i].count(group) for i, group in enumerate(groups)]
        if num_returned == len(groups):
            return list(range(len(groups)))
        expected = (
            f"num_generations={size} completions of each, {len(groups)} rows, as it made groups before"
            if self._makes_groups
            else f"one for each prompt given, which are {len(groups)} here with each prompt once for every "
            f"completion (num_generations={size})"
        )
        raise RolloutError(f"rollout_func returned {num_returned} rows for {num_passed} prompts; return {expected}")

    def _prompt(self, row: dict[str, Any], group: int) -> Prompt:
        """The prompt of a data-set row. The function returns its ids; only the ids of images are needed from here."""
        if self._prompt_maker.check_images(row):
            return self._prompt_maker(row, group)
        return Prompt([], row, group)

    def _check_lengths(self, rows: Sequence[_ReturnedRow]) -> None:
        """RolloutError for ids outside the vocabulary and for rows longer than the model's context."""
        vocab_size = self._num_embeddings or len(self._prompt_maker.tokenizer)
        max_context = self._prompt_maker.max_context
        for number, row in enumerate(rows):
            prompt, completion = row.prompt_ids, row.completion_ids
            largest = max((*prompt, *completion))
            if largest >= vocab_size:
                raise RolloutError(
                    f"rollout_func returned the token id {largest} in row {number}, but the model has {vocab_size}; "
                    "return ids of the trainer's own tokenizer"
                )
            if max_context is not None and len(prompt) + len(completion) > max_context:
                raise RolloutError(
                    f"rollout_func returned {len(prompt)} prompt_ids and {len(completion)} completion_ids in row "
                    f"{number}, but the model has {max_context} positions for both together; end rollouts earlier"
                )

    def _rollout(self, step: int, index: int, prompt: Prompt, row: _ReturnedRow, place: int) -> Rollout:
        ids = row.completion_ids
        try:
            prompt = replace_ids(prompt, row.prompt_ids)
        except VisionError as error:
            raise RolloutError(f"rollout_func returned prompt_ids for row {place} that do not fit: {error}") from error
        text = self._prompt_maker.tokenizer.decode(ids, skip_special_tokens=True)
        return Rollout(
            prompt=prompt,
            index=index,
            completion_ids=ids,
            finish_reason=self._finish_reason(ids),
            trace=None if ids else Trace(0, problem="rollout_func returned an empty completion"),
            completion=[{"role": "assistant", "content": text}] if prompt.is_conversational else text,
            text=text,
            sampled=row.sampled,
            sampling_logprobs=row.logprobs,
            policy_version=step,
            extra=row.extra,
        )

    def _finish_reason(self, ids: list[int]) -> FinishReason:
        if not ids:
            return "error"
        return "eos" if ids[-1] in self._eos_ids else "length"


def sample_completions(
    engine: Engine, prompt_maker: PromptMaker, sampling: SamplingOptions, prompts: Sequence[Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """Sample one completion for each prompt (text or messages), in the form that a rollout function returns."""
    tokenized = [prompt_maker({"prompt": prompt}, group) for group, prompt in enumerate(prompts)]
    budgets = [completion_budget(prompt, sampling.max_new_tokens, prompt_maker.max_context)[0] for prompt in tokenized]
    requests = [
        Request(prompt.ids, seed, budget, media=prompt.media) for prompt, seed, budget in zip(tokenized, seeds, budgets)
    ]
    samples = engine.sample(requests, sampling)
    return {
        "prompt_ids": [list(prompt.ids) for prompt in tokenized],
        "completion_ids": [sample.ids for sample in samples],
        "logprobs": None if any(sample.logprobs is None for sample in samples) else [s.logprobs for s in samples],
    }


def _num_rows(returned: Any) -> int:
    """Rows of the return value; RolloutError for missing keys and lists of different lengths."""
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


def _read_rows(returned: Mapping[str, Any], num_rows: int) -> list[_ReturnedRow]:
    """The rows of the return value, each checked."""
    columns = {name: list(returned[name]) for name in (*REQUIRED, *OPTIONAL) if returned.get(name) is not None}
    extra = {
        name: _extra_column(name, value, num_rows)
        for name, value in returned.items()
        if name not in REQUIRED and name not in OPTIONAL
    }
    rows = []
    for row in range(num_rows):
        values = {name: column[row] for name, column in columns.items()}
        prompt_ids = _token_ids(values["prompt_ids"], "prompt_ids", row)
        completion_ids = _token_ids(values["completion_ids"], "completion_ids", row)
        if not prompt_ids:
            raise RolloutError(f"rollout_func returned no prompt_ids for row {row}; a prompt has at least one token")
        logprobs = sampled = None
        if "logprobs" in values:
            logprobs = _logprobs(values["logprobs"], values.get("logprob_token_ids"), completion_ids, row)
        if "env_mask" in values:
            sampled = _env_mask(values["env_mask"], len(completion_ids), row)
        extra_values = {name: column[row] for name, column in extra.items()}
        rows.append(_ReturnedRow(prompt_ids, completion_ids, logprobs, sampled, extra_values))
    return rows


def _as_list(value: Any, name: str, row: int) -> list[Any]:
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, Sequence):
        raise RolloutError(
            f"rollout_func returned {short_repr(value)} for {name} of row {row}; return a list for each row"
        )
    return list(items)


def _token_ids(value: Any, name: str, row: int) -> list[int]:
    ids = _as_list(value, name, row)
    wrong = next((token for token in ids if isinstance(token, bool) or not isinstance(token, int) or token < 0), None)
    if wrong is not None:
        raise RolloutError(f"rollout_func returned {short_repr(wrong)} among {name} of row {row}; return token ids")
    return ids


def _logprobs(value: Any, token_ids: Any, completion_ids: list[int], row: int) -> list[float]:
    """One log-prob a token, NaN for None. Of several at a position, `token_ids` names which is the sampled token's."""
    entries = _as_list(value, "logprobs", row)
    if len(entries) != len(completion_ids):
        raise RolloutError(
            f"rollout_func returned {len(entries)} logprobs for {len(completion_ids)} completion_ids in row {row}; "
            "return one for each token"
        )
    candidates = None if token_ids is None else _as_list(token_ids, "logprob_token_ids", row)
    if candidates is not None and len(candidates) != len(completion_ids):
        raise RolloutError(
            f"rollout_func returned {len(candidates)} logprob_token_ids for {len(completion_ids)} completion_ids in "
            f"row {row}; give them the shape of logprobs"
        )
    logprobs = []
    for i, (entry, token) in enumerate(zip(entries, completion_ids)):
        if isinstance(entry, (list, tuple)):
            tokens = [token] if candidates is None else _as_list(candidates[i], "logprob_token_ids", row)
            entry = dict(zip(tokens, entry)).get(token)
        if entry is not None and not isinstance(entry, numbers.Real):
            raise RolloutError(f"rollout_func returned {short_repr(entry)} among logprobs of row {row}; return numbers")
        logprobs.append(NAN if entry is None else float(entry))
    return logprobs


def _env_mask(value: Any, length: int, row: int) -> list[bool]:
    flags = _as_list(value, "env_mask", row)
    if len(flags) != length or any(flag not in (0, 1) for flag in flags):
        raise RolloutError(
            f"rollout_func returned {len(flags)} env_mask entries ({short_repr(flags)}) for {length} completion_ids in "
            f"row {row}; return 1 for each token that the model produced and 0 for each other one"
        )
    return [bool(flag) for flag in flags]


def _extra_column(name: str, value: Any, num_rows: int) -> list[Any]:
    """One value a row for the reward functions; a single value is repeated."""
    is_single = getattr(value, "ndim", None) == 0 or not hasattr(value, "__len__")
    if is_single or isinstance(value, (str, bytes, Mapping)):
        return [value] * num_rows
    values = value.tolist() if hasattr(value, "tolist") else list(value)
    if len(values) != num_rows:
        raise RolloutError(
            f"rollout_func returned {len(values)} values of '{name}' for {num_rows} rows; return one a row, or a "
            "single value for all"
        )
    return values
