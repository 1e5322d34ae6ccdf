"""Makes the trainers of arms from their settings: the interface, and the one for a sweep that a script describes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from groupgrad.config import GRPOConfig
from groupgrad.spelling import did_you_mean
from groupgrad.trainer import GRPOTrainer


class ArmFactory(Protocol):
    """Checks the settings of an arm, and makes its trainer."""

    def check(self, settings: Mapping[str, Any]) -> None:
        """ValueError if no run can have these settings."""
        ...

    def build(self, settings: Mapping[str, Any], folder: Path) -> Any:
        """The trainer of a run with these settings in a folder, as it would be made for the run alone."""
        ...

    def with_weights(self, settings: Mapping[str, Any], weights: Path) -> dict[str, Any]:
        """The settings of a run that begins with the weights in a folder."""
        ...


class ScriptArms:
    """Makes trainers from the arguments of `GRPOTrainer`; settings are fields of `GRPOConfig`.

    `arguments` are all of them but `args`. `labelled` has, for an argument that arms differ in, its values by name; the
    settings then hold the name. The key `peft_config.r` changes a field of the adapter's configuration.
    """

    def __init__(self, arguments: Mapping[str, Any], labelled: Mapping[str, Mapping[str, Any]]):
        self._arguments, self._labelled = dict(arguments), dict(labelled)

    def check(self, settings: Mapping[str, Any]) -> None:
        """ValueError for unknown fields, and for those that break a rule of the configuration."""
        fields, objects = self._split(settings)
        unknown = next((name for name in fields if name not in GRPOConfig.__dataclass_fields__), None)
        if unknown is not None:
            hint = did_you_mean(unknown, GRPOConfig.__dataclass_fields__, before="; ")
            raise ValueError(f"unknown field {unknown!r}{hint}")
        for name, label in objects.items():
            if name in self._labelled and label not in (None, *self._labelled[name]) and name != "model":
                raise ValueError(f"{name}={label!r} is not one of {', '.join(self._labelled[name])}")
        if isinstance(objects.get("peft_config"), Mapping):
            self._adapter(objects["peft_config"])
        GRPOConfig(**fields)

    def build(self, settings: Mapping[str, Any], folder: Path) -> GRPOTrainer:
        """The trainer of an arm."""
        fields, objects = self._split(settings)
        arguments = dict(self._arguments)
        for name, value in objects.items():
            if name == "peft_config" and isinstance(value, Mapping):
                arguments[name] = self._adapter(value)
            else:
                arguments[name] = self._labelled.get(name, {}).get(value, value)
        arguments["model"] = copy.deepcopy(arguments.get("model"))  # each arm trains a model object of its own
        return GRPOTrainer(**arguments, args=GRPOConfig(**{**fields, "output_dir": str(folder)}))

    def with_weights(self, settings: Mapping[str, Any], weights: Path) -> dict[str, Any]:
        """The settings with another model; an adapter in the folder is trained further."""
        return {**settings, "model": str(weights), "peft_config": None}

    def _split(self, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Fields of the configuration, and arguments of the trainer."""
        names = {*self._arguments, *self._labelled, "model", "peft_config"}
        fields = {name: value for name, value in settings.items() if name not in names}
        return fields, {name: value for name, value in settings.items() if name in names}

    def _adapter(self, changes: Mapping[str, Any]) -> Any:
        given = self._arguments.get("peft_config")
        config = copy.deepcopy(given)
        for name, value in changes.items():
            if config is None or not hasattr(config, name):
                raise ValueError(
                    f"peft_config.{name}={value!r} changes no field of peft_config={type(given).__name__}; name one "
                    "that it has"
                )
            setattr(config, name, value)
        return config
