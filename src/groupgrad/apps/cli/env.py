"""`groupgrad env`: prints versions and devices of this machine, and how a model would run on it."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from groupgrad import compat
from groupgrad.apps.cli.command_parser import CommandParser, in_columns, refuse
from groupgrad.kernels import status
from groupgrad.kernels.compile import cache_folder


def main(argv: Sequence[str]) -> int:
    """Prints one line for each library and device, and warnings about unsupported releases. Returns 0.

    With a model, also prints the engine that samples from it and how it is scored, and why. Returns 1 if the model
    cannot be loaded.
    """
    arguments = parser().parse_args(argv)
    kernels = {"CPU kernels": status(), "kernel cache": str(cache_folder())}
    print(*in_columns(compat.environment() | kernels), sep="\n")
    for text in compat.unsupported_versions():
        print(f"warning: {text}")
    name = arguments.model_name_or_path
    if name is None:
        return 0
    try:
        lines = model_lines(name, arguments.dtype, arguments.trust_remote_code, arguments.gguf_file)
    except (OSError, ValueError, ImportError) as error:
        return refuse("env", ValueError(f"{name!r} cannot be loaded: {error}"), 1)
    print("", *in_columns(lines), sep="\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "env",
        description="Print versions and devices, for a bug report.",
        examples="groupgrad env\ngroupgrad env --model Qwen/Qwen2.5-0.5B-Instruct",
    )
    parser.add_argument("--model_name_or_path", "--model", help="also print how this model would be sampled and scored")
    parser.add_argument("--gguf_file", metavar="NAME", help="GGUF file in the model's folder that has its weights")
    parser.add_argument("--dtype", default="float32", help="precision to load it in")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    return parser


def model_lines(name: str, dtype: str, trust_remote_code: bool, gguf_file: str | None = None) -> dict[str, str]:
    """Describes how the model would be sampled and scored, tried on random tokens and, for a VLM, on an image."""
    import torch

    from groupgrad.engines.base import SamplingOptions
    from groupgrad.engines.selection import EngineOptions, choose_engine
    from groupgrad.models import load
    from groupgrad.models.unwrapping import is_multimodal
    from groupgrad.scoring.forward import ForwardOptions
    from groupgrad.scoring.self_check import check_layout

    file = {"gguf_file": gguf_file} if gguf_file else {}
    model: Any = load.load_policy(
        name, {"dtype": dtype, **file}, trust_remote_code=trust_remote_code, quantization_config=None, on_device=False
    )
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = functools.partial(
        load.load_tokenizer, model, name, revision=None, trust_remote_code=trust_remote_code, **file
    )
    example, images = _example(tokenizer) if is_multimodal(model) else (None, "")
    report = check_layout(model, ForwardOptions(), example=example)
    engine = choose_engine(model, EngineOptions(), SamplingOptions(max_new_tokens=8), example=example)
    head = "in tiles" if report.tiled_head else "by the model's own code"
    agreement = "" if report.difference is None else f" (within {report.difference:.1g} nats of the plain computation)"
    lines = {
        "model": f"{type(model).__name__}, {model.num_parameters():,} parameters",
        "sampled by": f"{engine.name} engine: {engine.reason}",
        "scored in": f"{report.layout} layout, output head {head}{agreement}",
    }
    if engine.engine.path:
        lines["decode steps"] = engine.engine.path
    if report.reason is not None:
        lines["because"] = report.reason
    if images:
        lines["images"] = images
    return {**lines, "tools": _tools_line(tokenizer)}


def _example(load_tokenizer: Callable[[], Any]) -> tuple[Any, str]:
    """Returns a prompt with an image from a VLM's own processor, or None, and a line about images."""
    from groupgrad.multimodal.vlm_prompts import example_prompt

    try:
        example = example_prompt(load_tokenizer())
    except (OSError, ValueError, ImportError) as error:
        return None, f"not tried: {str(error).splitlines()[0]}"
    if example is None:
        return None, "not tried: there is no processor with a chat template"
    return example, f"seen; a small one is part of a prompt of {len(example.ids)} tokens"


def _tools_line(load_tokenizer: Callable[[], Any]) -> str:
    """Describes the tool calls of the model's chat template."""
    from groupgrad.chat import ChatFormat
    from groupgrad.models.load import inner_tokenizer

    try:
        tokenizer = inner_tokenizer(load_tokenizer())
        chat = ChatFormat(tokenizer, schemas=[])
    except (OSError, ValueError, ImportError) as error:
        return f"not available: {str(error).splitlines()[0]}"
    ends = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(list(chat.end_ids))))
    return f"calls as {chat.name}; turns end with {ends}"
