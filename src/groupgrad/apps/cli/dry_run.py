"""Describes the run that a trainer would make, for `groupgrad train --dry-run`."""

from __future__ import annotations

import dataclasses
from typing import Any

from groupgrad.apps.cli.parsing import Parsed
from groupgrad.config.field_rules import changed
from groupgrad.config.hidden_secrets import without_secrets

_COMPUTED = ("logging_dir", "deepspeed_plugin", "derived_settings")
"""Fields that are derived from others and say no more than they."""
_CONVERTED = ("accelerator_config", "debug", "disable_tqdm")
"""Fields whose default transformers writes in another form."""


def describe(trainer: Any, parsed: Parsed) -> str:
    """Returns the settings that were given and those that follow from them and, in words, the model, data, batch,
    steps and engine."""
    from groupgrad.trainer import run_summary

    given, derived = _settings(parsed)
    lines = ["settings that were given:", *given]
    if derived:
        lines += ["", "settings that follow from them or from this machine:", *derived]
    model, execution = trainer.model, trainer.execution
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = {
        "model": f"{model.num_parameters():,} parameters, of which {trained:,} are trained",
        "data": run_summary.data_in_words(trainer),
        "batch": run_summary.batch_in_words(trainer.plan),
        "steps": run_summary.steps_in_words(trainer),
        "prompts": str(run_summary.prompt_lengths(trainer, run_summary.PROMPTS_AT_START)),
        "ending": run_summary.ending_in_words(trainer),
        "rewards": ", ".join(trainer.rewards.names),
        "sampled by": f"{execution.engine_choice.name} engine: {execution.engine_choice.reason}",
        "scored in": f"{execution.layout_report.layout} layout",
        **run_summary.old_logprobs_row(trainer),
    }
    width = max(map(len, rows))
    lines += ["", *(f"{name:<{width}}  {text}" for name, text in rows.items()), "", "No step was taken.\n"]
    return "\n".join(lines)


def _settings(parsed: Parsed) -> tuple[list[str], list[str]]:
    """Lines of the fields that were given, and of the others that differ from their defaults."""
    given, derived = [], []
    for record in (parsed.script, parsed.model, parsed.config):
        names = [field.name for field in dataclasses.fields(record) if field.name not in _COMPUTED]
        differ = changed(record, names)
        for name in names:
            line = f"  {name}: {without_secrets(getattr(record, name), name)}"
            if name in parsed.given:
                given.append(line)
            elif name in differ and name not in _CONVERTED:
                derived.append(line)
    return given or ["  none"], derived
