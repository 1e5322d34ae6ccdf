"""Runs that sample from a real vLLM server, on one process or, as a script, on several ranks.

Arguments: FOLDER PORT CASE ... Every rank writes what it ended with to `FOLDER/<case>_<rank>.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from base_fixtures import make_model, make_tokenizer
from real_vllm import vary
from vllm_training import LARGE, Watch, logged, make_trainer

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
import zero_ranks

from groupgrad.integrations.vllm.http import Address, call
from groupgrad.models.shards import gathered, is_sharded

ROWS = 8
"""Rows of a step, on all ranks."""
LORA = {"lora": True, "learning_rate": 5e-2}
CASES: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "data_parallel_lora": {**LORA, "vllm_lora_updates": "adapter"},
    "fsdp": {"fsdp": True},
    # Ranks have shards of the adapter, so it is merged.
    "fsdp_lora": {**LORA, "fsdp": True, "vllm_lora_updates": "merge"},
    "zero3": {"deepspeed": True},
    "zero3_lora": {**LORA, "deepspeed": True, "vllm_lora_updates": "merge"},
}


class Rows(Watch):
    """Notes the rows of this rank, and the weights that the server has sampled them from."""

    def __init__(self, port: int):
        super().__init__()
        self._address = Address.of(port=port)
        self.rows: list[tuple[int, str, list[int]]] = []
        """Generation batch, prompt and completion."""
        self.versions: list[str] = []
        """The server's weight version while a generation batch is rewarded."""

    def __call__(self, completion_ids: Any, *, prompts: Any = (), **columns: Any) -> list[float]:
        self.rows += [(len(self.versions), prompt, list(ids)) for prompt, ids in zip(prompts, completion_ids)]
        self.versions.append(call(self._address, "info", timeout_s=30.0)["weight_version"])
        return super().__call__(completion_ids)


def run(case: str, folder: Path, port: int) -> dict[str, Any]:
    """Train three steps. Collective."""
    settings, rows, arguments = dict(CASES[case]), Rows(port), {}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if settings.pop("lora", False):
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    if settings.pop("deepspeed", False) and ranks > 1:
        settings["deepspeed"] = zero_ranks.deepspeed_config(stage=3, persistent=False)
    if ranks == 1:
        settings.pop("fsdp", None)
    trainer: Any = make_trainer(
        vary(make_model(seed=3, **LARGE), 3),
        make_tokenizer(),
        folder / case,
        # With a smaller one AdamW blows up rounding in gradients that are almost zero.
        adam_epsilon=1e-5,
        arguments={"reward_funcs": rows, **arguments},
        vllm_mode="server",
        vllm_server_port=port,
        ddp_backend="gloo" if ranks > 1 else None,
        **{**settings, "per_device_train_batch_size": ROWS // ranks},
    )
    trainer.engine.engine.members[0].bucket_bytes = 40_000
    first = whole_weights(trainer.model)
    trainer.train()
    trainer.vllm_policy.close()
    return {
        "first_weights": first,
        "weights": whole_weights(trainer.model),
        "rows": rows.rows,
        "versions": rows.versions,
        "is_sharded": is_sharded(trainer.model),
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
    }


def whole_weights(model: Any) -> torch.Tensor:
    """All parameters, as float64. Collective."""
    with gathered(model):
        return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def main(folder: Path, port: int, cases: list[str]) -> None:
    torch.set_num_threads(1)
    if any("deepspeed" in CASES[case] for case in cases):
        zero_ranks.start_deepspeed()
    for case in cases:
        torch.save(run(case, folder, port), folder / f"{case}_{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
