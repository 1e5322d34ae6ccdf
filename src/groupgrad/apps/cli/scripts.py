"""Helpers under the names of TRL, for its scripts: arguments, their parser, data mixtures, adapters, quantization.

`groupgrad` exports them: `from groupgrad import ModelConfig, ScriptArguments, TrlParser, get_peft_config`.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, concatenate_datasets, load_dataset

from groupgrad.apps.cli.arguments import ModelArguments
from groupgrad.apps.cli.parsing import FieldParser
from groupgrad.apps.cli.train import peft_config as get_peft_config
from groupgrad.apps.cli.train import quantization_config as get_quantization_config
from groupgrad.config import GRPOConfig, legacy
from groupgrad.integrations import reasoning_gym

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
class ScriptArguments:
    """The data set of a script, which may add fields."""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set: a hub id or a local folder."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration (subset) of the data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    dataset_streaming: bool = field(
        default=False, metadata={"help": "Read rows while training instead of downloading all first."}
    )
    ignore_bias_buffers: bool = field(default=False, metadata={"help": "Without effect: there are no such buffers."})

    def __post_init__(self) -> None:
        if self.ignore_bias_buffers:
            warnings.warn("ignore_bias_buffers has no effect: gradients are averaged, buffers are left alone")


@dataclass
class _ModelFields(ModelArguments):
    """The fields of `ModelConfig`."""

    model_revision: str | None = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    dtype: str | None = field(
        default="float32", metadata={"help": "Dtype of the weights: auto, bfloat16, float16 or float32."}
    )
    torch_dtype: str | None = field(default=None, metadata={"help": "For older scripts. Now: dtype."})

    def __post_init__(self) -> None:
        default = type(self).dtype
        if self.torch_dtype is not None and self.dtype not in (default, self.torch_dtype):
            raise ValueError(
                f"dtype={self.dtype!r} and torch_dtype={self.torch_dtype!r} are one setting with two names; "
                "set dtype alone"
            )
        self.torch_dtype = self.dtype = self.torch_dtype or self.dtype


class ModelConfig(_ModelFields):
    """The model to train, its adapter and its quantization, with the defaults that scripts pass on.

    `trust_remote_code` is for older scripts. It is no field, since `GRPOConfig` has it, whose value `TrlParser` copies.
    """

    trust_remote_code: bool = False

    def __init__(self, *args: Any, trust_remote_code: bool = False, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.trust_remote_code = trust_remote_code


@dataclass
class DatasetConfig:
    """One data set of a mixture: arguments of `datasets.load_dataset`, its columns and its share.

    The path may be `reasoning_gym:TASK`, whose name is a mapping of settings; its reward is `reasoning_gym_reward`.
    """

    path: str
    name: dict | str | None = None
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
        dataset = _load_part(part, streaming)
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


def _load_part(part: DatasetConfig, streaming: bool) -> Any:
    if part.path.startswith(reasoning_gym.PREFIX):
        dataset = reasoning_gym.named_dataset(part.path, part.name, part.split)
        return dataset.to_iterable_dataset() if streaming else dataset
    name: Any = part.name
    return load_dataset(
        part.path,
        name=name,
        data_dir=part.data_dir,
        data_files=part.data_files,
        split=part.split,
        streaming=streaming,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """The device map that puts a quantized model on this process's accelerator; None without one."""
    if not torch.cuda.is_available():
        return None
    from accelerate import PartialState

    return {"": PartialState().local_process_index}


class TrlParser(FieldParser):
    """Parses flags, and the keys of a YAML file named by `--config`, into instances of dataclasses.

    The command line wins over the file; the file's mapping `env` is exported to the environment. A field of an earlier
    release that the script has too is the script's. ValueError for another field of two dataclasses.
    """

    def __init__(self, dataclass_types: Any = None, **kwargs: Any):
        types = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        for record in types:
            if is_dataclass(record) and any(item.name == "config" for item in fields(record)):
                raise ValueError(f"{record.__name__} has a field 'config', which names the YAML file; rename the field")
        self._given_order = types
        self._left_out = _fields_of_scripts(types)
        super().__init__(sorted(types, key=lambda record: bool(self._left_out[record])), **kwargs)

    def _fields_of(self, dtype: Any) -> list[Field[Any]]:
        return [item for item in super()._fields_of(dtype) if item.name not in self._left_out[dtype]]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """`ArgumentParser.parse_known_args`, whose values two dataclasses may take."""
        return super().parse_known_args(args, _Values() if namespace is None else namespace)

    def parse_args_into_dataclasses(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One instance of each dataclass, in the order in which the parser got them, and what else there is."""
        parsed = super().parse_args_into_dataclasses(*args, **kwargs)
        records, rest = parsed[: len(self._given_order)], parsed[len(self._given_order) :]
        for model in (record for record in records if isinstance(record, ModelConfig)):
            model.trust_remote_code |= any(getattr(record, "trust_remote_code", False) for record in records)
        return (*sorted(records, key=lambda record: self._given_order.index(type(record))), *rest)

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
            unknown = self.take_file(self.load_yaml(path), f"{path}: ")
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
        """Takes values as defaults; the names that are no field, as arguments."""
        unknown = self.take_defaults(values)
        return [text for key, value in unknown.items() for text in (f"--{key}", str(value))]


def _fields_of_scripts(records: list[Any]) -> dict[Any, set[str]]:
    """For each dataclass the fields of earlier releases that it leaves to another one. ValueError for other doubles."""
    left_out: dict[Any, set[str]] = {record: set() for record in records}
    owners: dict[str, list[Any]] = {}
    for record in filter(is_dataclass, records):
        for item in fields(record):
            owners.setdefault(item.name, []).append(record)
    for name, found in owners.items():
        old = [record for record in found if name in legacy.LEGACY and _is_inherited(record, name)]
        if len(found) - len(old) > 1:
            raise ValueError(
                f"{found[-1].__name__} and {found[0].__name__} both have a field {name!r}, and a flag sets only "
                "one; rename it"
            )
        for record in old if len(old) < len(found) else old[1:]:
            left_out[record].add(name)
    return left_out


def _is_inherited(record: Any, name: str) -> bool:
    """True if a dataclass has a field of `GRPOConfig` as it is there."""
    return issubclass(record, GRPOConfig) and (
        record.__dataclass_fields__[name] is GRPOConfig.__dataclass_fields__[name]
    )


class _Values(argparse.Namespace):
    """Parsed values; those that a first dataclass has taken may be taken again."""

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
