"""Loads the data sets of `groupgrad train` and converts rows into the columns `prompt` and `solution`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from groupgrad.apps.cli.arguments import TaskArguments
from groupgrad.integrations import reasoning_gym

FILES: dict[str, str] = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""File suffix -> loader of `datasets`."""

_NAMED = re.compile(r"([\w-]+)=(.+)")
"""An evaluation set with its name; a file of that name can be given as ./NAME=SET."""
NO_DATASET = (
    "no data set is given; set dataset_name to a hub id, a folder, a .json, .jsonl, .parquet or .csv file, or "
    f"{reasoning_gym.PREFIX}TASK"
)


def load_splits(script: TaskArguments, evaluate: bool) -> tuple[Any, Any]:
    """Loads the training data and, if `evaluate`, the evaluation data (else None), ready for the trainer.

    ValueError, with what to set, for a missing data set or rows that do not fit.
    """
    if not script.dataset_name:
        raise ValueError(NO_DATASET)
    train = _load(script.dataset_name, script.dataset_train_split, script, "dataset_train_split")
    if script.max_train_rows is not None:
        count = script.max_train_rows
        train = train.take(count) if script.dataset_streaming else train.select(range(min(count, len(train))))
    train = prepare(train, script)
    if not evaluate:
        return train, None
    if script.dataset_test_name is None and Path(script.dataset_name).suffix in FILES:
        raise ValueError(
            f"eval_strategy asks for evaluation, but {script.dataset_name} is one file without a test split; "
            f"set dataset_test_name to the file to evaluate on, or eval_strategy to no"
        )
    return train, load_test_split(script)


def load_test_split(script: TaskArguments, limit: int | None = None) -> Any:
    """Loads the evaluation data, its first `limit` rows or all; of a file that is no split, the whole file.

    It is a dict of data sets if `dataset_test_name` names them. ValueError as `load_splits`.
    """

    def load(name: str) -> Any:
        rows = _load(name, script.dataset_test_split, script, "dataset_test_split")
        if limit is not None:
            rows = rows.take(limit) if script.dataset_streaming else rows.select(range(min(limit, len(rows))))
        return prepare(rows, script)

    sets = test_sets(script)
    return load(sets[""]) if "" in sets else {name: load(given) for name, given in sets.items()}


def test_sets(script: TaskArguments) -> dict[str, str]:
    """The evaluation sets as they are given, by their names; the name of a single one may be empty.

    ValueError without a set, and for several of which one has no name or one name is given twice.
    """
    given = script.dataset_test_name or script.dataset_name
    if not given:
        raise ValueError(NO_DATASET)
    given = [given] if isinstance(given, str) else given
    matches = [(_NAMED.fullmatch(one), one) for one in given]
    sets = {match[1] if match else "": match[2] if match else one for match, one in matches}
    if len(sets) < len(given) or ("" in sets and len(sets) > 1):
        raise ValueError(
            f"dataset_test_name={given} has several sets, and their metrics begin with their names; give each a name "
            "of its own, as in math=math.jsonl"
        )
    return sets


def _load(name: str, split: str, script: TaskArguments, setting: str) -> Any:
    import datasets

    if name.startswith(reasoning_gym.PREFIX):
        dataset = reasoning_gym.named_dataset(name, script.dataset_config, split, script.system_prompt)
        return dataset.to_iterable_dataset() if script.dataset_streaming else dataset
    if isinstance(script.dataset_config, dict):
        raise ValueError(
            f"dataset_config={script.dataset_config!r} is a mapping, which only {reasoning_gym.PREFIX}TASK takes; set "
            "it to the name of a configuration"
        )
    path = Path(name).expanduser()
    if path.suffix in FILES:
        loader = FILES[path.suffix]
        return datasets.load_dataset(loader, data_files=str(path), split="train", streaming=script.dataset_streaming)
    is_saved = path.is_dir() and any((path / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        if not is_saved:
            return datasets.load_dataset(name, script.dataset_config, split=split, streaming=script.dataset_streaming)
        dataset = datasets.load_from_disk(str(path))
        dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name} cannot be read with {setting}={split!r}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"there is no data set {name!r} here or on the hub ({' '.join(str(error).split())}); set dataset_name (or "
            "dataset_test_name) to a hub id, a folder, or a file"
        ) from error
    return dataset.to_iterable_dataset() if script.dataset_streaming else dataset


def prepare(dataset: Any, script: TaskArguments) -> Any:
    """Adds a `prompt` column, conversational if configured, and a `solution` column if one is named.

    All other columns stay, for the reward functions. ValueError if a named column is missing or the pattern does not
    match.
    """
    source = script.prompt_column or "prompt"
    columns = dataset.column_names
    for setting, column in (("prompt_column", source), ("solution_column", script.solution_column)):
        if columns is not None and column is not None and column not in columns:
            raise ValueError(
                f"the data set has no column {column!r}, only {', '.join(columns)}; set {setting} to one of them"
            )
    pattern = _pattern(script)
    renamed = source != "prompt"
    chat = script.conversational
    if chat is None:
        chat = renamed or script.system_prompt is not None
    if not chat and script.system_prompt is not None:
        raise ValueError("system_prompt is a message, but conversational is False; set conversational to True")
    if not (chat or renamed or script.solution_column):
        return dataset

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        columns: dict[str, Any] = {"prompt": conversation(row[source], script.system_prompt) if chat else row[source]}
        if script.solution_column:
            columns["solution"] = solution(row[script.solution_column], pattern)
        return columns

    return dataset.map(convert, remove_columns=[source] if renamed and source != script.solution_column else None)


def conversation(prompt: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    """Converts a prompt into messages. Text becomes a user message; a system prompt comes first unless there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def solution(answer: Any, pattern: re.Pattern[str] | None) -> Any:
    """Extracts the solution of an answer: the pattern's first group, or all of it. ValueError without a match."""
    if pattern is None:
        return answer
    match = pattern.search(str(answer))
    if match is None:
        raise ValueError(
            f"solution_pattern={pattern.pattern!r} is not found in the answer {answer!r}; change the pattern"
        )
    return match.group(1).strip()


def _pattern(script: TaskArguments) -> re.Pattern[str] | None:
    text = script.solution_pattern
    if text is None:
        return None
    if script.solution_column is None:
        raise ValueError(f"solution_pattern={text!r} has no column to search; set solution_column")
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"solution_pattern={text!r} is not a regular expression: {error}") from error
    if pattern.groups < 1:
        raise ValueError(f"solution_pattern={text!r} has no group; put brackets around the solution, as in '#### (.+)'")
    return pattern
