"""One of two ranks that sample their own rows with colocated vLLM. Run by `test_colocate_ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as torch_dist
from real_vllm import OPTIONS, mean_difference, requests, vary
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad import dist
from groupgrad.integrations.vllm.colocate import ColocateOptions, VLLMColocateEngine


def main(folder: Path, tensor_parallel_size: int, model_impl: str) -> None:
    """Push and sample twice; ranks have different numbers of rows, and the first has none the second time."""
    torch_dist.init_process_group("gloo")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = ColocateOptions(
        max_num_seqs=8,
        max_model_len=128,
        dtype="float32",
        tensor_parallel_size=tensor_parallel_size,
        model_impl=model_impl,
        extra={"enforce_eager": True},
    )
    engine = VLLMColocateEngine(policy, AutoTokenizer.from_pretrained(folder), options)
    rows = requests(8)[: 2 + 4 * dist.rank()]
    for version in range(2):
        engine.push(vary(policy, version), version)
        mine = rows if version == 0 or dist.rank() else []
        samples = engine.sample(mine, OPTIONS)
        assert len(samples) == len(mine)
        assert not mine or mean_difference(policy, mine, samples) < 1e-5
    (folder / f"rank-{dist.rank()}").write_text(f"{len(rows)} rows")
    torch_dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
