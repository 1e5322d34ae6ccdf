"""Parses flags and YAML files into the three records of a training run.

A YAML key is the default of the flag of the same name, so the command line wins. An unknown key or flag is an error
that names the most similar one.
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
from transformers import HfArgumentParser, TrainingArguments

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
    "reward_model_init_kwargs": "Reward models",
    "vllm_importance_sampling_correction": "Correction of the difference between vLLM and the trainer",
    "log_completions": "Logging of completions",
}
"""First field of a section of `--help` -> the section's title."""

TRAINING, OLD = "Training (transformers.TrainingArguments)", "Accepted for older scripts"


@dataclass(slots=True)
class Parsed:
    """The records of one command line."""

    script: ScriptArguments
    model: ModelArguments
    config: GRPOConfig


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows one spelling of each flag, and VALUE instead of the flag's name in capitals."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=44, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        flag = next((option for option in action.option_strings if option.startswith("--")), action.option_strings[0])
        value = "VALUE" if action.metavar is None else str(action.metavar)
        return flag + {0: "", "?": f" [{value}]", "+": f" {value} ..."}.get(action.nargs, f" {value}")

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class FieldParser(HfArgumentParser):
    """Parser with the fields of dataclasses as flags, whose defaults may come from a YAML file."""

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        # The sections of `SECTIONS` first, then the fields of transformers, then those of earlier releases.
        hints = typing.get_type_hints(dtype)
        title = TRAINING if issubclass(dtype, TrainingArguments) else dtype.__name__
        sections: dict[str, list[dataclasses.Field]] = {}
        for field in dataclasses.fields(dtype):
            title = SECTIONS.get(field.name, title)
            if field.init:
                field.type = hints[field.name]
                sections.setdefault(OLD if field.name in legacy.LEGACY else title, []).append(field)
        for title in sorted(sections, key=lambda name: (name == OLD, name == TRAINING)):
            group = self.add_argument_group(title)
            for field in sections[title]:
                self._add_field(group, field)

    def _add_field(self, group: Any, field: dataclasses.Field) -> None:
        hint, num_actions = field.type, len(self._actions)
        self._parse_dataclass_field(group, field)
        flag, *others = self._actions[num_actions:]
        for other in others:  # --no_x_y
            other.help = argparse.SUPPRESS
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        if bool in options and flag.nargs is None:
            flag.nargs, flag.const = "?", True
        if type(None) in options and str not in options and callable(flag.type):
            flag.type = _Optional(flag.type)

    def error(self, message: str) -> NoReturn:
        """Prints the problem and exits with status 2."""
        self.exit(2, f"{self.prog}: error: {message}\n(`{self.prog} --help` lists all fields)\n")

    def fields(self) -> dict[str, argparse.Action]:
        """Returns the flag of each field, not its `--no_` form."""
        return {action.dest: action for action in reversed(self._actions) if action.dest not in ("help", "config")}

    def read_config(self, path: str) -> dict[str, Any]:
        """Takes a YAML file's keys as defaults and exports its `env:` mapping; the keys without a field, with values.

        Exits with status 2 for a bad file.
        """
        content = self._load_yaml(path)
        environment = content.pop("env", None) or {}
        if not isinstance(environment, dict):
            self.error(f"{path}: env={environment!r} is not a mapping of variables to values")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        return self.take_defaults(content, f"{path}: ")

    def take_defaults(self, values: dict[Any, Any], origin: str = "") -> dict[str, Any]:
        """Takes values as defaults of the fields of their names; those without a field. `origin` begins messages."""
        fields, unknown = self.fields(), {}
        for key, value in values.items():
            flag = fields.get(str(key).replace("-", "_"))
            if flag is None:
                unknown[str(key)] = value
                continue
            shown = f"{origin}{key}={value!r}"
            if flag.nargs == "+" and value is not None:
                items = value if isinstance(value, list) else [value]
                flag.default = [self._from_yaml(flag.type, shown, item) for item in items]
            else:
                flag.default = self._from_yaml(flag.type, shown, value)
            flag.required = False
        return unknown

    def _load_yaml(self, path: str) -> dict[Any, Any]:
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

    def _from_yaml(self, flag_type: Any, shown: str, value: Any) -> Any:
        """Converts a YAML value as the flag would. Text is read as if it came from the command line."""
        if value is None:
            return None
        # A field of text also takes the dict or bool that YAML has read.
        number_type = flag_type.number if isinstance(flag_type, _Optional) else flag_type
        if number_type in (int, float) and not isinstance(value, str):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or (number_type is int and value != int(value)):
                self.error(f"{shown} is not {'a whole number' if number_type is int else 'a number'}")
            return number_type(value)
        if isinstance(value, str) and callable(flag_type):
            try:
                return flag_type(value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                self.error(f"{shown} cannot be read: {error}")
        return value


class TrainParser(FieldParser):
    """Parser with all fields of the three records as flags, in sections."""

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


def parse(argv: Sequence[str]) -> Parsed:
    """Parses a command line. Exits with status 2 and a sentence that says what to change if it cannot."""
    parser = TrainParser()
    known, unknown = parser.parse_known_args(argv)
    if known.config is not None:
        for key in parser.read_config(known.config):
            hint = _did_you_mean(key.replace("-", "_"), parser.fields())
            parser.error(f"{known.config}: unknown key {key!r}{hint}")
    if unknown:
        argument = unknown[0].split("=")[0]
        hint = _did_you_mean(argument.lstrip("-").replace("-", "_"), parser.fields(), "--")
        parser.error(f"unknown {'flag' if argument.startswith('-') else 'argument'} {argument!r}{hint}")
    try:
        script, model, config, *_ = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return Parsed(script=script, model=model, config=config)


class _Optional:
    """Flag type that reads a number, or `none` and `null` as None."""

    def __init__(self, number: Any):
        self.number = number
        self.__name__ = number.__name__  # argparse shows it in errors

    def __call__(self, text: Any) -> Any:
        return None if isinstance(text, str) and text.lower() in ("none", "null") else self.number(text)


def _did_you_mean(name: str, known: Any, prefix: str = "") -> str:
    similar = nearest(name, known)
    return f"; did you mean {prefix}{similar}?" if similar else ""
