"""The options of `groupgrad plan`, from its flags and from the YAML file of a run."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from groupgrad.apps.cli.command_parser import CommandParser, positive_count
from groupgrad.byte_sizes import parse_bytes
from groupgrad.imports import quick_imports

if TYPE_CHECKING:
    from groupgrad.apps.plan.memory import RunSizes

_FIELDS = {
    "model_name_or_path": "model",
    "max_completion_length": "completion",
    "num_generations": "num-generations",
    "per_device_train_batch_size": "micro-batch",
    "gradient_accumulation_steps": "accumulation",
    "context_parallel_size": "context-parallel-size",
    "lora_r": "lora-r",
    "dtype": "dtype",
    "optim": "optim",
    "beta": "beta",
    "gradient_checkpointing": "gradient-checkpointing",
    "gradient_dtype": "gradient-dtype",
    "use_cpu": "cpu",
}
"""Keys of the YAML file of `groupgrad train` -> the flags of this command that they set."""

_COLOCATE = {
    "gpu_memory_utilization": None,
    "max_model_length": None,
    "tensor_parallel_size": None,
    "enable_sleep_mode": False,
}
"""Keys of the YAML file, after `vllm_` -> their defaults, in the order of the fields of `Colocate`."""

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    **dict.fromkeys(("adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Optimizers of transformers -> those of this command of the same size."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    switch = argparse.BooleanOptionalAction
    parser = CommandParser(
        "plan",
        description="Predict the memory of a run from a model's configuration, offline, and say which ways to run fit. "
        "Each way is shown with the largest micro-batch that fits, a divisor of the step's completions.",
        examples="groupgrad plan --config run.yaml --device 24GB\n"
        "groupgrad plan --config run.yaml --device 24GB --set use_peft=true --set model_init_kwargs.dtype=bfloat16\n"
        "groupgrad plan --model Qwen/Qwen2.5-7B-Instruct --device 80GB --devices 8 --completion 8192\n"
        "groupgrad plan --model ./config.json --device 24GB --completion 1024 --dtype bfloat16",
    )
    run = parser.add_argument_group("Run")
    run.add_argument(
        "--config", metavar="FILE", help="YAML file of `groupgrad train`, whose model and sizes are taken; flags win"
    )
    run.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        help="a field of `groupgrad train`, or a key of a field that is a mapping (a.b=VALUE), as if the file had it; "
        "VALUE is read as YAML; repeatable",
    )
    model = parser.add_argument_group("Model")
    model.add_argument(
        "--model", required=True, help="folder with a config.json, a config.json, or a name in the cache"
    )
    model.add_argument("--gguf-file", metavar="NAME", help="GGUF file in the folder that has the weights")
    model.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    _add_count(model, "lora-r", 16, "rank of adapters, on all linear layers")
    devices = parser.add_argument_group("Devices")
    devices.add_argument(
        "--device",
        type=_bytes,
        metavar="SIZE",
        help="memory of a device, such as 80GB (default with --cpu: this machine's)",
    )
    _add_count(devices, "devices", 1, "number of devices")
    _add_count(
        devices, "context-parallel-size", 1, "devices that train each row together, with a part of its tokens each"
    )
    devices.add_argument("--cpu", action=switch, default=False, help="plan for training on a CPU")
    batches = parser.add_argument_group("Groups and lengths")
    _add_count(batches, "prompt", 512, "tokens of the longest prompt")
    _add_count(batches, "completion", 256, "max_completion_length")
    _add_count(batches, "num-generations", 8, "completions of a prompt")
    batches.add_argument(
        "--micro-batch",
        type=positive_count,
        help="most per_device_train_batch_size (default: 8, up to the completions of a step where they fit)",
    )
    _add_count(
        batches, "accumulation", 2, "gradient_accumulation_steps; from 2 on gradients are held beside activations"
    )
    batches.add_argument(
        "--rows", type=positive_count, help="completions that a device samples at a time (default: those of a step)"
    )
    _add_training(parser)
    _add_vllm(parser)
    return parser


def _add_training(parser: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    training = parser.add_argument_group("Training")
    optimizers = ["adamw", "adamw_8bit", "adafactor", "sgd"]
    training.add_argument(
        "--optim",
        type=lambda name: _OPTIMIZERS.get(name, name),
        choices=optimizers,
        default="adamw",
        help=f"optimizer: {', '.join(optimizers)}, or a name of transformers for one of them",
    )
    training.add_argument(
        "--beta",
        type=float,
        default=0.0,
        help="weight of the KL term; above 0 keeps a reference",
    )
    training.add_argument(
        "--gradient-checkpointing", action=switch, default=False, help="use it even where it is not needed"
    )
    training.add_argument(
        "--gradient-dtype",
        choices=["float32", "weights"],
        default="float32",
        help="type in which gradients of bfloat16 weights are summed",
    )


def _add_vllm(parser: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    vllm = parser.add_argument_group("vLLM")
    vllm.add_argument("--vllm-colocate", action=switch, default=False, help="vLLM on the training devices samples")
    vllm.add_argument("--vllm-server", action=switch, default=False, help="a vLLM server on other devices samples")
    vllm.add_argument(
        "--vllm-tensor-parallel-size",
        type=positive_count,
        help="training devices that share the weights of a vLLM (default: 1)",
    )


def _add_count(group: Any, name: str, default: int, help: str) -> None:
    group.add_argument(f"--{name}", type=positive_count, default=default, help=help)


def parsed(argv: Sequence[str]) -> tuple[argparse.Namespace, RunSizes]:
    """The options of a command line, before which those stand that a YAML file and `--set` ask for, and the run.

    Exits with status 2 for a file or a setting that cannot be read or planned for.
    """
    flags = parser()
    before = CommandParser("plan", description="", examples="", add_help=False)
    before.add_argument("--config")
    before.add_argument("--set", action="append", default=[])
    asked = before.parse_known_args(argv)[0]
    path = asked.config or "--set"
    is_of_run = bool(asked.config or asked.set)
    settings = _settings_of(asked) if is_of_run else {}
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    try:
        _check_sharding(settings)
        options = flags.parse_args([*(_words(settings, given) if is_of_run else ()), *argv])
        ignored = sorted(name for name, value in settings.items() if name not in _used(settings) and value is not None)
        if ignored:
            print(f"Not considered of {path}: {', '.join(ignored)}", file=sys.stderr)
        _check_together(flags, options, _sharding(settings))
        return options, _run_sizes(options, settings)
    except ValueError as error:
        flags.error(f"{path}: {error}")


def _settings_of(asked: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run in a YAML file, if there is one, and in `--set`, which wins."""
    with quick_imports():
        from groupgrad.apps.cli.parsing import TrainParser

    run = TrainParser(prog="groupgrad plan", usage="", description="", epilog="")
    settings = {} if asked.config is None else run.take_run(run.load_yaml(asked.config), f"{asked.config}: ")
    run.take_settings(asked.set, [])
    return settings | {name: run.fields()[name].default for name in map(_name, asked.set)}


def _name(setting: str) -> str:
    """The field that `KEY=VALUE` or `KEY.INNER=VALUE` sets."""
    return setting.partition("=")[0].partition(".")[0].replace("-", "_")


def _used(settings: dict[str, Any]) -> set[str]:
    """Names of the settings of a run that this command considers."""
    further = {"model_init_kwargs", "generation_batch_size", "steps_per_generation", "bf16", "fp16", "load_in_4bit"}
    further |= {"use_peft", "use_vllm", "vllm_mode", "fsdp", "deepspeed", "disable_dropout", "router_aux_loss_coef"}
    if settings.get("use_vllm") and settings.get("vllm_mode") != "server":
        further |= {f"vllm_{name}" for name in _COLOCATE}
    return {*_FIELDS, *further}


def _check_sharding(settings: dict[str, Any]) -> None:
    """ValueError for settings of a run by which its weights cannot be planned for."""
    deepspeed = settings.get("deepspeed")
    if deepspeed not in (None, "") and _sharding(settings) is None:
        raise ValueError(
            f"deepspeed={deepspeed!r} has no ZeRO stage from 0 to 3 that can be read; give a file or a mapping"
        )
    if settings.get("load_in_4bit") and _sharding(settings) in ("zero3", "fsdp2"):
        raise ValueError(
            "load_in_4bit=True with a model in shards cannot be planned for; remove fsdp, deepspeed or load_in_4bit"
        )


def _sharding(settings: dict[str, Any]) -> str | None:
    """The way to shard that the settings of a run ask for; None if they ask for none, or cannot be read."""
    if settings.get("fsdp"):
        return "fsdp2"
    if settings.get("deepspeed") in (None, ""):
        return None
    from groupgrad.config.launcher import zero_stage

    run: Any = SimpleNamespace(deepspeed=settings["deepspeed"])
    ways: dict[int | None, str] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    return ways.get(zero_stage(run))


def _zero_buffers(settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of `ZeroBuffers` that a DeepSpeed configuration sets. ValueError for a value that is no number."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    config, found = HfDeepSpeedConfig(settings["deepspeed"]), {}
    for name in ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
        value = config.get_value(f"zero_optimization.{name}")
        if value is not None:
            # Only the size of the bucket may follow from the model. JSON may have 5e8, a float.
            found[name] = None if value == "auto" and name == "reduce_bucket_size" else int(float(value))
    limits = [value for name, value in found.items() if name.startswith("stage3_") and value is not None]
    buffers = {"live": min(limits)} if limits else {}
    return {**buffers, "bucket": found["reduce_bucket_size"]} if "reduce_bucket_size" in found else buffers


def _check_together(flags: argparse.ArgumentParser, options: argparse.Namespace, sharding: str | None) -> None:
    """Exits with status 2 for options that exclude each other. Sets the device to this machine with `--cpu`."""
    if options.vllm_server and options.vllm_colocate:
        flags.error("--vllm-server and --vllm-colocate exclude each other; give one of them")
    if options.vllm_tensor_parallel_size is not None and not options.vllm_colocate:
        flags.error(
            f"--vllm-tensor-parallel-size {options.vllm_tensor_parallel_size} is of a vLLM on the training devices, and "
            "none samples there; add --vllm-colocate, or leave it out"
        )
    if sharding is not None and options.context_parallel_size > 1:
        flags.error(
            f"fsdp and deepspeed exclude --context-parallel-size (now {options.context_parallel_size}); set it to 1"
        )
    if options.device is None:
        if not options.cpu:
            flags.error("the memory of a GPU is not known; give --device, such as --device 80GB")
        options.device = psutil.virtual_memory().total


def _words(settings: dict[str, Any], given: set[str]) -> list[str]:
    """The flags that the settings of a run stand for, without those that are `given` on the command line."""
    found: dict[str, Any] = {
        option: settings[name] for name, option in _FIELDS.items() if settings.get(name) is not None
    }
    loading = settings.get("model_init_kwargs") or {}
    dtype = loading.get("dtype") or loading.get("torch_dtype") if isinstance(loading, dict) else None
    if isinstance(loading, dict) and loading.get("gguf_file"):
        found["gguf-file"] = loading["gguf_file"]
    if (dtype := dtype or found.get("dtype")) is not None:
        found["dtype"] = str(dtype).removeprefix("torch.")
    if found.get("gradient-dtype") == "auto":
        del found["gradient-dtype"]
    if settings.get("use_vllm") and given.isdisjoint({"--vllm-server", "--vllm-colocate"}):
        found["vllm-server" if settings.get("vllm_mode") == "server" else "vllm-colocate"] = True
    is_colocated = "--vllm-colocate" in given or found.get("vllm-colocate")
    if is_colocated and (size := settings.get("vllm_tensor_parallel_size")) is not None:
        found["vllm-tensor-parallel-size"] = size
    found.setdefault("accumulation", 1)
    words = {name: f"--{name}={value}" for name, value in found.items()}
    words |= {name: f"--{name}" if on else f"--no-{name}" for name, on in found.items() if isinstance(on, bool)}
    return [word for name, word in words.items() if f"--{name}" not in given]


def _run_sizes(options: argparse.Namespace, settings: dict[str, Any]) -> RunSizes:
    """The sizes and choices of a run that the options, and the settings of a run, stand for."""
    with quick_imports():
        from groupgrad.apps.plan.memory import Colocate, RunSizes, ZeroBuffers

    sharding: Any = _sharding(settings)
    asked, micro_batch = options.micro_batch, options.micro_batch or 8
    step_rows, generation_rows = _batches(options, settings, micro_batch)
    bf16 = settings.get("bf16")
    by_autocast = settings.get("fp16") or (not options.cpu if bf16 is None else bf16)
    colocate = {name: settings.get(f"vllm_{name}") or default for name, default in _COLOCATE.items()}
    colocate["tensor_parallel_size"] = options.vllm_tensor_parallel_size or 1
    is_kept = _OPTIMIZERS.get(str(settings.get("optim")), settings.get("optim")) == options.optim
    further = {name: value for name, value in settings.items() if is_kept or name != "optim"}
    if options.gradient_dtype == "weights":
        further["gradient_dtype"] = "weights"
    return RunSizes(
        prompt=options.prompt,
        completion=options.completion,
        group=options.num_generations,
        rows=options.rows or generation_rows,
        micro_batch=micro_batch,
        most_rows=step_rows if asked is None else 0,
        step_rows=step_rows,
        generation_rows=generation_rows,
        lora_rank=options.lora_r,
        optimizer=options.optim,
        weight_bytes=2 if options.dtype == "bfloat16" else 4,
        half=options.dtype == "bfloat16" or bool(by_autocast),
        checkpointing=options.gradient_checkpointing,
        reference=options.beta > 0,
        accumulates=options.accumulation > 1,
        float32_gradients=options.gradient_dtype == "float32",
        samples=not (options.vllm_server or options.vllm_colocate),
        colocate=Colocate(*colocate.values()) if options.vllm_colocate else None,
        devices=options.devices,
        context_parallel_size=options.context_parallel_size,
        on_gpu=not options.cpu,
        way="4-bit" if settings.get("load_in_4bit") else "LoRA" if settings.get("use_peft") else "",
        only_sharding=sharding,
        zero=ZeroBuffers(**_zero_buffers(settings)) if sharding == "zero3" else ZeroBuffers(),
        settings=further,
    )


def _batches(options: argparse.Namespace, settings: dict[str, Any], micro_batch: int) -> tuple[int, int]:
    """Completions of a step and of a generation batch on a device; sets `cut` to those that groups do not divide.

    A generation batch over all devices holds whole groups, so one that would cut a group is made longer, together with
    the step if both are the same.
    """
    step = generation = micro_batch * options.accumulation
    if settings.get("generation_batch_size"):
        generation = -(-settings["generation_batch_size"] // options.devices)
    elif settings.get("steps_per_generation"):
        generation = micro_batch * settings["steps_per_generation"]
    elif options.rows is not None and options.rows % step == 0:
        generation = options.rows
    is_step, options.cut = generation == step, None
    part = options.num_generations // math.gcd(options.num_generations, options.devices)
    if generation % part:
        options.cut, unit = generation * options.devices, math.lcm(part, micro_batch)
        generation = -(-generation // unit) * unit
    return generation if is_step else step, generation


def _bytes(text: str) -> int:
    size = parse_bytes(text)
    if size is None or text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no size; write it as 80GB or 24GiB")
    return size
