"""Times two libraries of kernels in turn: `python kernel_speed.py PACKAGED`, a file, beside the one compiled here.

Prints the shortest seconds of processor time of both, for sampling and for a training pass of a small model, on one
thread. Other processes on the machine hardly change that time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine
from groupgrad.kernels import compile as kernels
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

ROUNDS = 30
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 2000}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def main(packaged: str) -> None:
    torch.set_num_threads(1)
    compiled, _ = kernels.load()
    libraries = {"packaged": kernels._declare(ctypes.CDLL(packaged)), "compiled": compiled}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, eos_token_id=1, pad_token_id=0))
    prompts, rows = [[5 + i] * 40 for i in range(4)], [i % 4 for i in range(16)]
    batch = build_batch(prompts, rows, [[7 + i] * 24 for i in range(16)])
    requests = [Request(prompts[row], i, 24) for i, row in enumerate(rows)]
    options = SamplingOptions(max_new_tokens=24, eos_ids=(1,), pad_id=0)

    def train() -> None:
        model.zero_grad()
        score_tokens(model, batch, ForwardOptions()).logprobs.sum().backward()

    work: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, library in libraries.items():
        kernels._library = lambda library=library: library
        engine = NativeEngine(model)
        work[name] = {"sampling": lambda engine=engine: engine.sample(requests, options), "training": train}
    best: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS):
        for kind in ("sampling", "training"):
            for name, library in libraries.items():
                kernels._library = lambda library=library: library
                start = time.process_time()
                work[name][kind]()
                best[kind, name] = min(time.process_time() - start, best.get((kind, name), 1e9))
    for kind in ("sampling", "training"):
        print(kind, best[kind, "packaged"], best[kind, "compiled"])


if __name__ == "__main__":
    main(*sys.argv[1:])
