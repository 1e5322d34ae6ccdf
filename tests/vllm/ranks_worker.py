"""One of two ranks that each sample their own rows with vLLM in their process. Run by `test_colocate_ranks`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as torch_dist
from real_vllm import OPTIONS, mean_difference, requests, vary
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupgrad import dist
from groupgrad.engines.vllm.colocate import ColocateOptions, VLLMColocateEngine


def main(folder: Path) -> None:
    """Push and sample twice; ranks have different numbers of rows."""
    torch_dist.init_process_group("gloo")
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = ColocateOptions(max_num_seqs=8, max_model_len=128, dtype="float32", extra={"enforce_eager": True})
    engine = VLLMColocateEngine(policy, AutoTokenizer.from_pretrained(folder), options)
    rows = requests(8)[: 2 + 4 * dist.rank()]
    for version in range(2):
        engine.push(vary(policy, version), version)
        assert mean_difference(policy, rows, engine.sample(rows, OPTIONS)) < 1e-5
    (folder / f"rank-{dist.rank()}").write_text(f"{len(rows)} rows")
    torch_dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
