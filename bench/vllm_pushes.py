"""Times pushes of new weights to vLLM, by transport.

    python bench/vllm_pushes.py --output FILE [--repetitions 5] [--only server|colocate --folder FOLDER]

Full weights and a LoRA adapter (rank 16, all linear layers), of a small and of a larger model, in float32: to a server
on this machine, and to vLLM in this process. A process holds one vLLM, so each case runs in its own (`--only`).
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    from vllm_server import set_environment

    set_environment()

from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_models import LARGE_SHAPE, demo_base, random_base
from vllm_server import free_port, vllm_server

from groupgrad.integrations.vllm import client
from groupgrad.integrations.vllm.http import Address
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.weight_transport import GroupTransport, HttpTransport, SharedMemoryTransport
from groupgrad.integrations.vllm.wire import Bucket, pack
from groupgrad.models.weights import adapter_files, checkpoint_weights

RANK, MAX_CONTEXT = 16, 64


class Timed(HttpTransport):
    """Times another transport, and the packing of its buckets."""

    def __init__(self, inner: HttpTransport):
        self.inner, self.device = inner, inner.device
        self.reset()

    def reset(self) -> None:
        """Count times from here on."""
        self.packing = self.sending = 0.0

    def pack(self, *args: Any, **options: Any) -> Iterator[Bucket]:
        """In place of the client's `pack`."""
        buckets = pack(*args, **options)
        while True:
            started = time.perf_counter()
            bucket = next(buckets, None)
            self.packing += time.perf_counter() - started
            if bucket is None:
                return
            yield bucket

    def connect(self, address: Address, num_workers: int, *, timeout_s: float) -> None:
        """Prepare the other transport."""
        self.inner.connect(address, num_workers, timeout_s=timeout_s)

    def send(self, address: Address, weight_version: str, bucket: Bucket, *, timeout_s: float) -> None:
        """Send by the other transport."""
        started = time.perf_counter()
        self.inner.send(address, weight_version, bucket, timeout_s=timeout_s)
        self.sending += time.perf_counter() - started

    def close(self) -> None:
        """Leave the server."""
        self.inner.close()


def repeated(
    push: Callable[[int], Any], repetitions: int, *, warmed_up: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds of each push after a warm-up push; `warmed_up` is called in between."""
    seconds = []
    for version in range(repetitions + 1):
        started = time.perf_counter()
        push(version)
        seconds.append(time.perf_counter() - started)
        if not version:
            warmed_up()
    return seconds[1:]


def row(name: str, num_bytes: int, seconds: list[float], **parts: float) -> dict[str, Any]:
    """One row of the table."""
    result = {"way": name, "bytes": num_bytes, "seconds": statistics.median(seconds), "parts": parts}
    print(result, file=sys.stderr, flush=True)
    return result | {"least": min(seconds), "most": max(seconds)}


def with_adapter(model: Any) -> Any:
    """The model under a LoRA adapter."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))


def sizes(model: Any) -> int:
    """Bytes of all weights in a push."""
    return sum(tensor.nbytes for _, tensor in checkpoint_weights(model))


def adapter_bytes(model: Any) -> int:
    """Bytes of the adapter alone."""
    return sum(tensor.nbytes for tensor in adapter_files(model).tensors.values())


def of_adapter(place: str, engine: Any, model: Any, repetitions: int, *, way: str = "") -> list[dict[str, Any]]:
    """Rows for an adapter on the model: sent alone, and merged over the transport `way`."""
    num_bytes, adapted = sizes(model), with_adapter(model)
    alone = repeated(functools.partial(engine.push_adapter, adapted), repetitions)
    merged = repeated(functools.partial(engine.push, adapted), repetitions)
    return [
        row(f"{place}, adapter alone", adapter_bytes(adapted), alone),
        row(f"{place}, adapter merged{way}", num_bytes, merged),
    ]


def to_server(folder: Path, repetitions: int) -> list[dict[str, Any]]:
    """Rows for a server on this machine."""
    options = ("--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", "8")
    rows = []
    with vllm_server(
        folder, "vllm-pushes", *options, "--enable-lora", "--max-lora-rank", str(RANK), "--enforce-eager"
    ) as url:
        address = Address.of(url)
        model = AutoModelForCausalLM.from_pretrained(folder)
        num_bytes = sizes(model)
        ways: dict[str, HttpTransport] = {
            "server, shared memory": SharedMemoryTransport(),
            "server, HTTP": HttpTransport(),
            "server, process group (gloo)": GroupTransport(free_port()),
        }
        for name, transport in ways.items():
            timed = Timed(transport)
            engine = VLLMServerPool([address], transport=timed)
            push: Callable[[int], Any] = functools.partial(engine.push, model)
            with mock.patch.object(client, "pack", timed.pack):
                seconds = repeated(push, repetitions, warmed_up=timed.reset)
            parts = {"packing": timed.packing / repetitions, "sending": timed.sending / repetitions}
            rows.append(row(name, num_bytes, seconds, **parts))
            engine.close()
        engine = VLLMServerPool([address], transport=SharedMemoryTransport())
        rows += of_adapter("server", engine, model, repetitions, way=", shared memory")
        engine.close()
    return rows


def in_process(folder: Path, repetitions: int) -> list[dict[str, Any]]:
    """Rows for vLLM in this process."""
    from groupgrad.integrations.vllm.colocate import VLLMColocateEngine
    from groupgrad.integrations.vllm.colocate_start import ColocateOptions

    model = AutoModelForCausalLM.from_pretrained(folder)
    options = ColocateOptions(max_num_seqs=8, max_model_len=MAX_CONTEXT, dtype="float32", max_lora_rank=RANK)
    engine = VLLMColocateEngine(model, AutoTokenizer.from_pretrained(folder), options)
    num_bytes = sizes(model)
    whole = repeated(functools.partial(engine.push, model), repetitions)
    rows = [row("colocate, by reference", num_bytes, whole), *of_adapter("colocate", engine, model, repetitions)]
    engine.close()
    return rows


def measure(repetitions: int) -> dict[str, Any]:
    """Results of all cases, each from a process of its own."""
    folders = {"small": demo_base(0), "large": random_base("large", LARGE_SHAPE)}
    results: dict[str, Any] = {"repetitions": repetitions, "models": {}}
    for name, folder in folders.items():
        count = AutoModelForCausalLM.from_pretrained(folder).num_parameters()
        rows: list[dict[str, Any]] = []
        for place in ("server", "colocate"):
            output = Path(__file__).parent / ".logs" / f"vllm-pushes-{name}-{place}.json"
            command = [sys.executable, __file__, "--only", place, "--folder", str(folder), "--output", str(output)]
            subprocess.run([*command, "--repetitions", str(repetitions)], check=True)
            rows += json.loads(output.read_text())
        results["models"][name] = {"parameters": count, "rows": rows}
    return results


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the numbers, JSON")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=("server", "colocate"), help="one case, of the model in --folder")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    options.output.parent.mkdir(exist_ok=True)
    if options.only is None:
        results: Any = measure(options.repetitions)
    else:
        take = to_server if options.only == "server" else in_process
        results = take(options.folder, options.repetitions)
    options.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
