"""A training run that the test kills or interrupts. Run by `test_training_server`."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_training import make_trainer

from groupgrad.engines.vllm.http import Address
from groupgrad.engines.vllm.weight_transport import HttpTransport
from groupgrad.engines.vllm.wire import Bucket


class StopsAt(HttpTransport):
    """Writes a file when half of a push has been sent, and never sends the rest."""

    def __init__(self, version: int, marker: Path):
        self._start, self._marker = f"{version}-", marker

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        if weight_version.startswith(self._start) and bucket.number == 1:
            self._marker.touch()
            time.sleep(600)
        super().send(address, weight_version, bucket, timeout_s=timeout_s)


def main(model: str, run: Path, settings: dict[str, Any], stop_at: int) -> None:
    """Train. With `stop_at` the push of that policy step never ends; otherwise batch 2 waits for a file `go`."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    trainer: Any = make_trainer(policy, tokenizer, run, vllm_mode="server", **settings)
    client = trainer.engine.engine.members[0].client
    client.bucket_bytes = 40_000
    if stop_at:
        client.transport = StopsAt(stop_at, run.with_name("reached"))
    else:
        trainer.watch.trainer = None  # its sampling would interfere with the thread that samples ahead

        def wait(number: int) -> None:
            nonlocal rounds
            rounds += 1
            if rounds == 2:
                run.with_name("reached").touch()
                while not run.with_name("go").exists():
                    time.sleep(0.02)

        rounds = 0
        trainer.watch.before = wait
    trainer.train()


if __name__ == "__main__":
    # A shell starts background processes with interrupts ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
