"""`groupgrad eval`: samples a data set from a model, and prints what its completions score, with intervals."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupgrad.apps.cli.check import print_on_main, quiet_settings
from groupgrad.apps.cli.command_parser import epilog, positive_count, refuse
from groupgrad.apps.cli.launch import add_flags
from groupgrad.apps.cli.parsing import Parsed, TrainParser, given_fields, parse, train_parser
from groupgrad.checkpoints.saving import step_of
from groupgrad.config.grpo_config import HIDDEN
from groupgrad.config.settings import GRPOSettings, mapping
from groupgrad.run_folder import run_files

if TYPE_CHECKING:
    from groupgrad.apps.eval.results import Evaluation

ROWS_AT_ONCE = 256
"""Completions that a process samples and scores at a time, unless `per_device_eval_batch_size` is given."""

_EXAMPLES = """\
groupgrad eval runs/math --k 1,8
groupgrad eval runs/math/checkpoint-40 --num_generations 32 --k 1,8,32 --by level --output step40.json
groupgrad eval runs/math --against Qwen/Qwen2.5-0.5B-Instruct
groupgrad eval runs/math --dataset math=math.jsonl gsm8k=gsm8k.jsonl --reward_funcs accuracy_reward --against base.json
groupgrad eval Qwen/Qwen2.5-0.5B-Instruct --config run.yaml
"""

_OF_NO_USE: dict[str, Sequence[Any]] = {
    "per_device_train_batch_size": ["2"],
    "generation_batch_size": ["none"],
    "steps_per_generation": ["1"],
    "num_iterations": ["1"],
    "num_generations": ["2"],
    "dynamic_sampling_rounds": ["0"],
    "rollout_ahead": ["0"],
    "beta": ["0"],
    "sync_ref_model": ["false"],
    "eval_strategy": ["no"],
    "eval_on_start": ["false"],
    "save_strategy": ["no"],
    "load_best_model_at_end": ["false"],
    "use_peft": ["false"],
    "remove_unused_columns": ["false"],
    "rollouts_keep": ["0"],
}
"""Settings of a training that an evaluation has no use for, with values that need one prompt and nothing else."""


class EvalParser(TrainParser):
    """Parser of this command: that of `groupgrad train`, whose settings of training have no effect."""

    def __init__(self) -> None:
        super().__init__(
            prog="groupgrad eval",
            usage="groupgrad eval MODEL [--config FILE] [--dataset SET ...] [--k K,...] [--against OTHER] ...",
            description="Sample completions of a data set from a model, and score them: mean reward, pass@k, majority "
            "votes, 95 % intervals over prompts. The data, rewards and sampling of a run are those that it was given; "
            "flags and --config replace them. Completions of the same prompts come from the same random streams for "
            "every model, so that two can be compared prompt by prompt.",
            epilog=epilog("eval", _EXAMPLES),
        )
        self.add_argument("model", metavar="MODEL", help="model to evaluate: a hub id, a folder, a checkpoint or a run")
        group = self.add_argument_group("Evaluation")
        group.add_argument(
            "--dataset",
            dest="dataset_test_name",
            nargs="+",
            default=argparse.SUPPRESS,
            metavar="SET",
            help="data to evaluate on: a hub id, a folder or a file, or several as NAME=SET; unset: those of "
            "--config, or of the run that made MODEL",
        )
        group.add_argument(
            "--k",
            type=lambda text: [positive_count(part) for part in text.split(",")],
            metavar="K,...",
            help="the k of pass@k, best@k and maj@k; unset: eval_k, or 1",
        )
        group.add_argument(
            "--threshold", type=float, default=1.0, help="a completion with this reward or more is right"
        )
        group.add_argument("--limit", type=positive_count, metavar="N", help="evaluate on the first N rows")
        group.add_argument(
            "--by", metavar="COLUMN", help="also print the means of each value of this column; unset: eval_by"
        )
        group.add_argument(
            "--answer",
            metavar="COLUMN",
            help="column logged by a reward function whose values vote in maj@k; unset: answer_parsed, if there is one",
        )
        group.add_argument(
            "--against", metavar="OTHER", help="another model, or a file of --output, to compare with prompt by prompt"
        )
        group.add_argument("--output", metavar="FILE", type=Path, help="write all numbers to this file, as JSON")
        add_flags(self)
        self.fields()["per_device_eval_batch_size"].default = ROWS_AT_ONCE

    def set_field_defaults(self, values: Mapping[str, Any]) -> None:
        """Takes values that a parser has read already as the defaults of fields."""
        fields = self.fields()
        for name, value in values.items():
            fields[name].default = value

    def parse_args_into_dataclasses(self, args: Any = None, **options: Any) -> Any:  # pyright: ignore
        """The records, with `--k` and `--by` as `eval_k` and `eval_by`, the completions of a prompt in
        `num_generations_eval`, nothing to train.

        `--num_generations` on the command line counts completions; without it the configuration does. A flag wins over
        the file's `eval_sampling`, and the flag `--dataset_name` over its `dataset_test_name`.
        """
        known, _ = self.parse_known_args(args)
        words = {str(word).partition("=")[0] for word in args}
        given = {flag.dest for flag in self._actions if not words.isdisjoint(flag.option_strings)}
        values = {**_OF_NO_USE, "gradient_accumulation_steps": [max(1, known.per_device_eval_batch_size // 2)]}
        size = known.num_generations
        sampling = known.eval_sampling
        with suppress(ValueError):  # the rules say what is wrong with a text that is no JSON
            sampling = json.loads(sampling) if isinstance(sampling, str) else sampling
        if isinstance(sampling, dict):
            kept = {name: value for name, value in sampling.items() if name not in given}
            size = kept.pop("num_generations", None) or size
            values["eval_sampling"] = [json.dumps(kept)]
        if "num_generations" not in given:
            size = known.num_generations_eval or size
        if known.k is not None:
            values["eval_k"] = known.k
        if known.by is not None:
            values["eval_by"] = [known.by]
        if "dataset_name" in given and "dataset_test_name" not in given:
            values["dataset_test_name"] = [known.dataset_name]
        values["num_generations_eval"] = [size]
        flags = [str(word) for name, texts in values.items() for word in (f"--{name}", *texts)]
        return super().parse_args_into_dataclasses([*args, *flags], **options)


parser = EvalParser
"""Makes the parser of this command."""


def main(argv: Sequence[str]) -> int:
    """Prints the evaluation, and the comparison with another model. Returns 2 after a sentence if it cannot begin.

    Under a launcher the main process prints.
    """
    parsed = _parsed(argv)
    from groupgrad import dist
    from groupgrad.apps.eval import results
    from groupgrad.evaluation.prompt_numbers import Measure

    flags = parsed.flags
    measure = Measure(tuple(sorted(set(parsed.config.eval_k or [1]))), flags["threshold"])

    def write(differences: Any = None) -> None:
        if flags["output"] is not None and dist.is_main():
            results.write(flags["output"], here, measure, differences)

    with tempfile.TemporaryDirectory() as folder:
        try:
            _check(parsed)
            models, there = [_model(flags["model"])], None
            if flags["against"] is not None and Path(flags["against"]).suffix == ".json":
                there = results.read(Path(flags["against"]))
            elif flags["against"] is not None:
                models.append(_model(flags["against"]))
            evaluated = _prepare(parsed, models[0], folder, there)
        except (ValueError, TypeError, ImportError, OSError) as error:
            return refuse("eval", error)
        try:
            here = evaluated()
            print_on_main("\n".join(results.report(one, measure) for one in here))
            write()
            if len(models) > 1:
                del evaluated
                gc.collect()  # trainers are in cycles, and the next model needs the memory
                there = _prepare(_parsed(argv), models[1], folder, here)()
                print_on_main("\n" + "\n".join(results.report(one, measure) for one in there))
            if there is not None:
                differences = [results.compare(*both, measure) for both in zip(here, there)]
                print_on_main("".join("\n" + results.comparison(*parts) for parts in zip(here, there, differences)))
                write(differences)
        except (ValueError, OSError) as error:
            return refuse("eval", error, 1)
    return 0


def _parsed(argv: Sequence[str]) -> Parsed:
    """The command line, whose `reward_funcs` are what evaluation scores by.

    Without `--config` the model's own run has the place of a file.
    """
    words = {str(word).partition("=")[0].lstrip("-").replace("-", "_") for word in argv}
    of_training = {"reward_funcs", "reward_model_name_or_path"}
    parser = EvalParser()
    known, _ = parser.parse_known_args(argv)
    if known.config is None:
        recorded = recorded_fields(known.model)
        if not words.isdisjoint({*of_training, "eval_reward_funcs"}):  # the run's weights are for its rewards
            recorded.pop("reward_weights", None)
        parser.set_field_defaults(recorded)
    with _without_warnings("these settings have no effect here"):
        parsed = parse(argv, parser)
    script = parsed.script
    # Rewards on the command line are meant for this evaluation, whichever flag names them, and win over the file's.
    if script.eval_reward_funcs is not None and (words.isdisjoint(of_training) or "eval_reward_funcs" in words):
        script.reward_funcs, script.reward_model_name_or_path = script.eval_reward_funcs, None
        if "reward_weights" not in words:  # those of the file belong to its rewards of training
            parsed.config.reward_weights = None
    script.eval_reward_funcs = None
    return parsed


@contextmanager
def _without_warnings(text: str) -> Iterator[None]:
    """Leaves out warnings that begin so: of a file's settings of training, which have no effect on an evaluation."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=text)
        yield


def _check(parsed: Parsed) -> None:
    """ValueError for options that cannot work together."""
    flags = parsed.flags
    against = flags["against"]
    if parsed.config.use_vllm and against is not None and Path(against).suffix != ".json":
        raise ValueError(
            f"--against {against} is a model, and vLLM serves one model in a command; evaluate it by itself with "
            "--output there.json, then compare with --against there.json"
        )
    if flags["output"] is not None and not flags["output"].parent.is_dir():
        raise ValueError(f"--output {flags['output']}: there is no folder {flags['output'].parent}; make it first")


def _model(name: str) -> str:
    """The name of a model, or a folder with one. ValueError for a run that has no model, or only in checkpoints."""
    from groupgrad.checkpoints.saving import checkpoints_in
    from groupgrad.models.model_names import check_model_name

    check_model_name("MODEL", name)
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        checkpoints = checkpoints_in(folder)
        if checkpoints:
            raise ValueError(f"{name} has no model, only checkpoints; give one of them, such as {checkpoints[-1]}")
        raise ValueError(f"{name} has no model: neither config.json nor adapter_config.json is there")
    return name


def _prepare(parsed: Parsed, model: str, folder: str, there: Any) -> Callable[[], list[Evaluation]]:
    """Loads the data and a model, whose trainer writes to `folder`. Returns the function that evaluates it on each set.

    ValueError for data that do not fit, or whose prompts are not those of the evaluations `there`.
    """
    from groupgrad.apps.cli.dataset import load_test_split, test_sets
    from groupgrad.apps.cli.train import build
    from groupgrad.apps.eval import measuring, results
    from groupgrad.run_folder.render import plain_value

    flags, script, config = parsed.flags, parsed.script, parsed.config
    if not (script.dataset_test_name or script.dataset_name):
        reason = "no data set is given"
        if run_file(flags["model"]) is not None:
            reason = f"{flags['model']} is of a run that has not recorded its data, as those of Python scripts"
        raise ValueError(
            f"{reason}; give --dataset (a hub id, a folder, a file, or reasoning_gym:TASK), or --config with the file "
            "of a run"
        )
    names = test_sets(script)
    loaded = load_test_split(script, flags["limit"])
    sets = {name: _rows(loaded[name] if name else loaded, config.eval_by) for name in names}
    if there is not None:
        if len(there) != len(sets):
            raise ValueError(f"the evaluation of {there[0].model} has {len(there)} sets, and this one {len(sets)}")
        for rows, other in zip(sets.values(), there):
            results.check_same_prompts([plain_value(row["prompt"]) for row in rows], other)
    parsed.model.model_name_or_path = model
    quiet_settings(config, folder)
    with _without_warnings("no effect: .* without use_peft|these settings have no effect here"):
        trainer = build(parsed, splits_of=lambda *_: (next(iter(sets.values())), sets.get("", sets)))
    settings = {
        "split": script.dataset_test_split,
        "limit": flags["limit"],
        "by": config.eval_by,
        "num_generations": config.num_generations_eval_resolved,
        **config.sampling_resolved,
        "max_completion_length": config.max_new_tokens_resolved,
        **mapping(config.eval_sampling),
        "generation_kwargs": config.generation_kwargs_resolved,
        "seed": config.seed,
        "rewards": trainer.rewards.names,
        "reward_weights": config.reward_weights,
    }

    def evaluate() -> list[Evaluation]:
        options = {"answers": flags["answer"], "by": config.eval_by}
        return [
            measuring.evaluate(
                trainer, rows, model, {"set": name or None, "dataset": names[name], **settings}, **options
            )
            for name, rows in sets.items()
        ]

    return evaluate


def _rows(rows: Any, by: str | None) -> Any:
    """A data set without a stream. ValueError if it lacks the column by which results are split."""
    from datasets import Dataset, IterableDataset

    if isinstance(rows, IterableDataset):
        rows = Dataset.from_list(list(rows))
    if by is not None and by not in rows.column_names:
        raise ValueError(f"--by {by}: the data set has no such column, only {', '.join(rows.column_names)}")
    return rows


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
