"""The documents' samples whose part does not exist yet say so by name, before anything is sampled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from groupgrad.errors import ConfigError, UnavailableError

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

TOOLS = '''\
from trl import GRPOTrainer

def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b

async def async_add(a: int, b: int) -> int:
    """
    Asynchronously adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum of the two integers.
    """
    return a + b

trainer = GRPOTrainer(
    tools=[multiply, async_add],
    ...,
)
'''

ENVIRONMENT = '''\
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

instructions = [f"Increment the counter by {i}." for i in range(1, 7)]
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": instruction}] for instruction in instructions]})

def reward_func(environments, **kwargs):  # dummy reward: the reward is the current value of the counter
    return [environment.counter for environment in environments]

class IncrementEnv:
    def reset(self, **kwargs) -> str | None:  # required; receives sampled row fields as kwargs (e.g., `prompt`)
        self.counter = 0
        return "Counter reset to 0.\\n"

    def increment(self, step: int) -> int:  # the other public methods of the environment are exposed as tools
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=GRPOConfig(chat_template_kwargs={"enable_thinking": False}),
    train_dataset=dataset,
    reward_funcs=reward_func,
    environment_factory=IncrementEnv,
)
trainer.train()
'''


def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize("sample", [VLLM_COLOCATE, VLLM_SERVER, VLLM_AT_SCALE, TOOLS, ENVIRONMENT])
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


def test_tools_are_refused_by_name(unsampled: None, run: Any, rest: Any) -> None:
    with pytest.raises(UnavailableError, match="tools is given, but tool calling is not part of this version"):
        run(TOOLS, rest=rest(reward_funcs=longer))


def test_environments_are_refused_by_name(unsampled: None, run: Any) -> None:
    with pytest.raises(UnavailableError, match="environment_factory is given, but environments is not part of this"):
        run(ENVIRONMENT)
