"""`groupgrad vllm-serve`: vLLM's own server, to which a trainer can push weights."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from groupgrad import compat
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
"""

# Names that users of other servers know.
_OTHER_NAMES = {"--vllm-model-impl": "--model-impl", "--log-level": "--uvicorn-log-level"}
_OURS = ("--worker-extension-cls", "--api-server-count")


def main(argv: Sequence[str]) -> int:
    """Run the server until it is stopped; its exit status, 2 for a command line that cannot work."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        arguments = vllm_arguments(argv)
    except ValueError as error:
        print(f"groupgrad vllm-serve: error: {error}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("vllm") is None:
        print(
            "groupgrad vllm-serve: error: vLLM is not installed; run `pip install 'groupgrad[vllm]'`", file=sys.stderr
        )
        return 2
    problem = taken_port(arguments)
    if problem is not None:
        print(f"groupgrad vllm-serve: error: {problem}", file=sys.stderr)
        return 2
    for problem in compat.unsupported_versions(["vllm"]):
        print(f"groupgrad vllm-serve: warning: {problem}", file=sys.stderr)
    command = [sys.executable, "-m", "groupgrad.engines.vllm.server_launch", *server_command(arguments)]
    sys.stdout.flush()
    if os.name == "posix":
        # The process becomes the server: signals and the exit status are its own.
        os.execv(sys.executable, command)
    return subprocess.call(command)


def taken_port(arguments: Sequence[str]) -> str | None:
    """Why a server cannot listen where `vllm serve` is told to; None if it can.

    vLLM itself finds out when the model is loaded, or not at all where another server listens on all addresses.
    """
    told = {"--host": "", "--port": "8000"}
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == "--uds":
            return None
        if name in told:
            told[name] = value if equals else "".join(arguments[place + 1 : place + 2])
    if not told["--port"].isdigit():
        return None  # vLLM says what is wrong with it
    host, port = told["--host"], int(told["--port"])
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: what an ended one has left does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by another program; end it, or give another with --port"
        return f"a server cannot listen at {host or 'any address'}, port {port}: {error}; see --host and --port"
    return None


def vllm_arguments(argv: Sequence[str]) -> list[str]:
    """`argv` in the words of `vllm serve`: the model first, then options.

    ValueError without a model, or for an option that would break what groupgrad adds.
    """
    given = list(argv)
    model: str | None = None
    arguments: list[str] = []
    place = 0
    while place < len(given):
        word = given[place]
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            # What follows a point is a key of a JSON value, spelled as it is there.
            name, point, key = name.partition(".")
            name = name.replace("_", "-") + point + key
            if name in _OURS:
                raise ValueError(f"{name} is set by groupgrad and cannot be given")
            name = _OTHER_NAMES.get(name, name)
        if name == "--model":
            place += 0 if equals else 1
            if not equals and place >= len(given):
                raise ValueError("--model has no value")
            model = value if equals else given[place]
        elif place == 0 and not word.startswith("-"):
            model = word
        else:
            arguments.append(name + equals + value)
        place += 1
    if model is None:
        raise ValueError("no model is given; add --model NAME")
    # One process answers all requests: it is what knows whether weights are whole.
    told = any(word.partition("=")[0] == "--logprobs-mode" for word in arguments)
    return [model, *arguments, "--api-server-count", "1", *([] if told else ["--logprobs-mode", LOGPROBS_MODE])]
