"""Reads the data, rewards and sampling of the run that made a model, to evaluate the model with them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupgrad.apps.cli.parsing import given_fields, train_parser
from groupgrad.checkpoints.saving import step_of
from groupgrad.config.grpo_config import HIDDEN
from groupgrad.config.settings import GRPOSettings
from groupgrad.run_folder import run_files

_PATHS = ("dataset_name", "dataset_test_name", "reward_model_name_or_path", "image_root")
"""Fields that may be paths from the folder in which the run was started."""
_INHERITED = ("seed", "bf16", "fp16", "use_cpu")
"""Settings of transformers that an evaluation takes from a run."""


def run_file(model: str) -> Path | None:
    """The record of the run that made a model or a checkpoint; None for any other model."""
    folder = Path(model)
    file = (folder.parent if step_of(folder) >= 0 else folder) / run_files.CONFIG
    return file if file.is_file() else None


def recorded_fields(model: str) -> dict[str, Any]:
    """The values of fields that the run of a model or a checkpoint was given; empty for any other model.

    A run of a Python script has recorded its settings and the names of its reward functions, but not its data.
    """
    file = run_file(model)
    if file is None:
        return {}
    record = json.loads(file.read_text(encoding="utf-8"))
    command = record.get("command") or {}
    is_of_fields = "argv" in command and command.get("name") != "demo"
    found = _of_command(command, f"{file}: ") if is_of_fields else _of_settings(record)
    return {name: value for name, value in found.items() if HIDDEN not in str(value)}


def _of_command(command: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The settings that a command line and its YAML file gave. Functions of their folder can then be imported."""
    parser, words = train_parser(), command["argv"]
    content = {key: value for key, value in (command["yaml"] or {}).items() if key != "env"}
    parser.take_run(content, origin)
    settings = parser.parse_known_args(words)[0].set or []
    parser.take_settings(settings, words)
    known, _ = parser.parse_known_args(words)
    found = {name: getattr(known, name) for name in given_fields(parser, words, settings, content)}
    start = command["folder"]
    if start != os.getcwd():
        sys.path.append(start)
        found |= {name: _from(start, found[name]) for name in _PATHS if name in found}
    return found


def _from(start: str, value: Any) -> Any:
    """A path as it is seen from here, if `value` or each of its items is one from `start`."""
    if isinstance(value, list):
        return [_from(start, item) for item in value]
    name, equals, path = value.rpartition("=") if isinstance(value, str) else ("", "", None)
    return f"{name}{equals}{Path(start, path)}" if path and Path(start, path).exists() else value


def _of_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a script's run that differ from their defaults, and the names of its reward functions."""
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOSettings)}
    found = {
        name: value
        for name, value in record["settings"].items()
        if name in _INHERITED or (name in defaults and value != defaults[name])
    }
    return found | {"reward_funcs": record["reward_functions"], "eval_reward_funcs": record["eval_reward_functions"]}
