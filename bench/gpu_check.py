"""Says whether groupgrad can run with what is installed; ends with 1 and what to carry if it cannot.

python bench/gpu_check.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from groupgrad.compat import SUPPORTED, installed_version, unsupported_versions

NEEDED = tuple(name for name, supported in SUPPORTED.items() if supported.extra is None and supported.tested is None)
"""What groupgrad cannot do without."""


def problems(names: Sequence[str] = NEEDED) -> list[str]:
    """A line for each distribution that is missing, too old or does not load."""
    found = [f"{name} is not installed" for name in names if installed_version(name) is None]
    found += unsupported_versions(names)
    for module in () if found else (*names, "groupgrad.trainer"):
        try:
            importlib.import_module(module)
        except ImportError as error:  # what it needs is missing or too old
            found.append(f"{module} does not load: {error}")
    return found


def main() -> int:
    """Print the versions, or what is wrong."""
    if found := problems():
        lines = "\n  ".join(found)
        print(f"groupgrad cannot run here:\n  {lines}\nCarry wheels: see the head of bench/gpu.sh.", file=sys.stderr)
        return 1
    import torch

    versions = ", ".join(f"{name} {installed_version(name)}" for name in NEEDED)
    print(f"Python {sys.version.split()[0]}, {versions}, CUDA: {torch.cuda.is_available()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
