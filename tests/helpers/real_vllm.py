"""A real vLLM server, requests for it, and checks of its samples."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from groupgrad.engines.base import Request, Sample, SamplingOptions
from groupgrad.integrations.vllm.http import Address, find_key
from groupgrad.integrations.vllm.server_pool import VLLMServerPool

START_S = 240.0
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a test needs a thousandth of it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}
OPTIONS = SamplingOptions(max_new_tokens=12, eos_ids=(1,))


class Served:
    """A server process that can be killed and started again on its port."""

    def __init__(self, folder: Path, log: Path, *options: str):
        self.port = free_port()
        self.log, self._slow_file = log, log.with_suffix(".slow")
        self.command = [sys.executable, "-m", "groupgrad.apps.cli.main", "vllm-serve", "--model", str(folder)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        self.command += ["--max-model-len", "128", "--max-num-seqs", "16", "--enforce-eager", *options]
        self.command += ["--logits-processors", "slowed_sampling:SlowedSampling"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Served:
        """Start the process, after ending a previous one; it takes a while until it answers."""
        self.kill()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"GROUPGRAD_TEST_SLOW_FILE": str(self._slow_file), "PYTHONPATH": os.pathsep.join(paths)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **SETTINGS, **own}, start_new_session=True
            )
        return self

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Inside, vLLM takes at most five steps a second, so that rows are under way on a busy machine too."""
        self._slow_file.touch()
        try:
            yield
        finally:
            self._slow_file.unlink()

    @property
    def address(self) -> Address:
        return Address.of(port=self.port)

    @property
    def key(self) -> str:
        """The key that the server has made and stored."""
        found = find_key("127.0.0.1", self.port)
        assert found is not None
        return found[0]

    def engine(self, **options: Any) -> VLLMServerPool:
        return pool_of([self], **options)

    def workers(self) -> list[psutil.Process]:
        """Child processes of the server."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> None:
        """Kill the process and its children."""
        if self.process is not None:
            family = self.workers() if self.process.poll() is None else []
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
            self.process = None


def free_port() -> int:
    """A port that no connection takes until the server listens: it is below those that systems give out."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = draw.randrange(20_000, 32_000)
            probe.bind(("127.0.0.1", port))
            return port


def pool_of(servers: Sequence[Served], *, transport: Any = None, **options: Any) -> VLLMServerPool:
    """An engine for these servers, which pushes by `transport` (None: the one that trainers choose)."""
    pool = VLLMServerPool([server.address for server in servers], **{"timeout_s": START_S, **options})
    for member in pool.members:
        member.bucket_bytes = 40_000
        if transport is not None:
            push_by(member, transport)
    return pool


def push_by(member: Any, transport: Any) -> None:
    """Has this server's client push by `transport`."""
    member._current_transport, member.close = lambda device: transport, transport.close


def vary(model: Any, seed: int, only: str = "") -> Any:
    """Add large noise to the parameters whose name contains `only`, so that tokens become distinguishable."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=stream))
    return model


def requests(num_rows: int = 6, *, tokens: int = 12) -> list[Request]:
    """Rows of groups of two, each with a seed of its own."""
    return [Request([4 + i // 2, 20, 30, 41 - i // 2], seed=1000 + i, max_new_tokens=tokens) for i in range(num_rows)]


@torch.no_grad()
def true_logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(tokens, V) log-probs of a plain forward pass in float32."""
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def mean_difference(model: Any, rows: list[Request], samples: list[Sample], temperature: float = 1.0) -> float:
    """Mean absolute difference in nats between the samples' log-probs and the model's own, over all tokens."""
    differences = []
    for row, sample in zip(rows, samples):
        table = true_logprobs(model, row.prompt_ids, sample.ids, temperature)
        own = table.gather(-1, torch.tensor(sample.ids)[:, None]).squeeze(-1)
        assert sample.logprobs is not None
        differences.append((own - torch.tensor(sample.logprobs)).abs())
    return float(torch.cat(differences).mean())


def is_greedy(model: Any, row: Request, sample: Sample) -> bool:
    """True if each token is the model's most likely one."""
    return true_logprobs(model, row.prompt_ids, sample.ids).argmax(-1).tolist() == sample.ids
