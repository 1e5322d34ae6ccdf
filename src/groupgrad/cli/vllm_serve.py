"""`groupgrad vllm-serve`: vLLM's server with routes that let a trainer push weights."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence

from groupgrad import compat
from groupgrad.cli.command_parser import COMMAND_CODES, codes_in_words
from groupgrad.engines.vllm.server import server_command
from groupgrad.engines.vllm.vllm_params import LOGPROBS_MODE

USAGE = """usage: groupgrad vllm-serve --model NAME [--tensor-parallel-size N] [options of vLLM's server]

Serve a model with vLLM so that a groupgrad trainer (use_vllm=True, vllm_mode="server") can sample from it and push
weights to it.

  --model NAME    a folder or a name on the Hugging Face hub (required)
  --vllm_model_impl NAME, --log_level NAME
                  other names of vLLM's --model-impl and --uvicorn-log-level
  ...             everything else goes to `vllm serve`, such as --host, --port (8000), --dtype, --max-model-len,
                  --gpu-memory-utilization, --enable-lora --max-lora-rank N; `vllm serve --help=all` lists them

""" + codes_in_words(COMMAND_CODES["vllm-serve"])

# Aliases of vLLM's options that users of other servers know.
_ALIASES = {"--vllm-model-impl": "--model-impl", "--log-level": "--uvicorn-log-level"}
_RESERVED = ("--worker-extension-cls", "--api-server-count")


def main(argv: Sequence[str]) -> int:
    """Becomes the server. Returns 2 for an invalid command line, 0 after `--help`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        arguments = vllm_arguments(argv)
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed; run `pip install vllm`")
        check_port(arguments)
    except ValueError as error:
        print(f"groupgrad vllm-serve: error: {error}", file=sys.stderr)
        return 2
    for problem in compat.unsupported_versions(["vllm"]):
        print(f"groupgrad vllm-serve: warning: {problem}", file=sys.stderr)
    command = [sys.executable, "-m", "groupgrad.engines.vllm.server_launch", *server_command(arguments)]
    sys.stdout.flush()
    # The process becomes the server: signals and the exit status are its own.
    return os.execv(sys.executable, command)


def parser() -> argparse.ArgumentParser:
    """Returns a parser of the options that are named above, for shells that complete them; vLLM parses the rest."""
    parser = argparse.ArgumentParser(prog="groupgrad vllm-serve", add_help=False)
    for flag in ("--model", "--host", "--port", "--dtype", "--max-model-len", "--tensor-parallel-size"):
        parser.add_argument(flag)
    return parser


def check_port(arguments: Sequence[str]) -> None:
    """ValueError if the server cannot listen at its `--host` and `--port`.

    vLLM itself notices only after loading the model, or not at all if another server listens on all addresses.
    """
    options = {"--host": "", "--port": "8000"}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = word.partition("=")
        if name == "--uds":
            return
        if name in options:
            options[name] = value if equals else following
    if not options["--port"].isdigit():
        return  # vLLM reports it
    host, port = options["--host"], int(options["--port"])
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: connections that an ended server has left do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} is in use by another program; end it, or give another with --port") from None
        place = f"{host or 'any address'}, port {port}"
        raise ValueError(f"a server cannot listen at {place}: {error}; see --host and --port") from None


def vllm_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` as arguments of `vllm serve`: the model first, then options.

    ValueError without a model, or for an option that groupgrad sets.
    """
    model: str | None = None
    arguments: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            # After a point comes a key of a JSON value, which keeps its spelling.
            name, point, key = name.partition(".")
            name = name.replace("_", "-") + point + key
            if name in _RESERVED:
                raise ValueError(f"{name} is set by groupgrad and cannot be given")
            name = _ALIASES.get(name, name)
        if name == "--model":
            model = value if equals else next(words, None)
            if model is None:
                raise ValueError("--model has no value")
        elif model is None and not arguments and not word.startswith("-"):
            model = word
        else:
            arguments.append(name + equals + value)
    if model is None:
        raise ValueError("no model is given; add --model NAME")
    # All requests go through one process, which tracks whether weights are complete.
    arguments += ["--api-server-count", "1"]
    if not any(word.partition("=")[0] == "--logprobs-mode" for word in arguments):
        arguments += ["--logprobs-mode", LOGPROBS_MODE]
    return [model, *arguments]
