"""`groupgrad plan`: predicts the memory of a run from a model's configuration, and says what fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupgrad.cli.command_parser import refuse
from groupgrad.cli.plan_options import parsed, parser

__all__ = ["main", "parser"]

_PARTS = ("weights", "reference", "gradients", "optimizer", "activations", "scratch", "keys_values", "peak")


def main(argv: Sequence[str]) -> int:
    """Prints the memory of each way to run. Returns 1 if none fits, 2 for a model that cannot be planned for."""
    options = parsed(argv)
    from groupgrad.planning.fitting import choices, recommended
    from groupgrad.planning.memory import Colocate, RunSizes, ZeroBuffers
    from groupgrad.planning.shapes import has_tower, model_shape, read_config

    sizes = RunSizes(
        prompt=options.prompt,
        completion=options.completion,
        group=options.num_generations,
        rows=options.rows,
        micro_batch=options.micro_batch,
        most_rows=0 if options.is_asked else options.step_rows,
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
        samples=not (options.vllm_server or options.vllm_colocate),
        colocate=Colocate(*options.colocate) if options.vllm_colocate else None,
        devices=options.devices,
        context_parallel_size=options.context_parallel_size,
        on_gpu=not options.cpu,
        way=options.way,
        only_sharding=options.sharding,
        zero=ZeroBuffers(**options.zero),
    )
    try:
        if options.devices % options.context_parallel_size:
            raise ValueError(
                f"--context-parallel-size {options.context_parallel_size} devices train each row together, and "
                f"--devices {options.devices} is no multiple of it; give a multiple"
            )
        config = read_config(options.model)
        shape = model_shape(options.model, config, half=options.half)
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
    if has_tower(config):
        print("The weights outside the text decoder are counted; the activations and tokens of images are not.\n")
    if options.cut is not None:
        print(
            f"num_generations={options.num_generations} does not divide the {options.cut} completions of a generation "
            f"batch, so {sizes.generation_rows * sizes.devices} are planned.\n"
        )
    best = recommended(found)
    print(_advice(shape, sizes, options.device, best))
    return 0 if best else 1


def _table(shape: Any, sizes: Any, device: int, found: Sequence[Any]) -> str:
    head = f"{shape.name}: {shape.parameters:,} parameters in {shape.layers} layers; {sizes.devices} x {_gib(device)}"
    names = [part.replace("keys_values", "keys/values") for part in _PARTS]
    lines = [head, "", f"{'GiB on a device':<16}" + "".join(f"{name:>12}" for name in names) + "  micro-batch"]
    for choice in found:
        numbers = "".join(f"{getattr(choice.memory, part) / 2**30:>12.2f}" for part in _PARTS)
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
        f"{_vllm_settings(best.sizes, share)} leaves room for vLLM on the same device."
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
    beside = f" {vllm}" if sizes.on_gpu and (sizes.samples or sizes.colocate) else ""
    return f"Recommended: {best.name}, {', '.join(settings)}.{beside}{remedies}"


def _vllm_settings(sizes: Any, share: Any) -> str:
    text = f"vllm_gpu_memory_utilization={share.utilization:g}"
    asked = sizes.colocate.utilization if sizes.colocate else None
    if asked not in (None, share.utilization):
        text += f" (not {asked:g})"
    if share.max_model_length is not None:
        text += f" with vllm_max_model_length={share.max_model_length}"
    return text


def _remedies(shape: Any, sizes: Any, device: int, *, is_needed: bool) -> str:
    """Sentences about a vLLM server, and about more devices where they are needed, that make a way fit."""
    from groupgrad.planning.fitting import with_more_devices, with_server

    texts = []
    if (sizes.samples or sizes.colocate) and (served := with_server(shape, sizes, device)) is not None:
        texts.append(f" If a vLLM server on other devices samples (--vllm-server), {served.name} fits.")
    if is_needed and (wider := with_more_devices(shape, sizes, device)) is not None:
        number = wider.sizes.devices
        texts.append(f" On {number} such devices (--devices {number}), {wider.name} fits.")
    return "".join(texts)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
