"""Rollouts produced by a user's function (`rollout_func`)."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker
from groupgrad.data.values import copy_containers, short_repr
from groupgrad.engines.base import Engine, SamplingOptions
from groupgrad.errors import RolloutError
from groupgrad.metrics import Metric
from groupgrad.multimodal.vlm_prompts import VisionError, replace_ids
from groupgrad.rewards.call_inputs import HIDDEN_COLUMNS, STANDARD_ARGUMENTS
from groupgrad.rollout.requests import GenerationRequest, RolloutSource
from groupgrad.rollout.single_turn import sample_prompts
from groupgrad.rollout.statistics import ending_metrics
from groupgrad.types import Prompt, Rollout, Trace

logger = logging.getLogger(__name__)

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("env_mask", "logprob_token_ids")
NAN = float("nan")
LOGPROB_TOLERANCE = 0.1
"""Largest log-prob (nats) that rounding explains, in bfloat16."""


class CustomRollouts(RolloutSource):
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

    def __init__(self, function: Any, trainer: Any, prompt_maker: PromptMaker, eos_ids: Sequence[int]):
        self._function, self._trainer, self._prompt_maker = function, trainer, prompt_maker
        self._eos_ids = frozenset(eos_ids)
        embeddings = getattr(getattr(trainer, "model", None), "get_input_embeddings", lambda: None)()
        self._vocab_size = int(getattr(embeddings, "num_embeddings", 0) or len(prompt_maker.tokenizer))
        self._makes_groups = False

    @property
    def is_exact(self) -> bool:
        """False: training computes its own log-probs, because the function may have sampled with other weights."""
        return False

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number. RolloutError if the return value cannot be used."""
        if not request.rows:
            return []
        maker, size = self._prompt_maker, request.num_generations
        groups = [row // size for row in request.rows]
        passed_groups = list(dict.fromkeys(groups)) if self._makes_groups else groups
        messages = {group: maker.prompt_with_images(row, opened=True) for group, row in request.rows_by_group.items()}
        returned = self._function([copy_containers(messages[group]) for group in passed_groups], self._trainer)
        columns = _token_columns(returned)
        num_returned = len(columns["completion_ids"])
        selected = self._select_rows(groups, size, len(passed_groups), num_returned)
        # Reward functions get arguments of the trainer's names from the trainer, which makes texts from token ids.
        reserved = (*REQUIRED, *OPTIONAL, *HIDDEN_COLUMNS, *STANDARD_ARGUMENTS)
        extra = {
            name: _extra_column(name, value, num_returned) for name, value in returned.items() if name not in reserved
        }
        returned_rows = [self._read_row(columns, extra, row) for row in range(num_returned)]
        # The function returns the ids of prompts; only rows with images need ids of the data set's prompt.
        prompts = {
            group: maker(row, group) if maker.check_images(row) else Prompt([], row, group)
            for group, row in request.rows_by_group.items()
        }
        return [
            self._rollout(request.step, row, prompts[row // size], *returned_rows[place], place)
            for row, place in zip(request.rows, selected)
        ]

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """The shares of finish reasons."""
        return ending_metrics(rollouts, ("eos", "length", "error"))

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

    def _read_row(
        self, columns: Mapping[str, list[Any]], extra: Mapping[str, list[Any]], row: int
    ) -> tuple[list[int], dict[str, Any]]:
        """The prompt's ids of a returned row, and the fields of a rollout that it gives.

        RolloutError if it is malformed, has ids outside the vocabulary or exceeds the context.
        """
        lists = {name: column[row] for name, column in columns.items() if column[row] is not None}
        prompt_ids, completion_ids = lists["prompt_ids"], lists["completion_ids"]
        if not prompt_ids:
            raise RolloutError(f"rollout_func returned no prompt_ids for row {row}; a prompt has at least one token")
        for token in (*prompt_ids, *completion_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise RolloutError(
                    f"rollout_func returned the token id {token!r} in row {row}, but the model has the ids 0 to "
                    f"{self._vocab_size - 1}; return ids of the trainer's own tokenizer"
                )
        for name in ("logprobs", "logprob_token_ids", "env_mask"):
            if name in lists and len(lists[name]) != len(completion_ids):
                raise RolloutError(
                    f"rollout_func returned {len(lists[name])} {name} for {len(completion_ids)} completion_ids in row "
                    f"{row}; return one for each token"
                )
        max_context = self._prompt_maker.max_context
        if max_context is not None and len(prompt_ids) + len(completion_ids) > max_context:
            raise RolloutError(
                f"rollout_func returned {len(prompt_ids)} prompt_ids and {len(completion_ids)} completion_ids in row "
                f"{row}, but the model has {max_context} positions for both together; end rollouts earlier"
            )
        fields = {"completion_ids": completion_ids, "extra": {name: column[row] for name, column in extra.items()}}
        if "logprobs" in lists:
            token_ids = lists.get("logprob_token_ids")
            fields["sampling_logprobs"] = _logprobs(lists["logprobs"], token_ids, completion_ids, row)
        if "env_mask" in lists:
            fields["sampled"] = _env_mask(lists["env_mask"], row)
        return prompt_ids, fields

    def _rollout(
        self, step: int, index: int, prompt: Prompt, prompt_ids: list[int], fields: dict[str, Any], place: int
    ) -> Rollout:
        ids = fields["completion_ids"]
        try:
            prompt = replace_ids(prompt, prompt_ids)
        except VisionError as error:
            raise RolloutError(f"rollout_func returned prompt_ids for row {place} that do not fit: {error}") from error
        maker = self._prompt_maker
        (text,) = CompletionTexts(maker.tokenizer, self._eos_ids, maker.keeps_special_tokens)([ids])
        return Rollout(
            prompt=prompt,
            index=index,
            finish_reason="error" if not ids else "eos" if ids[-1] in self._eos_ids else "length",
            trace=None if ids else Trace(0, problem="rollout_func returned an empty completion"),
            completion=[{"role": "assistant", "content": text}] if prompt.is_conversational else text,
            text=text,
            policy_version=step,
            **fields,
        )


def sample_completions(
    engine: Engine, prompt_maker: PromptMaker, sampling: SamplingOptions, prompts: Sequence[Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """Samples one completion for each prompt (text or messages), in the form that a rollout function returns."""
    tokenized = [prompt_maker({"prompt": prompt}, group) for group, prompt in enumerate(prompts)]
    samples = sample_prompts(engine, prompt_maker, sampling, tokenized, seeds)
    return {
        "prompt_ids": [list(prompt.ids) for prompt in tokenized],
        "completion_ids": [sample.ids for sample in samples],
        "logprobs": None if any(sample.logprobs is None for sample in samples) else [s.logprobs for s in samples],
    }


def _token_columns(returned: Any) -> dict[str, list[Any]]:
    """The columns of the return value that concern tokens, one list a row. RolloutError if it cannot be read so."""
    if not isinstance(returned, Mapping) or any(name not in returned for name in REQUIRED):
        raise RolloutError(
            f"rollout_func returned {short_repr(returned)}; return a dict with {', '.join(REQUIRED)}, each with one "
            "list a row"
        )
    names = ["prompt_ids", "completion_ids"]
    names += [name for name in ("logprobs", *OPTIONAL) if returned.get(name) is not None]
    columns: dict[str, list[Any]] = {}
    for name in names:
        try:
            may_lack = name == "logprob_token_ids"
            columns[name] = [None if may_lack and row is None else _as_list(row) for row in returned[name]]
        except TypeError as error:
            raise RolloutError(
                f"rollout_func returned {name}={short_repr(returned[name])}, which is not one list a row: {error}"
            ) from error
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise RolloutError(
            f"rollout_func returned lists of different lengths: {lengths}; each needs one entry for every row"
        )
    return columns


def _as_list(row: Any) -> list[Any]:
    return row.tolist() if hasattr(row, "tolist") else list(row)


def _logprobs(entries: list[Any], token_ids: list[Any] | None, completion_ids: list[int], row: int) -> list[float]:
    """One log-prob a token, NaN for None. Of several at a position, `token_ids` names which is the sampled token's."""
    logprobs = []
    for i, (entry, token) in enumerate(zip(entries, completion_ids)):
        if isinstance(entry, (list, tuple)):
            tokens = [token] if token_ids is None else map(int, token_ids[i])
            entry = dict(zip(tokens, entry)).get(token)
        if entry is None:
            logprobs.append(NAN)
        elif isinstance(entry, numbers.Real) and -math.inf < float(entry) <= LOGPROB_TOLERANCE:
            logprobs.append(float(entry))
        else:
            raise RolloutError(
                f"rollout_func returned the log-prob {entry!r} in row {row}; log-probs are finite numbers of at most "
                "0, and None where there is none"
            )
    return logprobs


def _env_mask(flags: list[Any], row: int) -> list[bool]:
    if any(flag not in (0, 1) for flag in flags):
        raise RolloutError(
            f"rollout_func returned the env_mask {short_repr(flags)} in row {row}; return 1 for each token that the "
            "model produced and 0 for each other one"
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
