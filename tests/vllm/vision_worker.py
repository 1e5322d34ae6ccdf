"""Samples from a small vision-language model with colocated vLLM. Run by `test_vision`."""

from __future__ import annotations

import os

from real_vllm import SETTINGS
from vlm_requests import build_vlm, difference, perturb_vision_tower, vlm_requests

os.environ.update(SETTINGS)


def main() -> None:
    """Push twice, the second time with another vision tower; image features of the first must be dropped."""
    from groupgrad.integrations.vllm.colocate import ColocateOptions, VLLMColocateEngine

    built = build_vlm()
    extra = {"enforce_eager": True, "limit_mm_per_prompt": {"image": 2}}
    options = ColocateOptions(max_num_seqs=8, max_model_len=256, dtype="float32", extra=extra)
    engine = VLLMColocateEngine(built.model, built.processor, options)
    rows = vlm_requests(built)
    for version in range(2):
        engine.push(perturb_vision_tower(built.model, version), version)
        assert difference(built, rows, engine) < 1e-5
    print("seen")


if __name__ == "__main__":
    main()
