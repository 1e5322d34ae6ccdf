"""`groupgrad plan`: predicts the memory of a run from a model's configuration, and says what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from groupgrad.apps.cli.command_parser import refuse
from groupgrad.apps.cli.plan_options import parsed, parser
from groupgrad.imports import quick_imports

__all__ = ["main", "parser"]

_PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "scratch", "keys_values", "context", "peak")


def main(argv: Sequence[str]) -> int:
    """Prints the memory of each way to run. Returns 1 if none fits, 2 for a model that cannot be planned for."""
    options, sizes = parsed(argv)
    with quick_imports():
        from groupgrad.apps.plan.fitting import choices, recommended
        from groupgrad.apps.plan.shapes import has_tower, model_shape, read_config, whole_rows
        from groupgrad.integrations.vllm.colocate_start import check_tensor_parallel

    try:
        if options.devices % options.context_parallel_size:
            raise ValueError(
                f"--context-parallel-size {options.context_parallel_size} devices train each row together, and "
                f"--devices {options.devices} is no multiple of it; give a multiple"
            )
        config = read_config(options.model, options.gguf_file)
        if _computes_in_float32(config, sizes):
            sizes = replace(sizes, half=False)
        shape = model_shape(options.model, config, half=sizes.half)
        obstacle = whole_rows(config, sizes.settings)
        if options.context_parallel_size > 1 and obstacle is not None:
            raise ValueError(
                f"--context-parallel-size {options.context_parallel_size} cuts the tokens of a row over devices, and "
                f"{obstacle}"
            )
        if sizes.colocate is not None:
            check_tensor_parallel(shape.text, sizes.colocate.tensor_parallel_size, ranks=sizes.devices)
        found = choices(shape, sizes, options.device)
    except (ValueError, ImportError) as error:
        return refuse("plan", error)
    print(_table(shape, sizes, options.device, found))
    if (remark := _context_remark(shape, sizes)) is not None:
        print(remark)
    if has_tower(config):
        print("The weights outside the text decoder are counted; the activations and tokens of images are not.\n")
    if options.cut is not None:
        print(
            f"num_generations={options.num_generations} does not divide the {options.cut} completions of a generation "
            f"batch, so {sizes.generation_rows * sizes.devices} are planned.\n"
        )
    best = recommended(found)
    print(_advice(shape, sizes, options.device, best, obstacle))
    return 0 if best else 1


def _computes_in_float32(config: Any, sizes: Any) -> bool:
    """True on a CPU for weights in bfloat16 of the families whose kernels widen them."""
    from groupgrad.models.families import CAUSAL_LMS

    is_family = not CAUSAL_LMS.isdisjoint(getattr(config, "architectures", None) or ())
    return is_family and not sizes.on_gpu and sizes.weight_bytes == 2 and not sizes.settings.get("bf16")


def _table(shape: Any, sizes: Any, device: int, found: Sequence[Any]) -> str:
    head = f"{shape.name}: {shape.parameters:,} parameters in {shape.layers} layers; {sizes.devices} x {_gib(device)}"
    names = [{"keys_values": "keys/values", "context": "libraries"}.get(part, part) for part in _PARTS]
    if sizes.colocate:
        names.append("vLLM")
    lines = [head, "", f"{'GiB on a device':<16}" + "".join(f"{name:>12}" for name in names) + "  micro-batch"]
    for choice in found:
        numbers = "".join(f"{getattr(choice.memory, part) / 2**30:>12.2f}" for part in _PARTS)
        if sizes.colocate:
            numbers += f"{'-' if choice.vllm is None else f'{choice.vllm / 2**30:.2f}':>12}"
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


def _advice(shape: Any, sizes: Any, device: int, best: Any, obstacle: str | None) -> str:
    """Says what to set, or that nothing fits. `obstacle` is the reason why devices cannot train each row together."""
    from groupgrad.apps.plan.fitting import remedies, smallest_device

    further = remedies(shape, sizes, device, may_cut=obstacle is None and sizes.only_sharding is None)
    if best is None:
        least = smallest_device(shape, sizes)
        texts = [
            f"Nothing fits. With micro-batches of one row and checkpointing the least demanding way needs devices of "
            f"{_gib(least)}; otherwise lower --completion ({sizes.completion}) or --rows ({sizes.rows})."
        ]
        return " ".join([*texts, *further])
    rows = best.sizes.micro_batch
    settings = {"lora": ["use_peft=True"], "4bit": ["use_peft=True", "load_in_4bit=True"]}.get(best.sizes.adapter, [])
    settings += [f"per_device_train_batch_size={rows}", f"gradient_accumulation_steps={sizes.step_rows // rows}"]
    if sizes.generation_rows != sizes.step_rows:
        settings.append(f"generation_batch_size={sizes.generation_rows * sizes.devices}")
    settings.append(f"gradient_checkpointing={best.sizes.checkpointing}")
    if sizes.context_parallel_size > 1:
        settings.append(f"context_parallel_size={sizes.context_parallel_size}")
    given = {name: sizes.settings.get(name) for name in ("fsdp", "deepspeed")}
    settings += [f"{name}={value!r}" for name, value in given.items() if value and isinstance(value, (bool, str))]
    texts = [f"Recommended: {best.name}, {', '.join(settings)}."]
    if sizes.on_gpu and (sizes.samples or sizes.colocate):
        texts.append(_vllm_beside(shape, best, device))
    if sizes.devices > 1:
        texts.append(_start(best.sizes))
    return "\n".join([" ".join(texts), *further])


def _start(sizes: Any) -> str:
    """The flags that start the processes of a way to run; the settings of a run may say themselves how to shard."""
    is_set = sizes.sharding == "ddp" or sizes.only_sharding is not None
    profile = "" if is_set else f" --accelerate-config {sizes.sharding}"
    nodes = "" if sizes.devices <= 8 else " on one machine, or accelerate launch --num_machines on each of several"
    return f"Start it with groupgrad train --num-processes {sizes.devices}{profile}{nodes}."


def _vllm_beside(shape: Any, best: Any, device: int) -> str:
    """The settings of a vLLM on the training devices, or why there is none."""
    from groupgrad.apps.plan.fitting import vllm_share

    is_refused = best.sizes.sharding == "fsdp2"
    share = None if is_refused else vllm_share(shape, best.sizes, device)
    if share is not None:
        return f"{_vllm_settings(best.sizes, share)} leaves room for vLLM on the same device."
    problem = f"go with {best.sizes.sharding}" if is_refused else "fit beside these settings"
    return f"vLLM does not {problem} on the same device; use the native engine, or vllm_mode='server' on another one."


def _vllm_settings(sizes: Any, share: Any) -> str:
    text = f"vllm_gpu_memory_utilization={share.utilization:g}"
    asked = sizes.colocate.utilization if sizes.colocate else None
    if asked not in (None, share.utilization):
        text += f" (not {asked:g})"
    if share.max_model_length is not None:
        text += f" with vllm_max_model_length={share.max_model_length}"
    return text


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
