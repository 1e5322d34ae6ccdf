"""Flags and YAML files into the three records of a training run.

A YAML key is a default for the flag of the same name, so the command line wins. A key or flag that nobody knows is an
error that names the one spelled most like it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from groupgrad.cli.arguments import ModelArguments, ScriptArguments
from groupgrad.config import GRPOConfig, legacy
from groupgrad.config.field_rules import nearest

SECTIONS: dict[str, str] = {
    "dataset_name": "Data",
    "reward_funcs": "Rewards",
    "model_name_or_path": "Model",
    "use_peft": "Adapter and quantization",
    "model_init_kwargs": "Loading and precision of the model",
    "beta": "Reference model",
    "num_generations": "Groups and lengths",
    "rollout_engine": "Generation",
    "use_vllm": "vLLM",
    "loss_type": "Objective",
    "reward_weights": "Advantages",
    "vllm_importance_sampling_correction": "Correction of the difference between vLLM and the trainer",
    "log_completions": "Logging of completions",
}
"""Field that opens a section of `--help` -> its title; a section ends where the next one begins."""

TRAINING, OLD = "Training (transformers.TrainingArguments)", "Accepted for older scripts"

NO_VALUE = ("none", "null")


@dataclass(slots=True)
class Parsed:
    """One command line."""

    script: ScriptArguments
    model: ModelArguments
    config: GRPOConfig


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling of each flag, without the name of its value repeated."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=44, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        longest = next((o for o in action.option_strings if o.startswith("--")), action.option_strings[0])
        shown = {0: "", "?": " [VALUE]", "+": " VALUE ..."}.get(action.nargs or "", " VALUE")
        return longest + ("" if action.nargs == 0 else shown)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class TrainParser(HfArgumentParser):
    """All fields of the three records as flags, in sections."""

    def __init__(self) -> None:
        super().__init__(
            [ScriptArguments, ModelArguments, GRPOConfig],  # pyright: ignore[reportArgumentType]
            prog="groupgrad train",
            usage="groupgrad train --config FILE --FIELD VALUE ...",
            description="Train a model with GRPO. Every field is a flag and a key of the YAML file given by --config; "
            "the command line wins.",
            epilog="--x_y can be written --x-y, a switch that is on is turned off by --no_x_y, and none means unset.",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        self.add_argument("--config", metavar="FILE", help="YAML file with defaults; its `env:` mapping is exported")

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = typing.get_type_hints(dtype)
        own, rest, title = [], [], TRAINING
        for field in dataclasses.fields(dtype):
            title = SECTIONS.get(field.name, title)
            section = OLD if field.name in legacy.LEGACY else title
            (rest if section in (TRAINING, OLD) else own).append((section, field))
        groups: dict[str, Any] = {}
        # The usual sections first, then transformers' fields, the old ones last.
        for section, field in [*own, *sorted(rest, key=lambda entry: entry[0] == OLD)]:
            if field.init:
                if section not in groups:
                    groups[section] = self.add_argument_group(section)
                field.type = hints[field.name]
                self._add_field(groups[section], field)

    def _add_field(self, group: Any, field: dataclasses.Field) -> None:
        hint, known = field.type, len(self._actions)
        self._parse_dataclass_field(group, field)
        flag, *twins = self._actions[known:]
        for twin in twins:
            twin.help = argparse.SUPPRESS
        options = typing.get_args(hint) if _is_union(hint) else (hint,)
        if bool in options and flag.nargs is None:
            flag.nargs, flag.const = "?", True
        if type(None) in options and str not in options and callable(flag.type):
            flag.type = _optional(flag.type)

    def error(self, message: str) -> NoReturn:
        """Print the problem and leave with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n(`{self.prog} --help` lists all fields)\n")

    def fields(self) -> dict[str, argparse.Action]:
        """The flag of each field."""
        found: dict[str, argparse.Action] = {}
        for action in self._actions:
            if action.dest not in ("help", "config"):
                found.setdefault(action.dest, action)
        return found

    def read_config(self, path: str) -> None:
        """Take a YAML file's keys as defaults and export its `env:` mapping; leaves with status 2 if it is unusable."""
        content = self._load(path)
        environment = content.pop("env", None) or {}
        if not isinstance(environment, dict):
            self.error(f"{path}: env={environment!r} is not a mapping of variables to values")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        fields, defaults = self.fields(), {}
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if name not in fields:
                self.error(f"{path}: unknown key {key!r}{_hint(name, fields)}")
            defaults[name] = self._from_yaml(fields[name], f"{path}: {key}={value!r}", value)
        self.set_defaults(**defaults)

    def _load(self, path: str) -> dict[Any, Any]:
        try:
            with open(path, encoding="utf-8") as file:
                content = yaml.safe_load(file)
        except OSError as error:
            self.error(f"--config {path}: {error.strerror or error}")
        except yaml.YAMLError as error:
            self.error(f"--config {path} is not YAML: {error}")
        if not isinstance(content, (dict, type(None))):
            self.error(f"--config {path} holds a {type(content).__name__}, not keys with values")
        return dict(content or {})

    def _from_yaml(self, action: argparse.Action, shown: str, value: Any) -> Any:
        """The value as the flag would give it; text goes through argparse as if it came from the command line."""
        if value is None:
            return None
        if action.nargs == "+":
            items = value if isinstance(value, list) else [value]
            return [self._from_yaml(_single(action), shown, item) for item in items]
        # An optional number is wrapped; a str field (a dict, a bool) takes what YAML made of it.
        kind = getattr(action.type, "kind", action.type)
        if kind in (int, float) and not isinstance(value, str):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or (kind is int and value != int(value)):
                self.error(f"{shown} is not {'a whole number' if kind is int else 'a number'}")
            return kind(value)
        if isinstance(value, str) and callable(action.type):
            try:
                return action.type(value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                self.error(f"{shown} cannot be read: {error}")
        return value


def parse(argv: Sequence[str]) -> Parsed:
    """The records of a command line; leaves with status 2 and a sentence that says what to change if there are none."""
    parser = TrainParser()
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config")
    path = files.parse_known_args(argv)[0].config
    if path is not None:
        parser.read_config(path)
    _, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-").replace("-", "_")
        kind = "flag" if unknown[0].startswith("-") else "argument"
        parser.error(f"unknown {kind} {unknown[0].split('=')[0]!r}{_hint(name, parser.fields(), '--')}")
    try:
        script, model, config, *_ = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return Parsed(script=script, model=model, config=config)


class _optional:
    """A type that reads `none` and `null` as None."""

    def __init__(self, kind: Any):
        self.kind = kind
        self.__name__ = getattr(kind, "__name__", str(kind))

    def __call__(self, text: Any) -> Any:
        return None if isinstance(text, str) and text.lower() in NO_VALUE else self.kind(text)


def _single(action: argparse.Action) -> argparse.Action:
    return argparse.Action(action.option_strings, action.dest, type=action.type)  # pyright: ignore[reportArgumentType]


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _hint(name: str, known: Any, prefix: str = "") -> str:
    like = nearest(name, known)
    return f"; did you mean {prefix}{like}?" if like else ""
