"""The documents' samples whose part does not exist yet say so by name, before anything is sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from groupgrad.errors import ConfigError

pytestmark = pytest.mark.usefixtures("hub", "affordable")

VLLM_COLOCATE = """\
from trl import GRPOConfig

training_args = GRPOConfig(
    ...,
    use_vllm=True,  # vllm_mode="colocate" by default
)
"""

VLLM_SERVER = """\
   from trl import GRPOConfig

   training_args = GRPOConfig(
       ...,
       use_vllm=True,
       vllm_mode="server",
   )
"""

VLLM_AT_SCALE = """\
import argparse

from datasets import load_dataset
from trl import GRPOTrainer, GRPOConfig
from trl.rewards import accuracy_reward

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm_server_host", type=str, default="", help="The server IP")
    args = parser.parse_args()

    dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

    training_args = GRPOConfig(
        per_device_train_batch_size=4,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_host=args.vllm_server_host.replace("ip-", "").replace("-", "."),  # from ip-X-X-X-X to X.X.X.X
    )

    trainer = GRPOTrainer(
        model="Qwen/Qwen2.5-72B",
        args=training_args,
        reward_funcs=accuracy_reward,
        train_dataset=dataset
    )
    trainer.train()

if __name__=="__main__":
    main()
"""


@pytest.mark.parametrize("sample", [VLLM_COLOCATE, VLLM_SERVER, VLLM_AT_SCALE])
def test_the_refused_samples_are_those_of_the_document(sample: str, shared: Path) -> None:
    (path,) = (shared / "reference" / "seeds").glob("000_*.txt")
    assert sample.strip("\n") in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("sample", [VLLM_COLOCATE, VLLM_SERVER], ids=["colocate", "server"])
def test_vllm_is_refused_by_name(sample: str, run: Any) -> None:
    with pytest.raises(ConfigError, match="use_vllm=True is not part of this version"):
        run(sample, rest={"output_dir": "out"})


def test_vllm_at_scale_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, unsampled: None, run: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--vllm_server_host", "ip-10-0-0-7"])
    with pytest.raises(ConfigError, match="use_vllm=True is not part of this version"):
        run(VLLM_AT_SCALE)
