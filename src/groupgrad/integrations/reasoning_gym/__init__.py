"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym): data sets, and the reward of their verifiers.

The package runs in a process of its own (`worker`), which gives the same rows in every process and every run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import cloudpickle

from groupgrad import compat
from groupgrad.concurrency.worker_process import WorkerNotStarted, WorkerProcess
from groupgrad.errors import RewardError
from groupgrad.integrations.reasoning_gym import worker
from groupgrad.rewards.text import completion_text

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["PREFIX", "named_dataset", "reasoning_gym_dataset", "reasoning_gym_reward"]

logger = logging.getLogger(__name__)

PREFIX = "reasoning_gym:"
"""Begins the name of such a data set, as in `reasoning_gym:chain_sum`."""
ROW_TIMEOUT_S = 10.0
"""Seconds to score one completion."""
MEMORY_BYTES = 4 << 30
SPLITS = ("train", "test")

_MAKE, _SCORE, _SYSTEM_PROMPT = range(3)
_PROCESS = WorkerProcess(
    [cloudpickle.dumps(function) for function in (worker.make_entries, worker.score, worker.system_prompt)],
    name="reasoning-gym",
    initializer=worker.prepare,
    memory_bytes=MEMORY_BYTES,
    environment={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
)


def reasoning_gym_dataset(
    task: str,
    split: str = "train",
    *,
    size: int = 500,
    test_size: int = 100,
    seed: int = 0,
    system_prompt: str = "default",
    **settings: Any,
) -> Dataset:
    """The rows of a task of reasoning-gym, which `reasoning_gym_reward` scores. The same arguments give the same rows.

    Args:
        task: A name of reasoning-gym, such as `chain_sum`, or `composite`, whose setting `datasets` is a list of
            mappings with the keys `name`, `weight` (1 if left out) and `config` (settings of that task).
        split: `train` has `size` rows. `test` has `test_size` rows of other seeds, less those with a question of
            `train`.
        size: Number of rows to train on.
        test_size: Number of held-out rows.
        seed: Seed of the first row; most tasks make row i from `seed + i`.
        system_prompt: The name of a system prompt of reasoning-gym, such as `default`, `direct` or `DeepSeekZero`,
            which ask for the answer in `<answer>` tags, or a text.
        **settings: The task's settings, such as `max_terms`.

    Returns:
        Rows with the columns `prompt` (system and user message), `question`, `answer` (None where many are right),
        `task`, `difficulty` and `metadata` (JSON), and `reasoning_gym`, by which the reward finds the entry again.

    Raises:
        ValueError: For an unknown task, split or setting, for values with which the task cannot make rows, and for a
            task without a question that is not in `train`.
        ImportError: If reasoning-gym is missing.
    """
    if split not in SPLITS:
        raise ValueError(f"{PREFIX}{task} has no split {split!r}; set it to one of {', '.join(SPLITS)}")
    for name, number, least in (("size", size, 1), ("test_size", test_size, 1), ("seed", seed, 0)):
        if not isinstance(number, int) or number < least:
            raise ValueError(f"{PREFIX}{task}: {name}={number!r} is no whole number from {least} on; set it to one")
    spec = _spec(task, {**settings, "size": size, "seed": seed})
    rows = [(columns, number, spec) for number, (columns, _) in enumerate(_entries(spec))]
    if split == "test":
        known = {columns["question"] for columns, *_ in rows}
        # Row i comes from seed + i, so the first seed that is not trained on is seed + size.
        spec = _spec(task, {**settings, "size": test_size, "seed": seed + size})
        entries = enumerate(_entries(spec))
        rows = [(columns, number, spec) for number, (columns, _) in entries if columns["question"] not in known]
        if not rows:
            raise ValueError(
                f"{PREFIX}{task} with size={size} and test_size={test_size} has no held-out question that is not "
                "trained on too; lower size, raise test_size, or choose settings with more questions"
            )
    system = {"role": "system", "content": _answer(_PROCESS.call(_SYSTEM_PROMPT, (system_prompt,)).result())}
    return _dataset(
        {
            "prompt": [system, {"role": "user", "content": columns["question"]}],
            **columns,
            "reasoning_gym": json.dumps([*json.loads(spec), number]),
        }
        for columns, number, spec in rows
    )


def named_dataset(name: str, config: Any = None, split: str = "train", system_prompt: str | None = None) -> Dataset:
    """`reasoning_gym_dataset` of a name such as `reasoning_gym:chain_sum`; `config` has its other arguments.

    `config` is a mapping, or the text of one in YAML. ValueError for anything else.
    """
    import yaml

    task, values = name.removeprefix(PREFIX), config
    if isinstance(config, str):
        try:
            values = yaml.safe_load(config)
        except yaml.YAMLError:
            values = config
    if not isinstance(values, (dict, type(None))):
        raise ValueError(
            f"dataset_config={config!r} is no mapping, but {name} takes the settings of the task; write "
            "dataset_config='{size: 1000, seed: 1}'"
        )
    if taken := {"task", "split", "system_prompt"} & (values or {}).keys():
        raise ValueError(f"dataset_config has {taken.pop()!r}, which is no setting of the task; take it out there")
    settings: dict[str, Any] = dict(values or {})
    if system_prompt is not None:
        settings["system_prompt"] = system_prompt
    return reasoning_gym_dataset(task, split, **settings)


def reasoning_gym_reward(
    completions: list[Any],
    question: list[str],
    reasoning_gym: list[str],
    log_extra: Callable[..., None] | None = None,
    log_metric: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """The score, 0 to 1, that the verifier of each row's task gives to the answer of the completion.

    `completions` are texts or message lists, of which the assistant's last message counts. The answer is the text in
    its last `<answer>...</answer>`, as `reasoning_gym.utils.extract_answer` finds it, or else the last line. For an
    empty completion the verifier gets None, for which it gives 0 (three tasks give 0.01). A completion gets 0 if the
    verifier raises, or takes more than 10 seconds. Logs the column `answer_parsed`, and as metrics
    `reasoning_gym/tagged` (share with tags), `reasoning_gym/failed` (share for which the verifier raised or took too
    long, if there are any), and `reasoning_gym/TASK` for each task of a composite. RewardError for rows that another
    release has made.
    """
    calls, parts = [], []
    for reference, asked, completion in zip(reasoning_gym, question, completions):
        task, settings, row = json.loads(reference)
        spec = _spec(task, settings)
        columns, entry = _entries(spec)[row]
        if columns["question"] != asked:
            raise RewardError(
                f"the installed reasoning-gym makes the question {columns['question']!r} where the data set has "
                f"{asked!r}; make the data set again, or install the release that made it"
            )
        calls.append(_PROCESS.call(_SCORE, (spec, entry, completion_text(completion)), timeout_s=ROW_TIMEOUT_S))
        parts.append(columns["task"] if task == worker.COMPOSITE else None)
    outcomes = [call.result() for call in calls]
    if not_started := [outcome for outcome in outcomes if isinstance(outcome.error, WorkerNotStarted)]:
        _answer(not_started[0])
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    scored = [(0.0, None, False) if outcome.error is not None else outcome.value for outcome in outcomes]
    if failed:
        text = f"the verifier failed for {len(failed)} of {len(outcomes)} completions, which get 0; one of them: "
        logger.warning("%s%s: %s", text, type(failed[0]).__name__, failed[0])
    if log_extra is not None:
        log_extra("answer_parsed", [answer for _, answer, _ in scored])
    if log_metric is not None:
        log_metric("reasoning_gym/tagged", sum(is_tagged for *_, is_tagged in scored) / len(scored))
        if failed:
            log_metric("reasoning_gym/failed", len(failed) / len(scored))
        for (value, *_), part in zip(scored, parts):
            if part is not None:
                log_metric(f"reasoning_gym/{part}", value)
    return [value for value, *_ in scored]


def _check_ready() -> None:
    compat.require("reasoning-gym", "a data set of reasoning_gym")


# The runner asks for the package before a run begins, and calls the function in its own process, which has one.
reasoning_gym_reward.__dict__.update(check_ready=_check_ready, starts_processes=True)


def _spec(task: str, settings: dict[str, Any]) -> str:
    # `vars` reads reasoning-gym's `DatasetSpec`.
    return json.dumps([task, settings], sort_keys=True, default=vars)


@lru_cache(maxsize=64)
def _entries(spec: str) -> list[tuple[dict[str, Any], bytes]]:
    """The entries of a task: the columns of each, and what its verifier reads."""
    _check_ready()
    return _answer(_PROCESS.call(_MAKE, (spec,)).result())


def _answer(outcome: Any) -> Any:
    """The value that the process has returned; the error that it has raised. ImportError if it does not start."""
    if isinstance(outcome.error, WorkerNotStarted):
        raise ImportError(f"the process of reasoning-gym does not start: {outcome.error}") from None
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _dataset(rows: Any) -> Dataset:
    import datasets

    text = datasets.Value("string")
    names = ("question", "answer", "task", "difficulty", "metadata", "reasoning_gym")
    features = datasets.Features({"prompt": [{"role": text, "content": text}], **dict.fromkeys(names, text)})
    return datasets.Dataset.from_list(list(rows), features=features)
