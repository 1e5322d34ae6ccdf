"""Says whether groupgrad can run with what is installed; ends with 1 and what to carry if it cannot.

python bench/gpu_check.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from groupgrad.compat import SUPPORTED, installed_version, unsupported_versions
from groupgrad.imports import quick_imports

NEEDED = tuple(name for name, supported in SUPPORTED.items() if supported.extra is None and supported.tested is None)
"""Distributions that groupgrad always needs."""
CARRIED = ("transformers", "datasets")
"""Distributions whose wheels may be carried without the packages that they need."""


def problems(names: Sequence[str] = NEEDED) -> list[str]:
    """A line for each distribution that is missing, too old or does not load, or that a carried one needs."""
    found = [f"{name} is not installed" for name in names if installed_version(name) is None]
    found += unsupported_versions(names)
    found = found or [line for name in names if name in CARRIED for line in unmet(name)]
    with quick_imports():  # as a run imports them
        for module in () if found else (*names, "groupgrad.trainer"):
            try:
                importlib.import_module(module)
            except Exception as error:  # whatever a release that does not fit says
                found.append(f"{module} does not load: {type(error).__name__}: {error}")
    return found


def unmet(name: str) -> list[str]:
    """A line for each distribution that this one needs and that is missing or too old; one too new often works."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    found = []
    for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        least = SpecifierSet(
            ",".join(str(part) for part in requirement.specifier if part.operator in (">=", ">", "~="))
        )
        version = installed_version(requirement.name)
        if version is None or not least.contains(version, prereleases=True):
            found.append(f"{name} needs {requirement.name}{least}, which is {version or 'not installed'} here")
    return found


def main() -> int:
    """Print the versions, or what is wrong."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in NEEDED)
    print(f"Python {sys.version.split()[0]}, {versions}", flush=True)  # before what takes long
    if found := problems():
        lines = "\n  ".join(found)
        print(f"groupgrad cannot run here:\n  {lines}\nCarry wheels: see the head of bench/gpu.sh.", file=sys.stderr)
        return 1
    import torch

    print(f"groupgrad loads, CUDA: {torch.cuda.is_available()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
