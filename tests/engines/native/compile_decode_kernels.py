"""Compiles the decode step's Triton kernels for GPUs that are not there, and prints what each takes.

A line for each: architecture, kernel, kind of call, registers, bytes of registers in memory, bytes of shared memory.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from groupgrad.engines.native import triton_attention, triton_layers
from groupgrad.engines.native.decode_kernels import DecodeTables
from groupgrad.scoring.attention_layout import AttentionCall

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
ARCHITECTURES = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KINDS = [
    (torch.bfloat16, 128, 2, False),
    (torch.bfloat16, 64, 7, False),
    (torch.bfloat16, 128, 8, True),
    (torch.float16, 256, 4, True),
    (torch.float32, 128, 2, False),
    (torch.float32, 8, 1, True),
]
"""Type, width of a head, query heads for each key head, and whether there are a soft cap, a window and sinks."""


class Launches:
    """Stands for a kernel: collects the arguments of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arguments = kernel, {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            self.arguments = {**dict(zip(self.kernel.arg_names, given)), **named}

        return launch


def launched(dtype: torch.dtype, width: int, repeat: int, special: bool) -> dict[str, Launches]:
    """The launches of a step of 16 rows of four groups."""
    sinks = torch.zeros(2 * repeat) if special else None
    call = AttentionCall(0, 0.1, softcap=3.0 if special else None, window=512 if special else None, sinks=sinks)
    cached = [tuple(torch.zeros(n, 2, 1024, width, dtype=dtype) for _ in range(2)) for n in (16, 4)]
    tables = DecodeTables(*torch.zeros(2, 16, dtype=torch.int64), torch.zeros(4, 17, dtype=torch.int64), 1024, 1024)
    query, new = torch.zeros(2 * repeat, 16, width, dtype=dtype), torch.zeros(2, 16, width, dtype=dtype)
    with collected(triton_attention, "_attend_suffix", "_attend_prompt", "_merge") as found:
        triton_attention.decode_attention(query, (new, new), *cached, tables, call)  # pyright: ignore[reportArgumentType]
    hidden = torch.zeros(16, 2 * repeat * width, dtype=torch.float32 if special else dtype)
    weight, angles = torch.zeros(hidden.shape[1]), torch.zeros(2, 16, width)
    heads = [torch.zeros(16, count, width, dtype=dtype) for count in (2 * repeat, 2)]
    norms = (angles[0, 0], angles[1, 0], 1e-6) if special else None
    with collected(triton_layers, "_add_and_norm", "_rotate", "_gate") as others:
        triton_layers.add_and_norm(hidden, hidden.to(dtype), weight, 1e-6, dtype)
        triton_layers.rotate(*heads, *angles, norms)
        triton_layers.gate(hidden.to(dtype), hidden.to(dtype))
    return found | others


@contextmanager
def collected(module: Any, *names: str) -> Iterator[dict[str, Launches]]:
    """Inside, launches of these kernels are collected."""
    found = {name: Launches(getattr(module, name)) for name in names}
    with mock.patch.multiple(module, **found):
        yield found


def compiled(launches: Launches, capability: int) -> Any:
    """The kernel as a launch with these arguments would have it compiled."""
    kernel, arguments = launches.kernel, launches.arguments
    options = {name: arguments[name] for name in ("num_stages", "num_warps") if name in arguments}
    signature: dict[str, str] = {}
    constants, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name.isupper() or (isinstance(value, int) and value == 1):
            signature[name], constants[place,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + {**TYPES, torch.int64: "i64"}[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if signature[name] != "constexpr" and (isinstance(value, torch.Tensor) or value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    """Prints the table."""
    for capability, name in ARCHITECTURES.items():
        for kind in KINDS:
            for kernel, launches in launched(*kind).items():
                found = compiled(launches, capability)
                with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
                    file.write(found.asm["ptx"])
                    file.flush()
                    command = [PTXAS, "-v", f"-arch={name}", file.name, "-o", os.devnull]
                    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
                registers, spilled = (re.search(p, said) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
                assert registers is not None and spilled is not None, said
                described = "-".join(map(str, (TYPES[kind[0]], *kind[1:])))
                print(name, kernel, described, registers[1], spilled[1], found.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
