"""`groupgrad plan`: predicts the memory of a run from a model's configuration, and says what fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import yaml

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
    **{f"adamw_torch{kind}": "adamw" for kind in ("", "_fused")},
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Optimizers of transformers -> those of this command of the same size."""

_PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "scratch", "keys_values", "peak")


def main(argv: Sequence[str]) -> int:
    """Prints the memory of each way to run. Returns 1 if none fits, 2 for a model that cannot be planned for."""
    options = _parsed(argv)
    from groupgrad.planning.fitting import choices, recommended
    from groupgrad.planning.memory import RunSizes
    from groupgrad.planning.shapes import model_shape, read_config

    on_gpu = not options.cpu
    half = on_gpu or options.dtype == "bfloat16"
    sizes = RunSizes(
        prompt=options.prompt,
        completion=options.completion,
        group=options.num_generations,
        rows=options.rows or options.micro_batch,
        micro_batch=options.micro_batch,
        lora_rank=options.lora_r,
        optimizer=options.optim,
        weight_bytes=2 if options.dtype == "bfloat16" else 4,
        half=half,
        checkpointing=options.gradient_checkpointing,
        reference=options.beta > 0,
        accumulates=options.accumulation > 1,
        float32_gradients=options.gradient_dtype == "float32",
        samples=not options.vllm_server,
        devices=options.devices,
        context_parallel_size=options.context_parallel_size,
        on_gpu=on_gpu,
    )
    try:
        if options.devices % options.context_parallel_size:
            raise ValueError(
                f"--context-parallel-size {options.context_parallel_size} devices train each row together, and "
                f"--devices {options.devices} is no multiple of it; give a multiple"
            )
        shape = model_shape(options.model, read_config(options.model), half=half)
        if shape.state_bytes and options.context_parallel_size > 1:
            raise ValueError(
                f"{options.model} has recurrent layers, whose states pass from token to token, so devices cannot train "
                f"a row together; leave --context-parallel-size {options.context_parallel_size} out"
            )
    except ValueError as error:
        return refuse("plan", error)
    found = choices(shape, sizes, options.device)
    print(_table(shape, sizes, options.device, found))
    if (remark := _context_remark(shape, sizes)) is not None:
        print(remark)
    best = recommended(found)
    print(_advice(shape, sizes, options.device, best))
    return 0 if best else 1


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "plan",
        description="Predict the memory of a run from a model's configuration, offline, and say which ways to run fit. "
        "Each way is shown with the largest micro-batch that fits, halved from --micro-batch on.",
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
        "--rows", type=_count, help="completions that a device samples at a time (default: micro-batch)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the weights")
    parser.add_argument("--optim", choices=["adamw", "adamw_8bit", "adafactor", "sgd"], default="adamw")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term; above 0 keeps a reference")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="use it even where it is not needed")
    parser.add_argument(
        "--gradient-dtype",
        choices=["float32", "weights"],
        default="float32",
        help="type in which gradients of bfloat16 weights are summed (default float32)",
    )
    parser.add_argument("--vllm-server", action="store_true", help="a vLLM server on other devices samples")
    parser.add_argument("--cpu", action="store_true", help="plan for training on a CPU")
    return parser


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, with a YAML file's values as defaults. Exits with status 2 for a bad file."""
    flags = parser()
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    path = before.parse_known_args(argv)[0].config
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                content = yaml.safe_load(file) or {}
            if not isinstance(content, dict):
                raise ValueError("it is not a mapping of settings to values")
            given = {word.partition("=")[0].replace("_", "-") for word in argv}
            _take(flags, content, given)
        except (OSError, ValueError, yaml.YAMLError) as error:
            flags.error(f"--config {path}: {' '.join(str(error).split())}")
    return flags.parse_args(argv)


def _take(flags: argparse.ArgumentParser, content: dict[str, Any], given: set[str]) -> None:
    """Makes a file's settings the defaults of the options that they mean, but for those that are `given` as flags.

    ValueError for a value that the option cannot have.
    """
    actions = {action.dest: action for action in flags._actions}
    for key, value in content.items():
        option = _FIELDS.get(str(key).replace("-", "_"))
        if option is None or value is None:
            continue
        action = actions[option]
        if not given.isdisjoint(action.option_strings):
            continue
        if isinstance(action.const, bool):  # a switch
            if not isinstance(value, bool):
                raise ValueError(f"{key}={value!r} is neither true nor false")
            action.default = value
            continue
        text = _OPTIMIZERS.get(str(value), str(value)) if option == "optim" else str(value).removeprefix("torch.")
        if action.choices is not None and text not in action.choices:
            known = ", ".join(str(choice) for choice in action.choices)
            raise ValueError(f"{key}={value!r} cannot be planned for; give --{option.replace('_', '-')} {known}")
        action.default, action.required = text, False  # text is converted as on the command line
    samples = content.get("steps_per_generation") or content.get("gradient_accumulation_steps")
    if samples is not None:
        actions["rows"].default = str(int(samples) * int(actions["micro_batch"].default))
    if content.get("use_vllm") and content.get("vllm_mode") == "server":
        actions["vllm_server"].default = True


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
    from groupgrad.planning.fitting import smallest_device, vllm_utilization

    remedies = _remedies(shape, sizes, device, is_needed=best is None)
    if best is None:
        least = smallest_device(shape, sizes)
        return (
            f"Nothing fits. With micro-batches of one row and checkpointing the least demanding way needs devices of "
            f"{_gib(least)}; otherwise lower --completion ({sizes.completion}) or --rows ({sizes.rows}).{remedies}"
        )
    share = vllm_utilization(shape, best.sizes, device)
    vllm = (
        f"vllm_gpu_memory_utilization={share} leaves room for vLLM on the same device."
        if share is not None
        else "vLLM does not fit on the same device; use the native engine, or vllm_mode='server' on another one."
    )
    settings = [
        f"per_device_train_batch_size={best.sizes.micro_batch}",
        f"gradient_checkpointing={best.sizes.checkpointing}",
    ]
    if sizes.context_parallel_size > 1:
        settings.append(f"context_parallel_size={sizes.context_parallel_size}")
    beside = f" {vllm}" if sizes.on_gpu and sizes.samples else ""
    return f"Recommended: {best.name}, {', '.join(settings)}.{beside}{remedies}"


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
