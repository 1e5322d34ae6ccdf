"""`groupgrad vllm-serve`: vLLM's server with routes that let a trainer push weights."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from groupgrad import compat
from groupgrad.apps.cli.command_parser import epilog, refuse
from groupgrad.integrations.vllm.http import VARIABLE, forget_key, is_loopback, store_new_key
from groupgrad.integrations.vllm.serve_command import (
    check_mode,
    check_port,
    server_command,
    take_key,
    vllm_arguments,
)

USAGE = """usage: groupgrad vllm-serve --model NAME [--tensor-parallel-size N] [options of vLLM's server]

Serve a model with vLLM so that a groupgrad trainer (use_vllm=True, vllm_mode="server") can sample from it and push
weights to it.

model:
  --model NAME    a folder or a name on the Hugging Face hub (required)

who may reach it:
  --api-key KEY   what every call has to bring; VLLM_API_KEY does not show it to other users of the machine. Without
                  both a key is made, printed once and stored for trainers of this user on this machine
  --host NAME     127.0.0.1 unless it is given; 0.0.0.0 serves other machines

vLLM's own options:
  --vllm_model_impl NAME, --log_level NAME
                  other names of vLLM's --model-impl and --uvicorn-log-level
  ...             everything else goes to `vllm serve`, such as --port (8000), --dtype, --max-model-len,
                  --gpu-memory-utilization, --enable-lora --max-lora-rank N; `vllm serve --help=all` lists them

""" + epilog(
    "vllm-serve",
    """
groupgrad vllm-serve --model Qwen/Qwen3-0.6B
groupgrad vllm-serve --model runs/base --port 8001 --gpu-memory-utilization 0.8 --max-model-len 4096
VLLM_API_KEY=$KEY groupgrad vllm-serve --model Qwen/Qwen3-8B --host 0.0.0.0 --tensor-parallel-size 4
""",
)


def main(argv: Sequence[str]) -> int:
    """Becomes the server. Returns 2 for an invalid command line, 0 after `--help`."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    try:
        arguments = vllm_arguments(argv)
        compat.require("vllm", "groupgrad vllm-serve")
        check_mode()
        address = check_port(arguments)
        key, arguments = take_key(arguments)
        if key is None and address is None:
            raise ValueError(f"a server without a port needs a key; set {VARIABLE}")
    except (ValueError, ImportError) as error:
        return refuse("vllm-serve", error)
    for problem in compat.unsupported_versions(["vllm"]):
        print(f"groupgrad vllm-serve: warning: {problem}", file=sys.stderr)
    if key is None:
        assert address is not None
        key = new_key(*address)
    elif address is not None:
        forget_key(address[1])
    os.environ[VARIABLE] = key
    command = [sys.executable, "-m", "groupgrad.integrations.vllm.serve_command", *server_command(arguments)]
    sys.stdout.flush()
    # The process becomes the server: signals and the exit status are its own.
    return os.execv(sys.executable, command)


def parser() -> argparse.ArgumentParser:
    """Returns a parser of the options that are named above, for shells that complete them; vLLM parses the rest."""
    parser = argparse.ArgumentParser(prog="groupgrad vllm-serve", add_help=False)
    for flag in ("--model", "--host", "--port", "--dtype", "--max-model-len", "--tensor-parallel-size"):
        parser.add_argument(flag)
    return parser


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
