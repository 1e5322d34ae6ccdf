"""`groupgrad plan`: predicts the memory of a run from a model's configuration, and says what fits."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil

from groupgrad.apps.cli.command_parser import epilog, positive_count, refuse
from groupgrad.apps.cli.parsing import TrainParser, given_fields, take_run_of
from groupgrad.byte_sizes import parse_bytes
from groupgrad.config.launcher import zero_stage
from groupgrad.config.settings import mapping
from groupgrad.imports import quick_imports

if TYPE_CHECKING:
    from groupgrad.apps.plan.memory import RunSizes

_PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "scratch", "keys_values", "context", "peak")

_ALIASES = {
    "model": "model_name_or_path",
    "completion": "max_completion_length",
    "micro-batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
}
"""Short flags of this command -> the fields that they set."""

_COUNTS = (
    *("max_completion_length", "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("lora_r", "vllm_tensor_parallel_size"),
)
"""Fields that are 1 or more."""

_CONSIDERED = {
    *_COUNTS[:-1],
    *("model_name_or_path", "dtype", "optim", "beta", "gradient_checkpointing", "gradient_dtype", "use_cpu"),
    *("model_init_kwargs", "generation_batch_size", "steps_per_generation", "bf16", "fp16", "load_in_4bit", "use_peft"),
    *("use_vllm", "vllm_mode", "fsdp", "deepspeed", "context_parallel_size"),
}
"""Fields of a run on which a plan depends."""
_OF_COLOCATE = {"vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode"}
"""Those that it considers with a vLLM on the training devices."""

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    **dict.fromkeys(("adamw_torch_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
"""Optimizers of transformers -> those of a plan of the same size."""


class PlanParser(TrainParser):
    """Parser of this command: that of `groupgrad train`, with short flags, the devices and the lengths of prompts."""

    def __init__(self) -> None:
        super().__init__(
            prog="groupgrad plan",
            usage="groupgrad plan --model MODEL --device SIZE [--config FILE] [--FIELD VALUE ...] [--set KEY=VALUE]",
            description="Predict the memory of a run from a model's configuration, offline, and say which ways to run "
            "fit. Each way is shown with the largest micro-batch that fits, a divisor of the step's completions.",
            epilog=epilog(
                "plan",
                "groupgrad plan --config run.yaml --device 24GB\n"
                "groupgrad plan --config run.yaml --device 24GB --use_peft --set model_init_kwargs.dtype=bfloat16\n"
                "groupgrad plan --model Qwen/Qwen2.5-7B-Instruct --device 80GB --devices 8 --completion 8192\n"
                "groupgrad plan --model ./config.json --device 24GB --completion 1024 --dtype bfloat16",
            ),
        )
        fields, plan = self.fields(), self.add_argument_group("Plan")
        fields["optim"].choices = None
        for flag, field in _ALIASES.items():
            names = dict.fromkeys((f"--{flag}", f"--{flag.replace('-', '_')}"))
            known = {"type": fields[field].type, "default": argparse.SUPPRESS, "help": f"{field} of a run"}
            plan.add_argument(*names, dest=field, **known)
        plan.add_argument(
            "--device",
            type=_bytes,
            metavar="SIZE",
            help="memory of a device, such as 80GB (unset with --cpu: this machine's)",
        )
        plan.add_argument("--devices", type=positive_count, default=1, help="number of devices")
        plan.add_argument(
            "--cpu", dest="use_cpu", action="store_true", default=argparse.SUPPRESS, help="plan for training on a CPU"
        )
        plan.add_argument("--prompt", type=positive_count, default=512, help="tokens of the longest prompt")
        plan.add_argument(
            "--gguf-file", "--gguf_file", metavar="NAME", help="GGUF file in the folder that has the weights"
        )


parser = PlanParser
"""Makes the parser of this command."""


def main(argv: Sequence[str]) -> int:
    """Prints the memory of each way to run. Returns 1 if none fits, 2 for a model that cannot be planned for."""
    with quick_imports():
        from groupgrad.apps.plan import shapes
        from groupgrad.apps.plan.fitting import choices, recommended
        from groupgrad.integrations.vllm.colocate_start import check_tensor_parallel

    options = _options(argv)
    try:
        config = shapes.read_config(options.model_name_or_path, options.gguf_file)
        sizes = _run_sizes(options, config)
        shape = shapes.model_shape(options.model_name_or_path, config)
        if sizes.colocate is not None:
            check_tensor_parallel(shape.text, sizes.colocate.tensor_parallel_size, ranks=sizes.devices)
        found = choices(shape, sizes, options.device)
    except (ValueError, ImportError) as error:
        return refuse("plan", error)
    print(_table(shape, sizes, options.device, found))
    if (remark := _context_remark(shape, sizes)) is not None:
        print(remark)
    if shapes.has_tower(config):
        print("The weights outside the text decoder are counted; the activations and tokens of images are not.\n")
    if options.cut is not None:
        print(
            f"num_generations={options.num_generations} does not divide the {options.cut} completions of a generation "
            f"batch, so {sizes.rows * sizes.devices} are planned.\n"
        )
    best = recommended(found)
    print(_advice(shape, sizes, options, best))
    return 0 if best else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    """The fields of the run and the flags of this command, with `given`, the names of fields that were given.

    Exits with status 2 for what cannot be planned for.
    """
    parser = PlanParser()
    before, content = take_run_of(parser, argv)
    if before.config is None and not before.set:
        parser.fields()["gradient_accumulation_steps"].default = 2  # so that gradients are held beside activations
    options, _ = parser.parse_known_args(argv)
    options.given = given_fields(parser, argv, before.set or [], content or {})
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    ignored = options.given - _CONSIDERED - (_OF_COLOCATE if options.sampler == "colocate" else set())
    if names := sorted(name for name in ignored if getattr(options, name) is not None):
        print(f"Not considered of {options.config or 'the command line'}: {', '.join(names)}", file=sys.stderr)
    return options


def _complete(options: argparse.Namespace) -> None:
    """Checks the options, and writes into them what follows: the sampler, the sharding, the optimizer, dtype, device.

    ValueError for options that cannot be planned for.
    """
    from groupgrad.apps.plan.memory import OPTIMIZER_BYTES

    for name in _COUNTS:
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} is no count; give 1 or more")
    options.optim = _OPTIMIZERS.get(options.optim, options.optim)
    if options.optim not in OPTIMIZER_BYTES:
        raise ValueError(f"optim={options.optim!r} cannot be planned for; it is none of {', '.join(OPTIMIZER_BYTES)}")
    loading = options.model_init_kwargs
    loading = json.loads(loading) if isinstance(loading, str) else mapping(loading)
    dtype = options.dtype or loading.get("dtype") or loading.get("torch_dtype") or "float32"
    options.dtype = str(dtype).removeprefix("torch.")
    if options.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={options.dtype!r} cannot be planned for; it is none of float32, bfloat16")
    options.gguf_file = options.gguf_file or loading.get("gguf_file")
    options.sampler = options.vllm_mode if options.use_vllm else "native"
    options.sharding = _sharding(options)
    if options.load_in_4bit and options.sharding in ("zero3", "fsdp2"):
        raise ValueError(
            "load_in_4bit=True with a model in shards cannot be planned for; remove fsdp, deepspeed or load_in_4bit"
        )
    if options.context_parallel_size > 1:
        raise ValueError(
            f"context_parallel_size={options.context_parallel_size} cannot be planned for; plan one device with that "
            "part of a completion, and set it to 1 here"
        )
    if options.model_name_or_path is None:
        raise ValueError("no model is given; give --model, or --config with the file of a run")
    if options.device is None:
        if not options.use_cpu:
            raise ValueError("the memory of a GPU is not known; give --device, such as --device 80GB")
        options.device = psutil.virtual_memory().total


def _sharding(options: argparse.Namespace) -> str | None:
    """The way to shard that the settings of a run ask for; None if they ask for none. ValueError if it is not known."""
    if options.fsdp:
        return "fsdp2"
    if options.deepspeed in (None, ""):
        return None
    run: Any = SimpleNamespace(deepspeed=options.deepspeed)
    ways: dict[int | None, str] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
    if (stage := zero_stage(run)) not in ways:
        raise ValueError(
            f"deepspeed={options.deepspeed!r} has no ZeRO stage from 0 to 3 that can be read; give a file or a mapping"
        )
    return ways[stage]


def _run_sizes(options: argparse.Namespace, config: Any) -> RunSizes:
    """The sizes and choices of a run that the options stand for, with a model of this configuration."""
    from groupgrad.apps.plan.memory import Colocate, RunSizes

    on_gpu = not options.use_cpu
    by_autocast = bool(options.fp16 or (on_gpu if options.bf16 is None else options.bf16))
    is_half = options.dtype == "bfloat16" and (on_gpu or not _has_kernels(config))
    step_rows, generation_rows = _batches(options)
    colocate = None
    if options.sampler == "colocate":
        colocate = Colocate(
            max_model_length=options.vllm_max_model_length,
            tensor_parallel_size=options.vllm_tensor_parallel_size,
            sleeps=bool(options.vllm_enable_sleep_mode),
        )
    return RunSizes(
        prompt=options.prompt,
        completion=options.max_completion_length,
        group=options.num_generations,
        rows=generation_rows,
        micro_batch=options.per_device_train_batch_size,
        most_rows=0 if "per_device_train_batch_size" in options.given else step_rows,
        step_rows=step_rows,
        lora_rank=options.lora_r,
        optimizer=options.optim,
        weight_bytes=2 if options.dtype == "bfloat16" else 4,
        half=is_half or by_autocast,
        checkpointing=bool(options.gradient_checkpointing),
        reference=options.beta > 0,
        accumulates=options.gradient_accumulation_steps > 1,
        float32_gradients=options.gradient_dtype != "weights",
        samples=options.sampler == "native",
        colocate=colocate,
        devices=options.devices,
        on_gpu=on_gpu,
        way="4-bit" if options.load_in_4bit else "LoRA" if options.use_peft else "",
        only_sharding=options.sharding,
    )


def _batches(options: argparse.Namespace) -> tuple[int, int]:
    """Completions of a step and of a generation batch on a device; sets `cut` to those that groups do not divide.

    A generation batch over all devices holds whole groups, so one that would cut a group is made longer, together with
    the step if both are the same.
    """
    micro_batch = options.per_device_train_batch_size
    step = generation = micro_batch * options.gradient_accumulation_steps
    if options.generation_batch_size:
        generation = -(-options.generation_batch_size // options.devices)
    elif options.steps_per_generation:
        generation = micro_batch * options.steps_per_generation
    is_step, options.cut = generation == step, None
    part = options.num_generations // math.gcd(options.num_generations, options.devices)
    if generation % part:
        options.cut, unit = generation * options.devices, math.lcm(part, micro_batch)
        generation = -(-generation // unit) * unit
    return generation if is_step else step, generation


def _has_kernels(config: Any) -> bool:
    """True for the families whose kernels for CPUs widen weights in bfloat16."""
    from groupgrad.models.families import CAUSAL_LMS

    return not CAUSAL_LMS.isdisjoint(getattr(config, "architectures", None) or ())


def _table(shape: Any, sizes: Any, device: int, found: Sequence[Any]) -> str:
    head = f"{shape.name}: {shape.parameters:,} parameters in {shape.layers} layers; {sizes.devices} x {_gib(device)}"
    names = [{"keys_values": "keys/values", "context": "libraries"}.get(part, part) for part in _PARTS]
    if sizes.colocate:
        names.append("vLLM")
    lines = [head, "", f"{'GiB on a device':<16}" + "".join(f"{name:>12}" for name in names) + "  micro-batch"]
    for choice in found:
        numbers = "".join(f"{getattr(choice.memory, part) / 2**30:>12.2f}" for part in _PARTS)
        if choice.vllm is not None:
            numbers += f"{choice.vllm / 2**30:>12.2f}"
        is_asked = sizes.most_rows == 0 and choice.sizes.micro_batch == sizes.micro_batch
        how = (
            f"  {choice.sizes.micro_batch:>3}"
            + (" (asked for)" if is_asked else "")
            + (" with checkpointing" if choice.sizes.checkpointing else "")
        )
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


def _advice(shape: Any, sizes: Any, options: argparse.Namespace, best: Any) -> str:
    """Says what to set, or that nothing fits and which device would do."""
    from groupgrad.apps.plan.fitting import smallest_device

    if best is None:
        return (
            f"Nothing fits. With micro-batches of one row and checkpointing the least demanding way needs devices of "
            f"{_gib(smallest_device(shape, sizes))}; otherwise lower --completion ({sizes.completion}) or the "
            f"completions of a generation batch ({sizes.rows} on a device), or raise --devices ({sizes.devices})."
        )
    rows = best.sizes.micro_batch
    settings = {"lora": ["use_peft=True"], "4bit": ["use_peft=True", "load_in_4bit=True"]}.get(best.sizes.adapter, [])
    settings += [f"per_device_train_batch_size={rows}", f"gradient_accumulation_steps={sizes.step_rows // rows}"]
    if sizes.rows != sizes.step_rows:
        settings.append(f"generation_batch_size={sizes.rows * sizes.devices}")
    settings.append(f"gradient_checkpointing={best.sizes.checkpointing}")
    given = {"fsdp": options.fsdp, "deepspeed": options.deepspeed}
    settings += [f"{name}={value!r}" for name, value in given.items() if value and isinstance(value, (bool, str))]
    texts = [f"Recommended: {best.name}, {', '.join(settings)}."]
    if sizes.on_gpu and (sizes.samples or sizes.colocate):
        texts.append(_vllm_beside(shape, best.sizes, options.device))
    if sizes.devices > 1:
        texts.append(_start(best.sizes))
    return " ".join(texts)


def _start(sizes: Any) -> str:
    """The flags that start the processes of a way to run; the settings of a run may say themselves how to shard."""
    is_set = sizes.sharding == "ddp" or sizes.only_sharding is not None
    profile = "" if is_set else f" --accelerate-config {sizes.sharding}"
    nodes = "" if sizes.devices <= 8 else " on one machine, or accelerate launch --num_machines on each of several"
    return f"Start it with groupgrad train --num-processes {sizes.devices}{profile}{nodes}."


def _vllm_beside(shape: Any, sizes: Any, device: int) -> str:
    """The settings of a vLLM on the training devices, or why there is none."""
    from groupgrad.apps.plan.fitting import vllm_length, vllm_share

    is_refused = sizes.sharding == "fsdp2"
    share = None if is_refused else vllm_share(shape, sizes, device)
    if share is not None:
        settings = f"vllm_gpu_memory_utilization={share:g} with vllm_max_model_length={vllm_length(sizes)}"
        return f"{settings} leaves room for vLLM on the same device."
    problem = f"go with {sizes.sharding}" if is_refused else "fit beside these settings"
    return f"vLLM does not {problem} on the same device; use the native engine, or vllm_mode='server' on another one."


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _bytes(text: str) -> int:
    size = parse_bytes(text)
    if size is None or text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no size; write it as 80GB or 24GiB")
    return size
