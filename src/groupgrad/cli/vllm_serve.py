"""`groupgrad vllm-serve`: vLLM's server with routes that let a trainer push weights."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from groupgrad import compat
from groupgrad.cli.command_parser import COMMAND_CODES, codes_in_words, refuse
from groupgrad.engines.vllm.api_keys import VARIABLE, check_key, forget_key, is_loopback, store_new_key
from groupgrad.engines.vllm.server import check_mode, server_command
from groupgrad.engines.vllm.transfer_plugin import check_plugin
from groupgrad.engines.vllm.vllm_params import LOGPROBS_MODE

USAGE = """usage: groupgrad vllm-serve --model NAME [--tensor-parallel-size N] [options of vLLM's server]

Serve a model with vLLM so that a groupgrad trainer (use_vllm=True, vllm_mode="server") can sample from it and push
weights to it.

  --model NAME    a folder or a name on the Hugging Face hub (required)
  --api-key KEY   what every call has to bring; VLLM_API_KEY does not show it to other users of the machine. Without
                  both a key is made, printed once and stored for trainers of this user on this machine
  --host NAME     127.0.0.1 unless it is given; 0.0.0.0 serves other machines
  --vllm_model_impl NAME, --log_level NAME
                  other names of vLLM's --model-impl and --uvicorn-log-level
  ...             everything else goes to `vllm serve`, such as --port (8000), --dtype, --max-model-len,
                  --gpu-memory-utilization, --enable-lora --max-lora-rank N; `vllm serve --help=all` lists them

""" + codes_in_words(COMMAND_CODES["vllm-serve"])

# Aliases of vLLM's options that users of other servers know.
_ALIASES = {"--vllm-model-impl": "--model-impl", "--log-level": "--uvicorn-log-level"}
_RESERVED = ("--weight-transfer-config", "--api-server-count")
HOST = "127.0.0.1"
"""Address of the server without `--host` and `--uds`."""


def main(argv: Sequence[str]) -> int:
    """Becomes the server. Returns 2 for an invalid command line, 0 after `--help`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        arguments = vllm_arguments(argv)
        if importlib.util.find_spec("vllm") is None:
            raise ValueError("vLLM is not installed; run `pip install vllm`")
        check_plugin()
        check_mode()
        address = check_port(arguments)
        key, arguments = take_key(arguments)
        if key is None and address is None:
            raise ValueError(f"a server without a port needs a key; set {VARIABLE}")
    except ValueError as error:
        return refuse("vllm-serve", error)
    for problem in compat.unsupported_versions(["vllm"]):
        print(f"groupgrad vllm-serve: warning: {problem}", file=sys.stderr)
    if key is None:
        assert address is not None
        key = new_key(*address)
    elif address is not None:
        forget_key(address[1])
    os.environ[VARIABLE] = key
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


def take_key(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The key of `--api-key` or `VLLM_API_KEY` (None: neither), and the other arguments.

    vLLM reads the variable as well, and a key in an argument would be in its log. ValueError for an invalid key.
    """
    key, origin, others = os.environ.get(VARIABLE), VARIABLE, []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--api-key":
            key, origin = value if equals else next(words, ""), name
        else:
            others.append(word)
    return (None if key is None else check_key(key, origin)), others


def new_key(host: str, port: int) -> str:
    """A new key, printed, and stored for trainers of this user on this machine."""
    key, error = store_new_key(port)
    _say(f"the key of this server is {key}")
    if error is not None:
        _say(f"warning: it was not stored ({error}): set {VARIABLE} to it in each trainer's environment")
    if not is_loopback(host):
        _say(
            f"warning: it listens at {host or 'all addresses'} with a key that trainers of other machines do not have: "
            f"set {VARIABLE} to one key on both sides. HTTP is not encrypted, so let nobody else onto that network"
        )
    return key


def _say(text: str) -> None:
    print(f"groupgrad vllm-serve: {text}", file=sys.stderr)


def check_port(arguments: Sequence[str]) -> tuple[str, int] | None:
    """The server's host and port; None for a server without them. ValueError if it cannot listen there.

    vLLM itself notices only after loading the model, or not at all if another server listens on all addresses.
    """
    options = {"--host": "", "--port": "8000", **config_file(arguments)}
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, value = word.partition("=")
        if name in ("--host", "--port", "--uds"):
            options[name] = value if equals else following
    if "--uds" in options:
        return None
    if not options["--port"].isdigit():
        raise ValueError(f"--port {options['--port']!r} is no number")
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
    return host, port


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
    names = {word.partition("=")[0] for word in arguments} | config_file(arguments).keys()
    if "--logprobs-mode" not in names:
        arguments += ["--logprobs-mode", LOGPROBS_MODE]
    if names.isdisjoint(("--host", "--uds")):
        arguments += ["--host", HOST]
    return [model, *arguments]


def config_file(arguments: Sequence[str]) -> dict[str, str]:
    """The options in vLLM's `--config FILE`, as flags and texts. ValueError if it has a key, or is no YAML."""
    for word, following in zip(arguments, [*arguments[1:], ""]):
        name, equals, path = word.partition("=")
        if name == "--config":
            path = path if equals else following
            try:
                content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
                options = {"--" + str(key).replace("_", "-"): str(value) for key, value in content.items()}
            except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
                raise ValueError(f"--config {path} cannot be read: {error}") from None
            if "--api-key" in options:
                raise ValueError(f"{path} has a key, which groupgrad's routes do not read there; set {VARIABLE} to it")
            return options
    return {}
