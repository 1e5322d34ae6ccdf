"""`groupgrad plan`: predicts the memory of a run from a model's configuration, and says what fits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from groupgrad.byte_sizes import parse_bytes
from groupgrad.cli.command_parser import CommandParser, refuse

_FIELDS = {
    "model_name_or_path": "model",
    "max_completion_length": "completion",
    "num_generations": "num_generations",
    "per_device_train_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "context_parallel_size": "context_parallel_size",
    "lora_r": "lora_r",
    "dtype": "dtype",
    "optim": "optim",
    "beta": "beta",
    "gradient_checkpointing": "gradient_checkpointing",
    "gradient_dtype": "gradient_dtype",
    "use_cpu": "cpu",
}
"""Keys of the YAML file of `groupgrad train` -> the options of this command that they set."""

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    **dict.fromkeys(("adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Optimizers of transformers -> those of this command of the same size."""

_PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "scratch", "keys_values", "peak")


def main(argv: Sequence[str]) -> int:
    """Prints the memory of each way to run. Returns 1 if none fits, 2 for a model that cannot be planned for."""
    options = _parsed(argv)
    from groupgrad.planning.fitting import choices, recommended
    from groupgrad.planning.memory import RunSizes
    from groupgrad.planning.shapes import model_shape, read_config

    sizes = RunSizes(
        prompt=options.prompt,
        completion=options.completion,
        group=options.num_generations,
        rows=options.rows,
        micro_batch=options.micro_batch,
        step_rows=options.step_rows,
        generation_rows=options.generation_rows,
        lora_rank=options.lora_r,
        optimizer=options.optim,
        weight_bytes=2 if options.dtype == "bfloat16" else 4,
        half=options.half,
        checkpointing=options.gradient_checkpointing,
        reference=options.beta > 0,
        accumulates=options.accumulation > 1,
        float32_gradients=options.gradient_dtype == "float32",
        samples=not options.vllm_server,
        devices=options.devices,
        context_parallel_size=options.context_parallel_size,
        on_gpu=not options.cpu,
        way=options.way,
    )
    try:
        if options.devices % options.context_parallel_size:
            raise ValueError(
                f"--context-parallel-size {options.context_parallel_size} devices train each row together, and "
                f"--devices {options.devices} is no multiple of it; give a multiple"
            )
        shape = model_shape(options.model, read_config(options.model), half=options.half)
        if shape.state_bytes and options.context_parallel_size > 1:
            raise ValueError(
                f"{options.model} has recurrent layers, whose states pass from token to token, so devices cannot train "
                f"a row together; set --context-parallel-size (now {options.context_parallel_size}) to 1"
            )
    except ValueError as error:
        return refuse("plan", error)
    found = choices(shape, sizes, options.device)
    print(_table(shape, sizes, options.device, found))
    if (remark := _context_remark(shape, sizes)) is not None:
        print(remark)
    if options.cut is not None:
        print(
            f"num_generations={options.num_generations} does not divide the {options.cut} completions of a generation "
            f"batch, so {sizes.generation_rows * sizes.devices} are planned.\n"
        )
    best = recommended(found)
    print(_advice(shape, sizes, options.device, best))
    return 0 if best else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    switch = argparse.BooleanOptionalAction
    parser = CommandParser(
        "plan",
        description="Predict the memory of a run from a model's configuration, offline, and say which ways to run fit. "
        "Each way is shown with the largest micro-batch that fits, a divisor of the step's.",
        examples="groupgrad plan --config run.yaml --device 24GB\n"
        "groupgrad plan --model Qwen/Qwen2.5-7B-Instruct --device 80GB --devices 8 --completion 8192\n"
        "groupgrad plan --model ./config.json --device 24GB --completion 1024 --dtype bfloat16",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of `groupgrad train`, whose model and sizes are taken; flags win"
    )
    parser.add_argument(
        "--model", required=True, help="folder with a config.json, a config.json, or a name in the cache"
    )
    parser.add_argument("--device", type=_bytes, required=True, metavar="SIZE", help="memory of a device, such as 80GB")
    for flag, default, text in (
        ("devices", 1, "devices"),
        ("prompt", 512, "tokens of the longest prompt"),
        ("completion", 256, "max_completion_length"),
        ("num-generations", 8, "completions of a prompt"),
        ("micro-batch", 8, "per_device_train_batch_size to begin with"),
        ("accumulation", 2, "gradient_accumulation_steps; from 2 on gradients are held beside activations"),
        ("context-parallel-size", 1, "devices that train each row together, with a part of its tokens each"),
        ("lora-r", 16, "rank of adapters, on all linear layers"),
    ):
        parser.add_argument(f"--{flag}", type=_count, default=default, help=f"{text} (default {default})")
    parser.add_argument(
        "--rows", type=_count, help="completions that a device samples at a time (default: those of a step)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    parser.add_argument("--optim", choices=["adamw", "adamw_8bit", "adafactor", "sgd"], default="adamw")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; above 0 keeps a reference")
    parser.add_argument(
        "--gradient-checkpointing", action=switch, default=False, help="use it even where it is not needed"
    )
    parser.add_argument(
        "--gradient-dtype",
        choices=["float32", "weights"],
        default="float32",
        help="type in which gradients of bfloat16 weights are summed (default float32)",
    )
    parser.add_argument("--vllm-server", action=switch, default=False, help="a vLLM server on other devices samples")
    parser.add_argument("--cpu", action=switch, default=False, help="plan for training on a CPU")
    return parser


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, with a YAML file's values as defaults. Exits with status 2 for a bad file."""
    flags = parser()
    before = CommandParser("plan", description="", examples="", add_help=False)
    before.add_argument("--config")
    path = before.parse_known_args(argv)[0].config
    if path is None:
        return _completed(flags.parse_args(argv), {})
    from groupgrad.cli.parsing import TrainParser

    run = TrainParser(prog="groupgrad plan", usage="", description="", epilog="")
    settings = run.take_run(run.load_yaml(path), path)
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    actions = {action.dest: action for action in flags._actions}
    try:
        for name, value in _options_of(settings).items():
            action = actions[name]
            if given.isdisjoint(action.option_strings):
                action.default, action.required = _checked(action, name, value), False
    except ValueError as error:
        flags.error(f"{path}: {error}")
    if actions["model"].required and given.isdisjoint(actions["model"].option_strings):
        flags.error(f"{path} has no model_name_or_path; add it, or give --model")
    return _completed(flags.parse_args(argv), settings)


def _options_of(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of this command that the settings of a run stand for."""
    found = {option: settings[name] for name, option in _FIELDS.items() if settings.get(name) is not None}
    loading = settings.get("model_init_kwargs") or {}
    dtype = loading.get("dtype") or loading.get("torch_dtype") if isinstance(loading, dict) else None
    if dtype is not None:
        found["dtype"] = dtype
    if "dtype" in found:
        found["dtype"] = str(found["dtype"]).removeprefix("torch.")
    if "optim" in found:
        found["optim"] = _OPTIMIZERS.get(str(found["optim"]), str(found["optim"]))
    found["vllm_server"] = bool(settings.get("use_vllm")) and settings.get("vllm_mode") == "server"
    return {"accumulation": 1, **found}


def _checked(action: argparse.Action, name: str, value: Any) -> Any:
    """A value for an option. ValueError if the option cannot have it."""
    flag = f"--{name.replace('_', '-')}"
    if action.choices is not None and value not in action.choices:
        known = ", ".join(str(choice) for choice in action.choices)
        raise ValueError(f"{name}={value!r} cannot be planned for; give {flag} with one of {known}")
    if action.type is _count and int(value) < 1:
        raise ValueError(f"{value} is no count; give {flag} with 1 or more")
    return value


def _completed(options: argparse.Namespace, settings: dict[str, Any]) -> argparse.Namespace:
    """The options with those that follow from others and from the settings of a run, such as `rows` and `half`."""
    _complete_batches(options, settings)
    bf16 = settings.get("bf16")
    by_autocast = settings.get("fp16") or (not options.cpu if bf16 is None else bf16)
    options.half = options.dtype == "bfloat16" or bool(by_autocast)
    options.way = "4-bit" if settings.get("load_in_4bit") else "LoRA" if settings.get("use_peft") else ""
    return options


def _complete_batches(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Sets `step_rows`, `generation_rows`, `rows`, and `cut`, the completions of a generation batch that is not planned.

    A generation batch over all devices holds whole groups, so one that would cut a group is made longer, together with
    the step if both are the same.
    """
    step = generation = options.micro_batch * options.accumulation
    if settings.get("generation_batch_size"):
        generation = -(-settings["generation_batch_size"] // options.devices)
    elif settings.get("steps_per_generation"):
        generation = options.micro_batch * settings["steps_per_generation"]
    elif options.rows is not None and options.rows % step == 0:
        generation = options.rows
    is_step, options.cut = generation == step, None
    part = options.num_generations // math.gcd(options.num_generations, options.devices)
    if generation % part:
        options.cut, unit = generation * options.devices, math.lcm(part, options.micro_batch)
        generation = -(-generation // unit) * unit
    options.step_rows, options.generation_rows = generation if is_step else step, generation
    options.rows = options.rows or generation


def _table(shape: Any, sizes: Any, device: int, found: Sequence[Any]) -> str:
    head = f"{shape.name}: {shape.parameters:,} parameters in {shape.layers} layers; {sizes.devices} x {_gib(device)}"
    names = [part.replace("keys_values", "keys/values") for part in _PARTS]
    lines = [head, "", f"{'GiB on a device':<16}" + "".join(f"{name:>12}" for name in names) + "  micro-batch"]
    for choice in found:
        numbers = "".join(f"{getattr(choice.memory, part) / 2**30:>12.2f}" for part in _PARTS)
        how = f"  {choice.sizes.micro_batch:>3}" + (" with checkpointing" if choice.sizes.checkpointing else "")
        lines.append(f"{choice.name:<16}{numbers}{how if choice.fits else '  does not fit'}")
    return "\n".join([*lines, ""])


def _context_remark(shape: Any, sizes: Any) -> str | None:
    """Returns a warning if a prompt and a completion are longer than the model's context; None if they fit."""
    if shape.context is None or sizes.prompt + sizes.completion <= shape.context:
        return None
    room = shape.context - sizes.prompt
    mend = f"lower --completion to {room:,}" if room > 0 else "lower --prompt and --completion"
    return (
        f"Warning: a prompt of {sizes.prompt:,} and a completion of {sizes.completion:,} tokens do not fit into the "
        f"model's context of {shape.context:,} positions, so completions would be truncated there; {mend}, or take a "
        "model with a longer context.\n"
    )


def _advice(shape: Any, sizes: Any, device: int, best: Any) -> str:
    from groupgrad.planning.fitting import smallest_device, vllm_share

    remedies = _remedies(shape, sizes, device, is_needed=best is None)
    if best is None:
        least = smallest_device(shape, sizes)
        return (
            f"Nothing fits. With micro-batches of one row and checkpointing the least demanding way needs devices of "
            f"{_gib(least)}; otherwise lower --completion ({sizes.completion}) or --rows ({sizes.rows}).{remedies}"
        )
    share = vllm_share(shape, best.sizes, device)
    vllm = (
        f"{_vllm_settings(share)} leaves room for vLLM on the same device."
        if share is not None
        else "vLLM does not fit on the same device; use the native engine, or vllm_mode='server' on another one."
    )
    rows = best.sizes.micro_batch
    settings = [f"per_device_train_batch_size={rows}", f"gradient_accumulation_steps={sizes.step_rows // rows}"]
    if sizes.generation_rows != sizes.step_rows:
        settings.append(f"generation_batch_size={sizes.generation_rows * sizes.devices}")
    settings.append(f"gradient_checkpointing={best.sizes.checkpointing}")
    if sizes.context_parallel_size > 1:
        settings.append(f"context_parallel_size={sizes.context_parallel_size}")
    beside = f" {vllm}" if sizes.on_gpu and sizes.samples else ""
    return f"Recommended: {best.name}, {', '.join(settings)}.{beside}{remedies}"


def _vllm_settings(share: Any) -> str:
    text = f"vllm_gpu_memory_utilization={share.utilization:g}"
    if share.max_model_length is not None:
        text += f" with vllm_max_model_length={share.max_model_length}"
    return text


def _remedies(shape: Any, sizes: Any, device: int, *, is_needed: bool) -> str:
    """Sentences about a vLLM server, and about more devices where they are needed, that make a way fit."""
    from groupgrad.planning.fitting import with_more_devices, with_server

    texts = []
    if sizes.samples and (served := with_server(shape, sizes, device)) is not None:
        texts.append(f" If a vLLM server on other devices samples (--vllm-server), {served.name} fits.")
    if is_needed and (wider := with_more_devices(shape, sizes, device)) is not None:
        number = wider.sizes.devices
        texts.append(f" On {number} such devices (--devices {number}), {wider.name} fits.")
    return "".join(texts)


def _bytes(text: str) -> int:
    size = parse_bytes(text)
    if size is None or text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no size; write it as 80GB or 24GiB")
    return size


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no count; give 1 or more")
    return int(text)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
