"""Trains on what a judging model says: `python examples/judge_reward.py`, offline, seconds on a CPU.

The judge is asked over an OpenAI-compatible address, such as that of `vllm serve` or of a service:

    python examples/judge_reward.py --base_url http://judge-machine:8000/v1 --judge Qwen/Qwen3-32B

The key, if the server wants one, is read from OPENAI_API_KEY. Without an address a stub in this process answers as such
a server would, so that the example runs anywhere. It needs `pip install "openai>=1.60"`.

All requests of a generation batch run at the same time, up to `max_concurrency`; a reply is kept in a file, so that an
equal completion, or a resumed run, asks for nothing twice.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from datasets import Dataset

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo.task import make_model, make_splits, make_tokenizer
from groupgrad.rewards import judge

QUESTION = """Rate from 0 to 10 how large a share of the answer's characters are one of 0, 1 and 2: 0 for none of them,
10 for all. Reply with the number alone.

Question: {prompt}
Answer: {completion}"""


class Stub(BaseHTTPRequestHandler):
    """Answers `POST /v1/chat/completions` with the rating that `QUESTION` asks for."""

    def do_POST(self) -> None:
        """Reads a request and sends the reply."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = request["messages"][0]["content"].rpartition("Answer: ")[2]
        rating = 10 * sum(letter in "012" for letter in answer) / max(1, len(answer))
        message = {"role": "assistant", "content": f"{rating:.1f}"}
        reply = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 60, "completion_tokens": 2, "total_tokens": 62},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing for a request."""


@contextmanager
def stub_server() -> Iterator[str]:
    """Context in which the stub listens on this machine; gives its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def train(options: argparse.Namespace, base_url: str) -> int:
    """Trains and reports; 0 if the judge's mean rating has doubled."""
    rating = judge(
        model=options.judge,
        base_url=base_url,
        prompt=QUESTION,
        max_concurrency=16,
        timeout_s=60,
        cache=Path(options.output_dir) / "replies.db",
    )
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_model(tokenizer, options.seed),
        processing_class=tokenizer,
        reward_funcs=rating,
        args=GRPOConfig(
            output_dir=options.output_dir,
            seed=options.seed,
            max_steps=options.steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=8,
            learning_rate=4e-3,
            reward_timeout_s=120,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list([problem.row() for problem in make_splits(options.seed).grpo]),
    )
    trainer.train()
    log = [event for event in trainer.state.log_history if "reward" in event]
    first, last = log[0]["reward"], log[-1]["reward"]
    requests, cached = (log[-1][f"judge/{name}"] for name in ("requests", "cached"))
    print(f"\nmean rating, of 1: {first:.3f} in the first step, {last:.3f} in the last of {len(log)}")
    print(f"{requests:,.0f} requests were sent, {cached:,.0f} were answered from {options.output_dir}/replies.db")
    held = last >= 2 * first
    print(f"{'Met' if held else 'Missed'}: the rating at least doubles.")
    return 0 if held else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 0 if what it claims was met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base_url", help="OpenAI-compatible address of the judge (default: a stub in this process)")
    parser.add_argument("--judge", default="stub", help="name of the judging model")
    parser.add_argument("--output_dir", default="runs/judge_reward", help="where files are written")
    parser.add_argument("--steps", type=int, default=30, help="GRPO steps, 64 completions each (default 30)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    Path(options.output_dir).mkdir(parents=True, exist_ok=True)
    if options.base_url is not None:
        return train(options, options.base_url)
    with stub_server() as base_url:
        print(f"no --base_url is given; a stub at {base_url} stands in for a judge")
        return train(options, base_url)


if __name__ == "__main__":
    sys.exit(main())
