"""Calls the C++ compiler. Imports no torch, since `setup.py` runs this file by its path to build the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES, HEADERS = (sorted(FOLDER.glob(pattern)) for pattern in ("*.cpp", "*.h"))
FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
LEVELS = {"x86-64-v3": _V3, "x86-64-v4": f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"}
"""Level of x86-64 that a wheel has a library for -> the flags of processors that have it, as Linux names them."""

TIMEOUT_S = 1200.0
"""Time limit of one compiler run, which takes about ten seconds, on a busy machine minutes. It ends a hung compiler."""


def compilers() -> Iterator[str]:
    """Paths of the compilers to try, each once."""
    paths = (shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))
    yield from dict.fromkeys(os.path.realpath(path) for path in paths if path)


def packaged(level: str) -> Path:
    """The library of a level, beside this file in a wheel's installation."""
    return FOLDER / f"{level}.so"


def build(compiler: str, target: str, folder: Path) -> Path:
    """Compiles the library into `folder` for a processor, as the compiler's option `-march` names it.

    It is linked without an OpenMP runtime: `compile.py` lets it find torch's when it is loaded.

    RuntimeError with the compiler's error output if it fails.
    """
    modules, built = [folder / f"{source.stem}.o" for source in SOURCES], folder / "kernels.so"
    commands = [
        [compiler, *FLAGS, f"-march={target}", "-c", str(source), "-o", str(module)]
        for source, module in zip(SOURCES, modules)
    ]
    with ThreadPoolExecutor(max_workers=min(len(SOURCES), os.cpu_count() or 1)) as pool:
        list(pool.map(run, commands))
    run([compiler, "-shared", *map(str, modules), "-o", str(built)])
    return built


def run(command: list[str]) -> str:
    """The command's output; RuntimeError with its error output if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if process.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {process.returncode}: {process.stderr.strip()[:500]}")
    return process.stdout
