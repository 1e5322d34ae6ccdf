"""`groupgrad serve`: serves a model at an address that speaks OpenAI's API and Anthropic's."""

from __future__ import annotations

import argparse
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from groupgrad import compat
from groupgrad.apps.cli.command_parser import CommandParser, port_number, refuse


def main(argv: Sequence[str]) -> int:
    """Serves until it is interrupted. Returns 1 if a package or the address is missing, or no model can be loaded."""
    arguments = parser().parse_args(argv)
    try:
        for package in ("starlette", "uvicorn"):
            compat.require(package, "the address")
        with tempfile.TemporaryDirectory() as folder:
            return _serve(arguments, folder)
    except (ImportError, OSError, ValueError) as error:
        return refuse("serve", error, 1)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "serve",
        description="Serve a model at an address that speaks OpenAI's API (/v1/chat/completions, /v1/completions, "
        "/v1/models) and Anthropic's (/v1/messages), sampled by the engine that a training would use. /metrics has "
        "counts for Prometheus.",
        examples="groupgrad serve runs/math\ngroupgrad serve Qwen/Qwen2.5-0.5B-Instruct --port 8000 --api_key secret",
    )
    parser.add_argument("model", metavar="MODEL", help="a hub id, a folder, a checkpoint or a run's output_dir")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at")
    parser.add_argument("--port", type=port_number, default=0, help="port; 0: any that is free")
    parser.add_argument("--api_key", "--api-key", help="key that requests must have; unset: a random one")
    parser.add_argument(
        "--max_tokens", "--max-tokens", type=int, default=1024, help="tokens of an answer, unless a request says fewer"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        help="seconds within which a request is answered; later it gets an error (503)",
    )
    parser.add_argument("--dtype", default="float32", help="precision to load the model in")
    parser.add_argument("--gguf_file", metavar="NAME", help="GGUF file in the model's folder that has its weights")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    return parser


def _serve(arguments: argparse.Namespace, folder: str) -> int:
    """Loads the model and answers requests. `folder` is for what a trainer writes."""
    from groupgrad.integrations.agents.server import listen

    key = arguments.api_key or secrets.token_urlsafe(16)
    # The port comes first: a model may take a minute to load, and what connects meanwhile is answered afterwards.
    with closing(listen(arguments.host, arguments.port)) as listening:
        from groupgrad.apps.serve.serving import ServedModel

        served = ServedModel(_rollouts(arguments, folder), key, listening, arguments.timeout)
        print(f"{arguments.model} is served at {served.address.url} with the key {key}", flush=True)
        try:
            served.run()
        except KeyboardInterrupt:
            print("ended")
        finally:
            served.close()
    return 0


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _rollouts(arguments: argparse.Namespace, folder: str) -> Any:
    """The rollouts of a trainer of this model, which have its engine and its chat template."""
    from datasets import Dataset

    from groupgrad import GRPOConfig, GRPOTrainer

    init = {"dtype": arguments.dtype}
    config = GRPOConfig(
        output_dir=folder,
        report_to="none",
        max_completion_length=arguments.max_tokens,
        per_device_train_batch_size=2,
        num_generations=2,
        trust_remote_code=arguments.trust_remote_code,
        model_init_kwargs=init | ({"gguf_file": arguments.gguf_file} if arguments.gguf_file else {}),
    )
    rows = Dataset.from_list([{"number": 0}])
    trainer = GRPOTrainer(arguments.model, agent=lambda row, session: None, args=config, train_dataset=rows)
    return trainer.components.collector.rollouts
