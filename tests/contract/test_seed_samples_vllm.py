"""The documents' samples with vLLM, up to where vLLM itself is needed; `tests/vllm` has those that train with it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.compat import is_available

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


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has configurations made from here on default to these values."""

    def change(**values: Any) -> None:
        original = GRPOConfig.__init__
        monkeypatch.setattr(
            GRPOConfig, "__init__", lambda self, *args, **kwargs: original(self, *args, **{**values, **kwargs})
        )

    return change


@pytest.mark.parametrize("sample", [VLLM_COLOCATE, VLLM_SERVER, VLLM_AT_SCALE])
def test_the_samples_are_those_of_the_document(sample: str, shared: Path) -> None:
    (path,) = (shared / "reference" / "seeds").glob("000_*.txt")
    assert sample.strip("\n") in path.read_text(encoding="utf-8")


@pytest.mark.skipif(is_available("vllm"), reason="vLLM is installed")
def test_colocate_says_how_vllm_is_installed(run: Any, rest: Any, checksum: Any, unsampled: None) -> None:
    args = run(VLLM_COLOCATE, rest={"output_dir": "out"})["training_args"]
    with pytest.raises(ImportError, match=r"vllm_mode=\"colocate\" needs 'vllm'.*`pip install 'groupgrad\[vllm\]'`"):
        GRPOTrainer(**rest(args=args, reward_funcs=checksum))


def test_a_server_that_is_not_there_is_waited_for_and_named(
    run: Any, rest: Any, checksum: Any, unsampled: None, defaults: Callable[..., None]
) -> None:
    defaults(vllm_server_timeout=0.5, vllm_server_port=9)
    args = run(VLLM_SERVER, rest={"output_dir": "out"})["training_args"]
    started = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"no vLLM server came up at http://127\.0\.0\.1:9 within 0\.5 s .*`groupgrad vllm-serve"
    ):
        GRPOTrainer(**rest(args=args, reward_funcs=checksum))
    assert time.monotonic() - started < 20.0


def test_vllm_at_scale_looks_for_its_server(
    monkeypatch: pytest.MonkeyPatch, unsampled: None, defaults: Callable[..., None], run: Any
) -> None:
    # The document's 32 processes have 128 rows a step.
    defaults(gradient_accumulation_steps=2, vllm_server_timeout=0.5, vllm_server_port=9)
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--vllm_server_host", "ip-127-0-0-1"])
    with pytest.raises(TimeoutError, match=r"no vLLM server came up at http://127\.0\.0\.1:9 within 0\.5 s"):
        run(VLLM_AT_SCALE)
