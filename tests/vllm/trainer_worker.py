"""A training run that the test kills or interrupts. Run by `test_training_server`."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from real_vllm import push_by
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_training import make_trainer

from groupgrad.integrations.vllm.http import Address
from groupgrad.integrations.vllm.weight_transport import SharedMemoryTransport
from groupgrad.integrations.vllm.wire import Bucket


class StopsAt(SharedMemoryTransport):
    """Writes a file when half of a push has been sent, and never sends the rest."""

    def __init__(self, version: int, marker: Path):
        self._start, self._marker = f"{version}-", marker

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        if weight_version.startswith(self._start) and bucket.first > 0:
            self._marker.touch()
            time.sleep(600)
        super().send(address, weight_version, bucket, timeout_s=timeout_s)


class Gate:
    """Writes a file `reached` beside the run's folder, and waits there for a file `go`."""

    def __init__(self, run: Path):
        self._reached, self._go = run.with_name("reached"), run.with_name("go")

    def wait(self) -> None:
        self._reached.touch()
        while not self._go.exists():
            time.sleep(0.02)


def main(model: str, run: Path, settings: dict[str, Any], stop_at: str) -> None:
    """Train, and wait at a place: a policy step, whose push never ends; or `ahead`, before the first rows that are
    sampled ahead."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    trainer: Any = make_trainer(policy, tokenizer, run, vllm_mode="server", **settings)
    client = trainer.engine.engine.members[0]
    client.bucket_bytes = 40_000
    gate = Gate(run)
    if stop_at == "ahead":
        trainer.watch.trainer = None  # its sampling would interfere with the thread that samples ahead
        open_session = trainer.engine.session

        def session(options: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                gate.wait()
            return open_session(options)

        trainer.engine.session = session
    else:
        push_by(client, StopsAt(int(stop_at), run.with_name("reached")))
    trainer.train()


if __name__ == "__main__":
    # A shell starts background processes with interrupts ignored, and Python keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
