"""Helpers by the names that scripts for TRL import: arguments, their parser, data mixtures, adapters, quantization.

`groupgrad` exports them: `from groupgrad import ModelConfig, ScriptArguments, TrlParser, get_peft_config`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets, load_dataset

from groupgrad.cli.arguments import ModelArguments
from groupgrad.cli.arguments import ScriptArguments as TrainArguments
from groupgrad.cli.parsing import FieldParser
from groupgrad.cli.train import peft_config as get_peft_config
from groupgrad.cli.train import quantization_config as get_quantization_config

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "ModelConfig",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]


@dataclass
class ScriptArguments(TrainArguments):
    """The data set, how its rows become prompts, and the reward functions, for scripts that add fields."""

    ignore_bias_buffers: bool = field(default=False, metadata={"help": "Without effect: there are no such buffers."})

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            warnings.warn("ignore_bias_buffers has no effect: gradients are averaged, buffers are left alone")


@dataclass
class ModelConfig(ModelArguments):
    """The model to train, its adapter and its quantization, with the defaults that scripts pass on."""

    model_revision: str | None = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    dtype: str | None = field(
        default="float32", metadata={"help": "Dtype of the weights: auto, bfloat16, float16 or float32."}
    )


@dataclass
class DatasetConfig:
    """One data set of a mixture: arguments of `datasets.load_dataset`, its columns and its share."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None
    """Share of the mixture; the shares are normalised. None: all rows, and then None for every data set."""


@dataclass
class DatasetMixtureConfig:
    """Data sets whose rows are joined in order."""

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Data sets of the mixture, in a YAML file."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read rows while training instead of loading them all."})
    test_split_size: float | None = field(
        default=None, metadata={"help": "Share, or number, of rows to set apart as the split `test`."}
    )

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**part) if isinstance(part, dict) else part for part in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict | IterableDatasetDict:
    """The rows of all data sets of a mixture as the split `train`; with `test_split_size` a random share as `test`.

    With fractions each data set gives its first `fraction * N` rows, rounded, for the largest `N` that no data set is
    too small for. ValueError for no data set, for fractions of some data sets only, and for what a stream cannot do.
    """
    parts, streaming = mixture_config.datasets, mixture_config.streaming
    if not parts:
        raise ValueError("datasets is empty; name at least one data set with its path")
    shares = [part.fraction for part in parts]
    if any(share is not None for share in shares):
        if None in shares:
            raise ValueError(f"{shares.count(None)} of {len(parts)} datasets have no fraction; set it for all or none")
        if streaming or min(shares) < 0 or not sum(shares):  # pyright: ignore[reportArgumentType, reportCallIssue]
            raise ValueError(f"fractions are {shares} and streaming={streaming}; set positive ones, without streaming")
    if streaming and mixture_config.test_split_size is not None:
        raise ValueError("test_split_size needs the number of rows, which a stream does not have; set streaming=False")
    loaded: list[Any] = []
    for part in parts:
        dataset: Any = load_dataset(
            part.path,
            name=part.name,
            data_dir=part.data_dir,
            data_files=part.data_files,
            split=part.split,
            streaming=streaming,
        )
        loaded.append(dataset if part.columns is None else dataset.select_columns(part.columns))
    known = [share for share in shares if share is not None]
    if known:
        normalised = [share / sum(known) for share in known]
        size = min(len(dataset) / share for dataset, share in zip(loaded, normalised) if share)
        loaded = [
            dataset.select(range(min(len(dataset), round(size * share)))) for dataset, share in zip(loaded, normalised)
        ]
    joined: Dataset | IterableDataset = concatenate_datasets(loaded)
    if isinstance(joined, IterableDataset):
        return IterableDatasetDict({"train": joined})
    if mixture_config.test_split_size is not None:
        return joined.train_test_split(test_size=mixture_config.test_split_size, seed=0)
    return DatasetDict({"train": joined})


def get_kbit_device_map() -> dict[str, int] | None:
    """The device map that puts a quantized model on this process's accelerator; None without one."""
    if not torch.cuda.is_available():
        return None
    from accelerate import PartialState

    return {"": PartialState().local_process_index}


class TrlParser(FieldParser):
    """Parses flags, and the keys of a YAML file named by `--config`, into instances of dataclasses.

    The command line wins over the file; the file's mapping `env` is exported to the environment.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any):
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        for record in types:
            if is_dataclass(record) and any(item.name == "config" for item in fields(record)):
                raise ValueError(f"{record.__name__} has a field 'config', which names the YAML file; rename the field")
        super().__init__(types, **kwargs)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """One instance of each dataclass.

        With `return_remaining_strings` a list of unknown arguments follows, the file's first; separated into
        two lists with `separate_remaining_strings`. ValueError for unknown keys of the file unless they are returned
        or `fail_with_unknown_args` is False.
        """
        words = list(sys.argv[1:] if args is None else args)
        # `--config=FILE` is `--config FILE`.
        arguments = [
            part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])
        ]
        unknown: dict[str, Any] = {}
        if "--config" in arguments:
            place = arguments.index("--config")
            if place + 1 == len(arguments):
                self.error("--config names no file; give the path of a YAML file after it")
            path = arguments[place + 1]
            del arguments[place : place + 2]
            unknown = self.read_config(path)
        of_file = [text for key, value in unknown.items() for text in (f"--{key}", str(value))]
        if of_file and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(f"the configuration file has unknown keys: {', '.join(unknown)}; remove or rename them")
        parsed = self.parse_args_into_dataclasses(
            arguments, return_remaining_strings=return_remaining_strings, look_for_args_file=False
        )
        if not return_remaining_strings:
            return tuple(parsed)
        *records, of_line = parsed
        return (*records, of_file, of_line) if separate_remaining_strings else (*records, of_file + of_line)

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take values as defaults; the names that are no field, as arguments."""
        unknown = self.take_defaults(values)
        return [text for key, value in unknown.items() for text in (f"--{key}", str(value))]
