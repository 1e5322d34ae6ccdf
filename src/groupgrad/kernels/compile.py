"""Loads the kernels: the library that came with the wheel, or one that the user's C++ compiler makes and a cache keeps.

Either uses the OpenMP runtime that torch has loaded, so that both share one pool of threads. With two pools on few
cores, the threads of one would spin while the other works.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from groupgrad.kernels import build

logger = logging.getLogger(__name__)

SWITCH = "GROUPGRAD_NATIVE_KERNELS"
"""Environment variable; 0 turns compiled kernels off."""

LOCK = "kernels.lock"
"""File beside the cache folder that a process locks while it compiles, so that others wait for its library."""

LOCK_S = 2 * build.TIMEOUT_S
"""Time limit of the wait for another process that compiles."""

_TARGET = "native"

_status = "not loaded"


class _CannotBuildError(Exception):
    """No compiler or no OpenMP runtime."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none and they cannot be built. Loaded once per process."""
    return None if os.environ.get(SWITCH) == "0" else _library()


def status() -> str:
    """One line for reports: which library is in use, or the reason why there is none."""
    library()
    return status_so_far()


def status_so_far() -> str:
    """The same, without loading a library for it: where no model has needed one, `not loaded`."""
    return f"off: {SWITCH}=0" if os.environ.get(SWITCH) == "0" else _status


@functools.cache
def _library() -> ctypes.CDLL | None:
    global _status  # noqa: PLW0603
    try:
        kernels, _status = load()
        return kernels
    except _CannotBuildError as error:
        _status = f"not in use: {error}"
        logger.info("models on the CPU run without compiled kernels: %s", error)
    except Exception as error:
        _status = f"not in use: {type(error).__name__}: {error}"
        logger.warning(
            "the kernels cannot be compiled: sampling is slower and rounds otherwise than training (%s)",
            f"{type(error).__name__}: {error}",
        )
    return None


def load() -> tuple[ctypes.CDLL, str]:
    """Returns the library and where it is from: the wheel, for the best level of x86-64 that this processor has, else
    the cache, else the compiler.

    _CannotBuildError without a compiler or OpenMP, OSError or RuntimeError if compiling or loading fails.
    """
    if sys.platform != "linux":
        raise _CannotBuildError(f"they are built on Linux only, this is {sys.platform}")
    runtime = openmp_runtime()
    if runtime is None:
        raise _CannotBuildError("torch has loaded no OpenMP runtime")
    # Libraries name no OpenMP runtime, since its file has another name in each build of torch. Their calls find the one
    # that this makes visible to all.
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    for level, flags in reversed(build.LEVELS.items()):
        path = build.packaged(level)
        if path.exists() and set(flags.split()) <= processor_flags():
            try:
                return _declare(ctypes.CDLL(str(path))), f"packaged for {level}"
            except (OSError, AttributeError) as error:
                logger.warning("the kernels of the wheel cannot be used on this machine: %s", error)
    return _declare(_compiled()), "compiled here"


def _compiled() -> ctypes.CDLL:
    """Loads the kernels from the cache, or compiles them into it. Errors are those of `load`."""
    failures = []
    for compiler in build.compilers():
        name = f"{_key(compiler)}.so"
        cached = _read(cache_folder() / name)
        if cached is not None:
            return cached
        try:
            with _alone():
                cached = _read(cache_folder() / name)  # another process may have compiled it meanwhile
                if cached is not None:
                    return cached
                _tell(f"compiling its kernels for this CPU, about ten seconds, once; kept in {cache_folder()}")
                return _build(compiler, name)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            failures.append(f"{compiler}: {error}")
    if not failures:
        raise _CannotBuildError("there is no C++ compiler (c++, g++ or clang++ on the PATH, or CXX)")
    raise RuntimeError("; ".join(failures))


@contextmanager
def _alone() -> Iterator[None]:
    """Lets one process at a time compile into the cache folder.

    A process that has waited for `LOCK_S`, or that cannot lock the cache, compiles without the lock. That is safe,
    since each file is written atomically.
    """
    lock = FileLock(cache_folder().parent / LOCK)
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _tell(f"waiting for another process that compiles the kernels (it has locked {lock.lock_file})")
            lock.acquire(timeout=LOCK_S)
    except (OSError, NotImplementedError) as error:  # a Timeout is an OSError
        logger.info("the kernels are compiled without a lock (%s)", error)
    try:
        yield
    finally:
        lock.release()


def _tell(text: str) -> None:
    print(f"groupgrad: {text}", file=sys.stderr, flush=True)


def openmp_runtime() -> str | None:
    """Path of the OpenMP runtime that torch has loaded; None if there is none, and on other systems than Linux."""
    if sys.platform != "linux":
        return None
    torch.get_num_threads()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path
    return None


def _key(compiler: str) -> str:
    """Digest of everything that the library depends on."""
    version = build.run([compiler, "--version"]) if os.access(compiler, os.X_OK) else ""
    parts = [
        *(file.read_text() for file in build.SOURCES + build.HEADERS),
        *build.FLAGS,
        _TARGET,
        compiler,
        version,
        platform.machine(),
        *_processor(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> list[str]:
    """The lines of Linux on the processor's model and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})


def processor_flags() -> set[str]:
    """Linux's names of what the processor supports; empty on other systems."""
    return {flag for line in _processor() if line.startswith("flags") for flag in line.split()[2:]}


def cache_folder() -> Path:
    """Folder in which compiled kernels are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "groupgrad" / "kernels"
    except RuntimeError:  # the user has no home
        return Path(os.devnull) / "kernels"


def _read(path: Path) -> ctypes.CDLL | None:
    """The library in a file of the cache; None if the file is missing or cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def _build(compiler: str, name: str) -> ctypes.CDLL:
    # Linux keeps a loaded file open for the process, so the folder can be deleted.
    with tempfile.TemporaryDirectory(prefix="groupgrad-") as folder:
        built = build.build(compiler, _TARGET, Path(folder))
        return _keep(built, name) or ctypes.CDLL(str(built))


def _keep(built: Path, name: str) -> ctypes.CDLL | None:
    """Moves the library into the cache atomically, because other processes may read or write it, and loads it."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_folder(), prefix=name, delete=False) as file:
            file.write(built.read_bytes())
        os.replace(file.name, cache_folder() / name)
    except OSError as error:
        logger.info("the compiled kernels cannot be kept for the next run (%s)", error)
        return None
    return _read(cache_folder() / name)


def _declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the argument types of the functions."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernels.groupgrad_chunk_rows.argtypes, kernels.groupgrad_chunk_rows.restype = [number], number
    kernels.groupgrad_decode.argtypes = [pointer] * 5 + [ctypes.c_int]
    kernels.groupgrad_choose.argtypes = [pointer, number, number, ctypes.c_float] + [pointer] * 4 + [ctypes.c_int]
    kernels.groupgrad_sample.argtypes = [pointer] * 3 + [number] * 2 + [pointer] * 3 + [number, pointer, ctypes.c_int]
    kernels.groupgrad_sample.restype = number
    kernels.groupgrad_linear.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int] * 2
    kernels.groupgrad_norm.argtypes = [pointer] * 2 + [ctypes.c_float] + [pointer] * 2 + [number] * 2 + [ctypes.c_int]
    kernels.groupgrad_norm_gradient.argtypes = [pointer] * 6 + [number] * 2 + [ctypes.c_int]
    kernels.groupgrad_gate.argtypes = [pointer] * 3 + [number, ctypes.c_int, ctypes.c_int]
    kernels.groupgrad_gate_gradient.argtypes = [pointer] * 6 + [number, ctypes.c_int, ctypes.c_int]
    kernels.groupgrad_rotate.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
    kernels.groupgrad_state_step.argtypes = [pointer, ctypes.c_int]
    kernels.groupgrad_convolution_step.argtypes = [pointer] * 5 + [number] * 5 + [ctypes.c_int] * 2
    kernels.groupgrad_convolution.argtypes = [pointer, ctypes.c_int]
    kernels.groupgrad_delta_rule.argtypes = [pointer] * 3 + [number, ctypes.c_int]
    quiet = ("norm", "norm_gradient", "gate", "gate_gradient", "rotate", "score", "tile", "finish", "state_step")
    for name in (*quiet, "convolution", "convolution_step"):
        getattr(kernels, f"groupgrad_{name}").restype = None
    kernels.groupgrad_score.argtypes = [pointer, number, number, ctypes.c_float] + [pointer] * 3 + [ctypes.c_int]
    kernels.groupgrad_tile.argtypes = [pointer, ctypes.c_int]
    kernels.groupgrad_finish.argtypes = [pointer] * 2 + [number] + [pointer] * 3
    kernels.groupgrad_attend.argtypes = [pointer, pointer, number, ctypes.c_int]
    kernels.groupgrad_attend_gradient.argtypes = [pointer] * 3 + [number, ctypes.c_int]
    return kernels
