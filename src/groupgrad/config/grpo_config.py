"""`GRPOConfig`: the settings of a run, parsed, normalised and checked."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from groupgrad import compat
from groupgrad.config import legacy, rules
from groupgrad.config.field_rules import DICTS, RANGES
from groupgrad.config.launcher import fsdp_settings, uses_deepspeed, uses_fsdp
from groupgrad.config.settings import GRPOSettings
from groupgrad.errors import ConfigError
from groupgrad.kernels.extension_lock import bound_waits

_TWO_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "activation_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Settings that transformers has under two names."""


@dataclass(repr=False)
class GRPOConfig(GRPOSettings):
    """All settings of a GRPO run: the fields of `transformers.TrainingArguments` and of `GRPOSettings`.

    Defaults that differ from `TrainingArguments`: `learning_rate` 1e-6, `logging_steps` 10, `gradient_checkpointing`
    (where memory needs it, and always for shards on accelerators), `remove_unused_columns` False, and `bf16`, which is
    on unless `fp16` is, wherever an accelerator computes in it; on a CPU it stays off unless set. Raises ConfigError, a
    ValueError, that lists every setting that cannot work. One UserWarning names the settings that have no effect beside
    the others.
    """

    def __post_init__(self) -> None:
        """Parses, completes and checks the settings; `settle` does so again for those that were assigned later."""
        self._parse_dicts()
        if texts := [text for text in parse_texts(self) if text.partition("=")[0] not in RANGES]:
            raise ConfigError(texts)
        legacy.take_over(self)
        self._normalise()
        if uses_deepspeed(self):
            bound_waits()  # DeepSpeed compiles parts of itself, the first of them when processes meet
        checkpointing_by_need = self.gradient_checkpointing is None
        try:
            super().__post_init__()
            failure = None
        except (ValueError, TypeError, ImportError, NotImplementedError) as error:
            failure = error
        if failure is None and checkpointing_by_need:
            is_asked = fsdp_settings(self).get("activation_checkpointing")
            # Without weights of its own yet, a rank of a model in shards measures nothing.
            is_sharded = self.device.type != "cpu" and (uses_fsdp(self) or uses_deepspeed(self))
            self._set_checkpointing(True if is_asked or is_sharded or self.device.type not in ("cpu", "cuda") else None)
        problems = rules.problems(self)
        if self.deepspeed is not None and (problems or failure is not None):
            unset_hf_deepspeed_config()  # transformers would load the models of the next trainer for it
        if problems or isinstance(failure, (ValueError, TypeError)):
            raise ConfigError([*problems, *([] if failure is None else [str(failure)])]) from failure
        if isinstance(failure, ImportError) and self.deepspeed is not None:
            compat.require("deepspeed", f"deepspeed={self.deepspeed!r}")
        if failure is not None:
            raise failure
        told, self._told = getattr(self, "_told", ()), rules.warnings_for(self)
        for text in self._told:
            if text not in told:
                warnings.warn(text, UserWarning, stacklevel=3)
        self._settled = option_values(self)

    def settle(self) -> None:
        """Does for settings that were assigned after the config was made what its constructor does with them.

        A setting that followed from others, such as `eval_steps` from `logging_steps`, keeps its value, as in
        `TrainingArguments`. ConfigError that lists every setting that cannot work; the config then stays as it was.
        """
        now, then = option_values(self), getattr(self, "_settled", {})
        if now == then:
            return
        before = dict(self.__dict__)
        for one, other in _TWO_NAMES.items():
            if now.get(one) != then.get(one, now.get(one)) and now.get(other) == then.get(other, now.get(other)):
                setattr(self, other, getattr(self, one))  # of the two names, the one that was assigned
        try:
            GRPOConfig.__post_init__(self)
        except Exception:  # whatever it is, the assignment is taken back
            self.__dict__.update(before)
            raise

    def _parse_dicts(self) -> None:
        """Turns JSON text into dicts. Text that is no JSON object stays, and the rules report it."""
        for name in (*DICTS, "on_reward_failure"):
            value = getattr(self, name)
            if isinstance(value, str):
                try:
                    value = json.loads(value)
                except json.JSONDecodeError:
                    continue
            if isinstance(value, dict):
                # A copy, since the dict is the caller's, with names in place of dtypes, as in to_dict.
                value = {k: str(v).split(".")[-1] if isinstance(v, torch.dtype) else v for k, v in value.items()}
                setattr(self, name, value)

    def _normalise(self) -> None:
        """Replaces alternative spellings of values by the usual ones, and fills in `bf16`."""
        switches = {"scale_rewards": ("group", "none"), "include_num_input_tokens_seen": ("all", "no")}
        for name, (on, off) in switches.items():
            text = str(getattr(self, name)).lower()
            if text in ("true", "false"):
                setattr(self, name, on if text == "true" else off)
        if isinstance(self.fsdp, str) and self.fsdp.lower() in ("true", "false"):
            self.fsdp = True if self.fsdp.lower() == "true" else None  # pyright: ignore[reportAttributeAccessIssue]
        if self.report_to is None:
            self.report_to = "none"
        if self.bf16 and not (torch.cuda.is_available() or torch.accelerator.is_available()):
            self.use_cpu = True  # where bfloat16 works too
        if self.bf16 is None:
            self.bf16 = not self.fp16 and not self.use_cpu and compat.computes_in_bf16()
        if self.hub_token == "<HUB_TOKEN>":
            self.hub_token = None
        self._join_checkpointing()

    def _join_checkpointing(self) -> None:
        """Gives `gradient_checkpointing` and its new name `activation_checkpointing` the same value.

        A copy of a config that changes only one of them sets both names, to different values. Then off wins.
        """
        if not hasattr(self, "activation_checkpointing"):
            return
        old, new = self.gradient_checkpointing_kwargs, self.activation_checkpointing_kwargs
        if new is None:
            self.activation_checkpointing_kwargs = old
        old, new = self.gradient_checkpointing, self.activation_checkpointing
        if old is not None and new is not None and old != new:
            warnings.warn(
                f"gradient_checkpointing={old} and activation_checkpointing={new} are one setting with two names; "
                f"it is off, because one of them says so. Set both to True to turn it on",
                stacklevel=5,
            )
        values = [value for value in (old, new) if value is not None]
        self._set_checkpointing(all(values) if values else None)

    def _set_checkpointing(self, value: bool | None) -> None:
        self.gradient_checkpointing = value
        if hasattr(self, "activation_checkpointing"):
            self.activation_checkpointing = value

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state to pickle, without the token: every saved model has its settings beside it."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_settled"}
        return kept | {"hub_token": None}

    def __copy__(self) -> GRPOConfig:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> GRPOConfig:
        copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Returns every field as plain data, without tokens. `GRPOConfig(**data)` equals this config."""
        plain = copy.copy(self)
        for field in dataclasses.fields(self):  # the base class writes into nested dicts
            setattr(plain, field.name, copy.deepcopy(getattr(self, field.name)))
        data = super(GRPOConfig, plain).to_dict()
        return data | {name: None for name in data if name.endswith("_token") and getattr(self, name) is None}


def option_values(config: GRPOConfig) -> dict[str, Any]:
    """Every setting by its name, as text where it could change in place."""
    values = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    return {name: v if isinstance(v, (int, float, str, type(None))) else repr(v) for name, v in values.items()}


SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_NUMBERS = (int, float)


def parse_texts(config: Any) -> list[str]:
    """Replaces the texts of fields that take no text by their values; a sentence for each that has none."""
    problems = []
    for name, kinds in _kinds_of_fields(type(config)).items():
        text = getattr(config, name, None)
        if not isinstance(text, str):
            continue
        try:
            setattr(config, name, _parsed(text.strip().lower(), kinds))
        except ValueError:
            wanted = "True or False" if bool in kinds else "a number"
            problems.append(f"{name}={text!r} is a text. Set it to {wanted}")
    return problems


def _parsed(text: str, kinds: tuple[type, ...]) -> Any:
    """The value of a text as one of these types. ValueError if it is none."""
    if text in ("none", "null") and type(None) in kinds:
        return None
    if bool in kinds:
        if text not in SWITCHES:
            raise ValueError(text)
        return SWITCHES[text]
    number = float(text)
    if not math.isfinite(number) or (float not in kinds and not number.is_integer()):
        raise ValueError(text)
    return int(number) if int in kinds and number.is_integer() else number


@functools.cache
def _kinds_of_fields(record: type) -> dict[str, tuple[type, ...]]:
    """Types of the fields of a dataclass that take a switch or a number, and neither a text nor anything else."""
    found: dict[str, tuple[type, ...]] = {}
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        hint = hints[field.name]
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        if any(kind in (bool, *_NUMBERS) for kind in kinds) and set(kinds) <= {bool, *_NUMBERS, type(None)}:
            found[field.name] = kinds
    return found


HIDDEN = "<hidden>"
"""The text in the place of a token or password."""

_SECRET = ("token", "secret", "password", "passwd", "api_key", "apikey", "authorization", "credential", "credentials")
"""Names end so if their text is a secret."""

_NO_SECRET = frozenset(f"{kind}_token" for kind in ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video"))


def without_secrets(value: Any, key: str = "") -> Any:
    """Copies a setting, named `key`, with tokens and passwords hidden, also within dicts and JSON texts."""
    if isinstance(value, Mapping):
        return {str(name): without_secrets(item, str(name)) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item, key) for item in value]
    name = key.lower().replace("-", "_")
    is_secret = name.endswith(_SECRET) and name not in _NO_SECRET
    if isinstance(value, str) and value and (is_secret or any(f'{word}"' in value.lower() for word in _SECRET)):
        return HIDDEN
    return value
