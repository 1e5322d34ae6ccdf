"""Two processes of `test_in_flight_ranks.py` (`torch.distributed.run ... in_flight_ranks.py OUT URL`): a run whose rows
on a vLLM server go on over pushes.

Every rank writes to `OUT/<rank>.pt` each row that it got, with the weights of its tokens, and what it ended with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parent))
import ranks

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.integrations.vllm.server_pool import PoolSession

ROWS: list[dict[str, Any]] = []


def main(out: Path, url: str) -> None:
    advance = PoolSession.advance

    def recorded(self: PoolSession) -> Any:
        requests = dict(self._open)
        samples = advance(self)
        for ticket, sample in samples:
            request = requests[ticket]
            row = {"prompt": request.prompt_ids, "seed": request.seed, "ids": sample.ids}
            ROWS.append({**row, "steps": sample.policy_versions})
        return samples

    PoolSession.advance = recorded  # type: ignore[method-assign]
    config = GRPOConfig(
        **{**ranks.HELP.SETTINGS, "max_steps": 5, "max_completion_length": 12},
        output_dir=str(out / "run"),
        per_device_train_batch_size=4,
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_server_timeout=30.0,
        vllm_importance_sampling_mode="token_truncate",
        rollout_ahead=2,
        vllm_in_flight_updates=True,
    )
    trainer: Any = GRPOTrainer(
        ranks.BASE.make_model(seed=3),
        lambda completion_ids, **_: [float(ids[0] % 5) for ids in completion_ids],
        config,
        Dataset.from_dict({"prompt": list("abcdefghijkl")}),
        processing_class=ranks.BASE.make_tokenizer(),
    )
    trainer.train()
    engine = trainer.vllm_policy.engine
    rank = os.environ["RANK"]
    result = {"rows": ROWS, "pushed": list(engine.pushed), "log": trainer.state.log_history}
    torch.save({**result, "weights": ranks.HELP.weights(trainer.model)}, out / f"{rank}.pt")
    trainer.vllm_policy.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
