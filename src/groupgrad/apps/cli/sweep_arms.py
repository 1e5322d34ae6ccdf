"""Makes the trainers of a sweep from settings as `groupgrad train` takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from groupgrad.apps.cli import train
from groupgrad.apps.cli.arguments import ModelArguments, TaskArguments
from groupgrad.apps.cli.dataset import load_splits
from groupgrad.apps.cli.parsing import command_of, parse_settings

SETTINGS_FILE = "run.yaml"
"""File in the folder of an arm with which `groupgrad train --config` makes the same run alone."""

_KEPT = ("dtype", "attn_implementation", "load_in_8bit", "load_in_4bit")
_REPLACED = {
    name
    for name in ModelArguments.__dataclass_fields__
    if name not in _KEPT and not name.startswith(("bnb_", "use_bnb_"))
}
"""Arguments of the model that mean nothing for weights that a parent has trained."""

_REWARD_FIELDS = ("reward_funcs", "reward_model_name_or_path", "eval_reward_funcs")


class CommandLineArms:
    """Checks and builds arms. Data sets are loaded once for all arms that use the same ones."""

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._environment = dict(environment or {})
        """The variables that the sweep's file exports."""
        self._splits: dict[Any, tuple[Any, Any]] = {}

    def check(self, settings: Mapping[str, Any]) -> None:
        """ValueError, as from `groupgrad train`, for settings that cannot work; neither data nor models are loaded."""
        parsed = parse_settings(settings)
        train.load_rewards(parsed.script)
        train.load_eval_rewards(parsed.script, parsed.config.evaluates)
        train.take_model_options(parsed.model, parsed.config)
        train.peft_config(parsed.model)
        train.quantization_config(parsed.model)

    def build(self, settings: Mapping[str, Any], folder: Path) -> Any:
        """Makes the trainer of `groupgrad train` with these settings, and writes them to `SETTINGS_FILE`.

        The run records the command line that would train it alone, by which `groupgrad replay` repeats it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**settings, "output_dir": str(folder)}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (folder / SETTINGS_FILE).write_text(text, encoding="utf-8")
        trainer = train.build(parse_settings(settings), splits_of=self._splits_of)
        content = {**settings, "env": self._environment} if self._environment else settings
        trainer.recorder.command = command_of(["--config", str(folder / SETTINGS_FILE)], content)
        return trainer

    def with_weights(self, settings: Mapping[str, Any], weights: Path) -> dict[str, Any]:
        """The settings with another model; an adapter in the folder is trained further, as it is."""
        kept = {name: value for name, value in settings.items() if name not in _REPLACED}
        return {**kept, "model_name_or_path": str(weights)}

    def _splits_of(self, script: TaskArguments, evaluates: bool) -> tuple[Any, Any]:
        fields = {name: value for name, value in dataclasses.asdict(script).items() if name not in _REWARD_FIELDS}
        key = repr(fields), evaluates
        if key not in self._splits:
            self._splits[key] = load_splits(script, evaluates)
        return self._splits[key]
