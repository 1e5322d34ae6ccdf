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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.apps.cli.command_parser import CommandHelp, HelpfulParser, epilog
from groupgrad.apps.cli.launch import add_flags
from groupgrad.apps.cli.yaml_files import read_setting, read_settings
from groupgrad.apps.sweep.sweep_plan import merged
from groupgrad.config import GRPOConfig, legacy
from groupgrad.config.grpo_config import without_secrets
from groupgrad.spelling import nearest

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

_NO_FIELDS = (
    *("help", "config", "set", "dry_run", "num_processes", "accelerate_config", "prompts", "no_round"),
    *("model", "k", "threshold", "limit", "by", "answer", "against", "output"),
    *("device", "devices", "prompt", "gguf_file"),
)

TRAINING, OLD = "Training (transformers.TrainingArguments)", "Accepted for older scripts"


@dataclass(slots=True)
class Parsed:
    """The records of one command line."""

    script: TaskArguments
    model: ModelArguments
    config: GRPOConfig
    flags: dict[str, Any]
    """Values of the flags that are no fields, such as `dry_run`."""
    given: frozenset[str] = frozenset()
    """Fields that the command line or the YAML file sets; the others have defaults or follow from these."""
    command: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The command line and YAML file of the run, stored in its folder; tokens and passwords are hidden."""


_SPELLINGS = "--x_y can be written --x-y, a switch that is on is turned off by --no_x_y, and none means unset.\n\n"

_EXAMPLES = """\
groupgrad train --config run.yaml
groupgrad train --config run.yaml --learning_rate 2e-6 --set generation_kwargs.top_k=20 --dry-run
groupgrad train --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name openai/gsm8k --dataset_config main \\
    --prompt_column question --solution_column answer --solution_pattern '####\\s*(.+)' --reward_funcs accuracy_reward
groupgrad train --config run.yaml --resume_from_checkpoint auto
groupgrad train --config run.yaml --num-processes all --accelerate-config zero3
"""


class FieldParser(HelpfulParser, HfArgumentParser):
    """Parser with the fields of dataclasses as flags, whose defaults may come from a YAML file."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._mappings: set[str] = set()
        self._kinds: dict[str, set[Any]] = {}
        super().__init__(*args, **kwargs)

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        # The sections of `SECTIONS` first, then the fields of transformers, then those of earlier releases.
        hints = typing.get_type_hints(dtype)
        title = TRAINING if issubclass(dtype, TrainingArguments) else dtype.__name__
        sections: dict[str, list[dataclasses.Field]] = {}
        for field in self._fields_of(dtype):
            title = SECTIONS.get(field.name, title)
            if field.init:
                field.type = hints[field.name]
                sections.setdefault(OLD if field.name in legacy.LEGACY else title, []).append(field)
        for title in sorted(sections, key=lambda name: (name == OLD, name == TRAINING)):
            group = self.add_argument_group(title)
            for field in sections[title]:
                self._add_field(group, field)

    def _fields_of(self, dtype: Any) -> Sequence[dataclasses.Field]:
        """The fields of a dataclass that are flags."""
        return dataclasses.fields(dtype)

    def _add_field(self, group: Any, field: dataclasses.Field) -> None:
        hint, num_actions = field.type, len(self._actions)
        if typing.get_args(hint)[:2] == (list[str], str):  # a flag takes one value or several
            field.type = list[str] | None
        if set(typing.get_args(hint)) == {str, bool}:  # a name, or a switch for one of the names
            field.type = str
        self._parse_dataclass_field(group, field)
        flag, *others = self._actions[num_actions:]
        for other in others:  # --no_x_y
            other.help = argparse.SUPPRESS
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        self._kinds[field.name] = {typing.get_origin(option) or option for option in options}
        if dict in self._kinds[field.name]:
            self._mappings.add(field.name)
        if bool in options and flag.nargs is None:
            flag.nargs, flag.const = "?", True
        if type(None) in options and str not in options and callable(flag.type):
            flag.type = _Optional(flag.type)

    def fields(self) -> dict[str, argparse.Action]:
        """Returns the flag of each field, not its `--no_` form."""
        return {action.dest: action for action in reversed(self._actions) if action.dest not in _NO_FIELDS}

    def take_file(self, content: Mapping[Any, Any], origin: str) -> dict[str, Any]:
        """Takes a YAML file's keys as defaults and exports its `env:` mapping; the keys without a field, with values.

        Exits with status 2, and a sentence that begins with `origin`, for what cannot be read.
        """
        environment = content.get("env") or {}
        if not isinstance(environment, dict):
            self.error(f"{origin}env={environment!r} is not a mapping of variables to values")
        os.environ.update({str(name): str(value) for name, value in environment.items()})
        return self.take_defaults({key: value for key, value in content.items() if key != "env"}, origin)

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
                flag.default = [self._from_yaml(flag, shown, item) for item in items]
            else:
                flag.default = self._from_yaml(flag, shown, value)
            flag.required = False
        return unknown

    def take_settings(self, settings: Sequence[str], argv: Sequence[str]) -> None:
        """Takes the values of `--set KEY=VALUE`, read as YAML, as defaults.

        KEY is a field, or a.b for the key b of the field a. Exits with status 2 for an unknown field, a key of a field
        that is no dict, or a field that `argv` has as a flag.
        """
        fields = self.fields()
        given = {word.partition("=")[0] for word in argv}
        for setting in settings:
            try:
                path, value = read_setting(setting)
            except ValueError as error:
                self.error(str(error))
            name = path.partition(".")[0]
            if name not in fields:
                self.error(f"--set {setting}: unknown field {name!r}{_did_you_mean(name, fields)}")
            if not given.isdisjoint(fields[name].option_strings):
                self.error(f"--set {setting}: --{name} is given too; set it in one place")
            if path != name and name not in self._mappings:
                self.error(f"--set {setting}: {name} has no keys; write --set {name}=VALUE")
            default = fields[name].default
            if path != name:
                content = yaml.safe_load(default) if isinstance(default, str) else default
                try:
                    value = merged({name: content}, {path: value})[name]
                except ValueError as error:
                    self.error(f"--set {error}")
            self.take_defaults({name: value}, "--set ")

    def load_yaml(self, path: str) -> dict[Any, Any]:
        """The keys of a YAML file. Exits with status 2 for a bad file."""
        try:
            return read_settings(path)
        except ValueError as error:
            self.error(str(error))

    def _from_yaml(self, flag: argparse.Action, shown: str, value: Any) -> Any:
        """Converts a YAML value as the flag would convert its text, unless it has a type of the field already."""
        read: Any = flag.type or str
        if value is None or (type(value) in self._kinds[flag.dest] - {str} and flag.nargs != "+"):
            return value
        if isinstance(value, dict) and dataclasses.is_dataclass(read):  # a part of a mixture of data sets
            return value
        if isinstance(value, (list, dict)):
            wanted = "a list of values" if flag.nargs == "+" else "one value"
            self.error(f"{shown} has a {type(value).__name__}, and {flag.dest} takes {wanted}")
        if value is False and "no" in (flag.choices or ()):  # YAML reads an unquoted no as False
            return "no"
        if isinstance(value, bool) and read is str:
            return value
        try:
            return read(str(value))
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            self.error(f"{shown} cannot be read: {error}")


class TrainParser(FieldParser):
    """Parser with all fields of the three records as flags, in sections."""

    def __init__(self, *, prog: str, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            [TaskArguments, ModelArguments, GRPOConfig],  # pyright: ignore[reportArgumentType]
            prog=prog,
            usage=usage,
            description=f"{description} Every field is a flag and a key of the YAML file given by --config; the "
            "command line wins.",
            epilog=_SPELLINGS + epilog,
            formatter_class=CommandHelp,
            allow_abbrev=False,
        )
        self.add_argument("--config", metavar="FILE", help="YAML file with defaults; its `env:` mapping is exported")
        self.add_argument(
            "--set",
            metavar="KEY=VALUE",
            action="append",
            help="set a field, or a key of a field that is a mapping (a.b=VALUE); VALUE is read as YAML; repeatable",
        )

    def take_run(self, content: Mapping[Any, Any], origin: str = "") -> dict[str, Any]:
        """`take_file` for a run, whose keys are fields. Returns their converted values.

        Exits with status 2, and the key that may have been meant, for another one.
        """
        for key in self.take_file(content, origin):
            hint = _did_you_mean(key.replace("-", "_"), self.fields())
            self.error(f"{origin}unknown {'key' if origin else 'field'} {key!r}{hint}")
        fields, names = self.fields(), (str(key).replace("-", "_") for key in content)
        return {name: fields[name].default for name in names if name in fields}


def train_parser() -> TrainParser:
    """Returns the parser of `groupgrad train`."""
    parser = TrainParser(
        prog="groupgrad train",
        usage="groupgrad train [--config FILE] [--FIELD VALUE ...] [--set KEY=VALUE ...] [--dry-run]",
        description="Train a model with GRPO.",
        epilog=epilog("train", _EXAMPLES),
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="check and load everything, print what would be trained, and take no step",
    )
    add_flags(parser)
    return parser


def parse(
    argv: Sequence[str], parser: TrainParser | None = None, *, content: Mapping[str, Any] | None = None
) -> Parsed:
    """Parses a command line, by default of `groupgrad train`; `content` replaces the content of the YAML file.

    Exits with status 2 and a sentence that says what to change if it cannot.
    """
    parser = parser or train_parser()
    known, content = take_run_of(parser, argv, content)
    try:
        script, model, config, *_ = parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    flags = {name: value for name, value in vars(known).items() if name in _NO_FIELDS}
    given = given_fields(parser, argv, known.set or [], content or {})
    return Parsed(script, model, config, flags, given, command_of(argv, content))


def take_run_of(
    parser: TrainParser, argv: Sequence[str], content: Mapping[str, Any] | None = None
) -> tuple[argparse.Namespace, Mapping[str, Any] | None]:
    """Takes the YAML file that a command line names, or `content`, and `--set` as defaults of the parser.

    Returns the flags, before they took these defaults, and the content. Exits with status 2 for what is unknown.
    """
    known, unknown = parser.parse_known_args(argv)
    if known.config is not None:
        content = parser.load_yaml(known.config) if content is None else content
        parser.take_run(content, f"{known.config}: ")
    parser.take_settings(known.set or [], argv)
    if unknown:
        argument = unknown[0].split("=")[0]
        flags = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
        hint = _did_you_mean(argument.lstrip("-").replace("-", "_"), flags, "--")
        parser.error(f"unknown {'flag' if argument.startswith('-') else 'argument'} {argument!r}{hint}")
    return known, content


def given_fields(
    parser: TrainParser, argv: Sequence[str], settings: Sequence[str], content: Mapping[Any, Any]
) -> frozenset[str]:
    """The fields that flags, `--set` and the keys of a YAML file set."""
    words = {word.partition("=")[0] for word in argv}
    flags = {action.dest for action in parser._actions if not words.isdisjoint(action.option_strings)}
    keys = {str(key) for key in content} | {setting.partition("=")[0].partition(".")[0] for setting in settings}
    return frozenset(parser.fields().keys() & (flags | {key.replace("-", "_") for key in keys}))


def command_of(argv: Sequence[str], content: Mapping[Any, Any] | None) -> dict[str, Any]:
    """A command line as it is stored: its words, the content of its YAML file, and the folder of relative paths."""
    words: list[str] = []
    for flag, word in zip(["", *argv], argv):
        *names, value = word.split("=")  # --flag=value, and key=value after --set
        name = names[-1] if names else flag
        is_value = bool(names) or not word.startswith("-")
        hidden = without_secrets(value, name.lstrip("-").rpartition(".")[2]) if is_value else value
        words.append("=".join([*names, hidden]))
    return {"argv": words, "yaml": without_secrets(content), "folder": os.getcwd()}


class _SettingsParser(TrainParser):
    """Parser of settings that no command line has given: problems are errors."""

    def error(self, message: str) -> NoReturn:
        """ValueError with the problem."""
        raise ValueError(message)


def parse_settings(settings: Mapping[str, Any]) -> Parsed:
    """Reads settings as the YAML file of `groupgrad train` would have them. ValueError, with what to change, if they
    cannot work."""
    parser = _SettingsParser(prog="groupgrad train", usage="", description="", epilog="")
    if "env" in settings:
        parser.error("env is of the whole process: set it outside of arms")
    parser.take_run(settings)
    script, model, config, *_ = parser.parse_args_into_dataclasses([], look_for_args_file=False)
    return Parsed(script=script, model=model, config=config, flags={})


class _Optional:
    """Flag type that reads a number or a boolean, or `none` and `null` as None."""

    def __init__(self, kind: Any):
        self.kind = kind
        self.__name__ = kind.__name__  # argparse shows it in errors

    def __call__(self, text: str) -> Any:
        return None if text.lower() in ("none", "null") else self.kind(text)


def _did_you_mean(name: str, known: Any, prefix: str = "") -> str:
    similar = nearest(name, known)
    return f"; did you mean {prefix}{similar}?" if similar else ""
