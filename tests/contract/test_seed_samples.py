# ruff: noqa: E501 - the documents' lines are as long as they are
"""The code samples of the user documents run as they are written: only the name of the imported package changes.

Where a document writes `...` for "your other arguments", the test fills in arguments. Names that a document leaves to
its reader (`model`, `dataset`, `check_math_solution`) are in the namespace that the sample runs in.
"""

from __future__ import annotations

import doctest
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_samples import ENVIRONMENT, TOOLS
from base_fixtures import SIZES
from datasets import Dataset
from scripted_agents import call, with_tools
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from groupgrad import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.usefixtures("hub", "affordable")

QUICK_START = """\
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""

LONGER_BY_TOKENS = '''\
def reward_func(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token count)."""
    return [float(len(ids)) for ids in completion_ids]
'''

LONGER_BY_TOKENS_TRIED = """\
>>> prompts = ["The sky is", "The sun is"]  # not used in the reward function, but the trainer will pass it
>>> completions = [" blue.", " in the sky."]  # not used in the reward function, but the trainer will pass it
>>> completion_ids = [[6303, 13], [304, 279, 12884, 13]]
>>> reward_func(prompts=prompts, completions=completions, completion_ids=completion_ids)
[2.0, 4.0]
"""

LONGER_BY_CHARACTERS = '''\
def reward_func(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character count)."""
    return [float(len(completion)) for completion in completions]
'''

LONGER_BY_CHARACTERS_TRIED = """\
>>> prompts = ["The sky is", "The sun is"]
>>> completions = [" blue.", " in the sky."]
>>> completion_ids = [[6303, 13], [304, 279, 12884, 13]]  # not used in the reward function, but the trainer will pass it
>>> reward_func(prompts=prompts, completions=completions, completion_ids=completion_ids)
[6.0, 12.0]
"""

FORMAT = '''\
import re

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^.*?.*?$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]
'''

FORMAT_TRIED = """\
>>> prompts = [
...     [{"role": "assistant", "content": "What is the result of (1 + 2) * 4?"}],
...     [{"role": "assistant", "content": "What is the result of (3 + 1) * 2?"}],
... ]
>>> completions = [
...     [{"role": "assistant", "content": "The sum of 1 and 2 is 3, which we multiply by 4 to get 12.(1 + 2) * 4 = 12"}],
...     [{"role": "assistant", "content": "The sum of 3 and 1 is 4, which we multiply by 2 to get 8. So (3 + 1) * 2 = 8."}],
... ]
>>> format_reward_func(prompts=prompts, completions=completions)
[1.0, 0.0]
"""

# The document lost everything in angle brackets. Without the tags its pattern matches any line, so the output that it
# shows can only be that of the tagged text.
TAGS_BACK = (
    ("^.*?.*?$", "^<think>.*?</think><answer>.*?</answer>$"),
    (
        "The sum of 1 and 2 is 3, which we multiply by 4 to get 12.(1 + 2) * 4 = 12",
        "<think>The sum of 1 and 2 is 3, which we multiply by 4 to get 12.</think><answer>(1 + 2) * 4 = 12</answer>",
    ),
)

REFERENCE = r"""
import re

def reward_func(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \boxed{}
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
"""

REFERENCE_TRIED = r"""
>>> prompts = ["Problem: Solve the equation $2x + 3 = 7$. Solution:", "Problem: Solve the equation $3x - 5 = 10$."]
>>> completions = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
>>> ground_truth = ["2", "5"]
>>> reward_func(prompts=prompts, completions=completions, ground_truth=ground_truth)
[1.0, 0.0]
"""

MULTI_TASK = """\
from datasets import Dataset
from trl import GRPOTrainer

# Define a dataset that contains both math and coding problems
dataset = Dataset.from_list(
    [
        {"prompt": "What is 2+2?", "task": "math"},
        {"prompt": "Write a function that returns the sum of two numbers.", "task": "code"},
        {"prompt": "What is 3*4?", "task": "math"},
        {"prompt": "Write a function that returns the product of two numbers.", "task": "code"},
    ]
)

# Math-specific reward function
def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "math":
            # Calculate math-specific reward
            correct = check_math_solution(prompt, completion)
            reward = 1.0 if correct else -1.0
            rewards.append(reward)
        else:
            # Return None for non-math tasks
            rewards.append(None)
    return rewards

# Coding-specific reward function
def coding_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task):
        if t == "coding":
            # Calculate coding-specific reward
            works = test_code_solution(prompt, completion)
            reward = 1.0 if works else -1.0
            rewards.append(reward)
        else:
            # Return None for non-coding tasks
            rewards.append(None)
    return rewards

# Use both task-specific reward functions
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=[math_reward_func, coding_reward_func],
    train_dataset=dataset,
)

trainer.train()
"""

ASYNCHRONOUS = """\
import asyncio

async def async_reward_func(prompts, completions, **kwargs):
    # Simulate an I/O-bound call (e.g., HTTP request, database lookup)
    await asyncio.sleep(0.01)
    # Simple toy reward: 1.0 if the completion is non-empty, else 0.0
    return [1.0 if completion else 0.0 for completion in completions]
"""

LOGGING = r"""
import re

def reward_func(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):
    extracted = [re.search(r"\\boxed\{(.*?)\}", c) for c in completions]
    extracted = [m.group(1) if m else None for m in extracted]
    rewards = [1.0 if e == gt else 0.0 for e, gt in zip(extracted, ground_truth)]

    if log_extra:
        log_extra("golden_answer", list(ground_truth))
        log_extra("extracted_answer", [e or "[none]" for e in extracted])

    if log_metric:
        log_metric("accuracy", sum(rewards) / len(rewards))

    return rewards
"""

PASSED_ALONE = """\
from trl import GRPOTrainer

trainer = GRPOTrainer(
    reward_funcs=reward_func,
    ...,
)
"""

PASSED_IN_A_LIST = """\
from trl import GRPOTrainer

trainer = GRPOTrainer(
    reward_funcs=[reward_func, async_reward_func1, async_reward_func2],
    ...,
)
"""

OTHER_SPELLINGS = """\
from trl import GRPOTrainer, GRPOConfig

# Define reward function (example for math)
def reward_fn(responses, ground_truths):
    rewards = []
    for resp, gt in zip(responses, ground_truths):
        # Check if answer matches
        rewards.append(1.0 if gt in resp else 0.0)
    return rewards

# Configure GRPO training
args = GRPOConfig(
    output_dir = "grpo_outputs",
    per_device_train_batch_size = 1,
    gradient_accumulation_steps = 8,
    learning_rate = 1e-5,
    max_steps = 500,
    num_generations = 4,  # Generate 4 responses per prompt
    optim = "adamw_8bit",
)

# Create trainer
trainer = GRPOTrainer(
    model = model,
    args = args,
    train_dataset = dataset,
    tokenizer = tokenizer,
    reward_fn = reward_fn,
)

trainer.train()
"""

IN_DOCUMENT: dict[str, tuple[str, ...]] = {
    "000_*.txt": (
        QUICK_START, LONGER_BY_TOKENS, LONGER_BY_TOKENS_TRIED, LONGER_BY_CHARACTERS,
        LONGER_BY_CHARACTERS_TRIED, FORMAT, FORMAT_TRIED, REFERENCE, REFERENCE_TRIED, MULTI_TASK, ASYNCHRONOUS, LOGGING,
        PASSED_ALONE, PASSED_IN_A_LIST, TOOLS, ENVIRONMENT,
    ),
    "002_*.txt": (QUICK_START,),
    "004_*.txt": (OTHER_SPELLINGS,),
}  # fmt: skip


def try_out(session: str, namespace: dict[str, Any]) -> int:
    """Run an interactive session of a document; the number of its lines. Fails where the output is another."""
    examples = doctest.DocTestParser().get_doctest(session, namespace, "sample", None, None)
    results = doctest.DocTestRunner(verbose=False).run(examples)
    assert results.failed == 0
    return results.attempted


def steps_of(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """The log events of the optimizer steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("document", IN_DOCUMENT)
def test_the_samples_are_those_of_the_documents(document: str, shared: Path) -> None:
    (path,) = (shared / "reference" / "seeds").glob(document)
    text = path.read_text(encoding="utf-8")
    for sample in IN_DOCUMENT[document]:
        assert sample.strip("\n") in text


def test_quick_start(hub: Path, run: Any) -> None:
    pytest.importorskip("math_verify")
    trainer = run(QUICK_START)["trainer"]
    assert trainer.args.output_dir == "Qwen2-0.5B-Instruct-GRPO"
    # One prompt with its 8 completions a step, four of them in the data set: one epoch.
    assert trainer.state.global_step == 4
    assert trainer.state.epoch == 1.0
    # A random model's six characters are never the answer.
    assert [step["rewards/accuracy_reward/mean"] for step in steps_of(trainer)] == [0.0] * 4
    assert [step["reward"] for step in steps_of(trainer)] == [0.0] * 4


@pytest.mark.slow
def test_quick_start_under_accelerate_launch(hub: Path, make_model: Any, run: Any) -> None:
    pytest.importorskip("math_verify")
    # Here nothing is patched: the ids are local folders of those names, and the script takes all defaults. A short
    # context keeps the default of 256 tokens affordable.
    make_model(max_position_embeddings=48).save_pretrained(hub / "Qwen" / "Qwen2-0.5B-Instruct")
    (hub / "trl-lib" / "DeepMath-103K").mkdir(parents=True)
    row = '{"prompt": [{"role": "user", "content": "What is 1+1?"}], "solution": "$2$"}\n'
    (hub / "trl-lib" / "DeepMath-103K" / "train.jsonl").write_text(row)
    (hub / "train_grpo.py").write_text(QUICK_START.replace("from trl", "from groupgrad"))
    environment = {**os.environ, "HF_HOME": str(hub / "home"), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "train_grpo.py"]
    ended = subprocess.run(command, check=False, cwd=hub, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    # One row, three epochs, the last step is saved.
    saved = hub / "Qwen2-0.5B-Instruct-GRPO" / "checkpoint-3"
    assert (saved / "model.safetensors").is_file()


def test_longer_by_tokens(run: Any, rest: Any) -> None:
    assert try_out(LONGER_BY_CHARACTERS_TRIED, run(LONGER_BY_CHARACTERS)) == 4
    namespace = run(LONGER_BY_TOKENS)
    assert try_out(LONGER_BY_TOKENS_TRIED, namespace) == 4
    trainer = run(PASSED_ALONE, reward_func=namespace["reward_func"], rest=rest())["trainer"]
    trainer.train()
    steps = steps_of(trainer)
    assert len(steps) == 4
    for step in steps:
        assert step["rewards/reward_func/mean"] == pytest.approx(step["completions/mean_length"])
        assert step["reward"] == step["rewards/reward_func/mean"]


def test_format(run: Any, rest: Any) -> None:
    sample, session = FORMAT, FORMAT_TRIED
    for lost, restored in TAGS_BACK:
        assert lost in sample + session
        sample, session = sample.replace(lost, restored), session.replace(lost, restored)
    function = run(sample)["format_reward_func"]
    assert try_out(session, {"format_reward_func": function}) == 3
    messages = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{a}+1?"}]} for a in range(4)])
    trainer = run(PASSED_ALONE, reward_func=function, rest=rest(train_dataset=messages))["trainer"]
    trainer.train()
    assert [step["rewards/format_reward_func/mean"] for step in steps_of(trainer)] == [0.0] * 4


def test_reference(run: Any) -> None:
    assert try_out(REFERENCE_TRIED, run(REFERENCE)) == 4


def test_multi_task(run: Any) -> None:
    seen: list[str] = []

    def check_math_solution(prompt: str, completion: str) -> bool:
        seen.append(prompt)
        return len(seen) % 2 == 0

    trainer = run(MULTI_TASK, check_math_solution=check_math_solution, test_code_solution=None)["trainer"]
    steps = steps_of(trainer)
    assert sorted(set(seen)) == ["What is 2+2?", "What is 3*4?"]
    assert len(seen) == 16
    # Its `task` column says "code" and its function asks for "coding": no function scores those rows.
    scored = [step for step in steps if step.get("rewards/math_reward_func/mean") is not None]
    assert [step["rewards/math_reward_func/mean"] for step in scored] == [0.0, 0.0]
    assert [step["rewards/math_reward_func/std"] for step in scored] == pytest.approx([(8 / 7) ** 0.5] * 2)
    assert all(step["grad_norm"] > 0 for step in scored)
    unscored = [step for step in steps if step not in scored]
    assert len(unscored) == 2
    assert [step["grad_norm"] for step in unscored] == [0.0, 0.0]
    assert all(step.get("rewards/coding_reward_func/mean") is None for step in steps)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, -1.0]])
def test_asynchronous_and_synchronous_in_one_list(weights: list[float] | None, run: Any, rest: Any) -> None:
    functions = {
        "reward_func": run(LONGER_BY_TOKENS)["reward_func"],
        "async_reward_func1": run(ASYNCHRONOUS)["async_reward_func"],
        "async_reward_func2": run(ASYNCHRONOUS)["async_reward_func"],
    }
    args = GRPOConfig(output_dir="out", reward_weights=weights)
    trainer = run(PASSED_IN_A_LIST, rest=rest(args=args), **functions)["trainer"]
    trainer.train()
    for step in steps_of(trainer):
        # Two functions of one name have keys of their own, and the reward is the weighted sum of all three.
        names = ("reward_func", "async_reward_func", "async_reward_func_2")
        parts = [step[f"rewards/{name}/mean"] for name in names]
        assert parts[1] == parts[2]
        expected = sum(weight * part for weight, part in zip(weights or [1.0] * 3, parts))
        assert step["reward"] == pytest.approx(expected)


def test_extra_columns_and_metrics(capsys: pytest.CaptureFixture[str], run: Any, rest: Any) -> None:
    args = GRPOConfig(output_dir="out", log_completions=True, num_completions_to_print=1)
    trainer = run(PASSED_ALONE, reward_func=run(LOGGING)["reward_func"], rest=rest(args=args))["trainer"]
    trainer.train()
    assert [step["accuracy"] for step in steps_of(trainer)] == [0.0] * 4
    files = sorted(Path("out/completions").glob("*.parquet"))
    assert len(files) == 4
    rows = [row for file in files for row in Dataset.from_parquet(str(file), cache_dir="cache").to_list()]
    assert len(rows) == 32
    assert {row["extracted_answer"] for row in rows} == {"[none]"}
    for row in rows:
        assert row["golden_answer"] == str(int(row["prompt"].split("+")[0]) + 1)


@pytest.fixture
def given(make_model: Any, make_tokenizer: Any) -> dict[str, Any]:
    """Variables that the other-spellings sample uses without defining them."""
    dataset = Dataset.from_list([{"prompt": f"{a}+1=", "answer": str(a)} for a in range(4)])
    return {"model": make_model(), "tokenizer": make_tokenizer(), "dataset": dataset}


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw_torch"])
def test_other_spellings(optim: str, given: dict[str, Any], run: Any) -> None:
    """As written, and with an optimizer that needs no package of its own."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    trainer = run(OTHER_SPELLINGS.replace("adamw_8bit", optim), **given)["trainer"]
    steps = steps_of(trainer)
    assert trainer.processing_class is given["tokenizer"]
    assert trainer.args.num_generations == 4
    assert trainer.args.max_steps == len(steps) == 4
    # Two prompts a step of eight completions, so four steps are two epochs of four prompts.
    assert trainer.state.epoch == 2.0
    assert steps[0]["learning_rate"] == pytest.approx(1e-5)
    assert all(0.0 <= step["rewards/reward_fn/mean"] <= 1.0 for step in steps)
    assert any(step["rewards/reward_fn/mean"] > 0.0 for step in steps)


def test_an_optimizer_whose_package_is_missing(
    given: dict[str, Any], unsampled: None, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    with pytest.raises(ImportError, match="pip install -U bitsandbytes"):
        run(OTHER_SPELLINGS, **given)


# --- agents ---


@pytest.fixture
def with_template(hub: Path, make_tokenizer: Any, make_model: Any) -> Path:
    """The documents' model with a template for tools, and a context that holds their descriptions."""
    make_model(max_position_embeddings=2048).save_pretrained(hub / "Qwen/Qwen3-0.6B")
    with_tools(make_tokenizer()).save_pretrained(hub / "Qwen/Qwen3-0.6B")
    return hub


def test_tools_as_written(with_template: Path, calling: Any, run: Any) -> None:
    """Both tools are called, the plain and the async one, and their results reach the reward function."""
    calling(lambda n: call("multiply", a=n, b=3) + call("async_add", a=n, b=3))
    seen: list[Any] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(messages[1]["content"]) for messages in completions]

    rest = {
        "model": "Qwen/Qwen3-0.6B",
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}*3?"}]} for i in range(8)]),
        "args": GRPOConfig("out", max_completion_length=300),
    }
    trainer = run(TOOLS, rest=rest)["trainer"]
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] == 2.0
    assert log["tools/failure_frequency"] == 0.0
    assert log["rollouts/turns"] == 2.0
    assert "rollouts/tool_budget" in log and "rollouts/tool_limit" not in log
    for messages in seen:
        assert [m["role"] for m in messages] == ["assistant", "tool", "tool", "assistant"]
        a = messages[0]["tool_calls"][0]["function"]["arguments"]["a"]
        assert [m["content"] for m in messages[1:3]] == [str(a * 3), str(a + 3)]


def test_environments_as_written(with_template: Path, calling: Any, run: Any) -> None:
    """The reward is the counter that the model's calls increment; the observation is in the prompt."""
    engine = calling(lambda n: call("increment", step=n))
    trainer = run(ENVIRONMENT.replace("GRPOConfig(chat", "GRPOConfig(max_completion_length=300, chat"))["trainer"]
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    first = [request for request in engine.asked if "<tool>" not in engine.tokenizer.decode(request.prompt_ids)]
    assert len(logs) == 4
    numbers = [int(hashlib.sha256(str(r.seed).encode()).hexdigest(), 16) % 5 for r in first[:8]]
    assert logs[0]["reward"] == pytest.approx(sum(numbers) / 8)
    assert logs[0]["tools/increment/call_frequency"] == 1.0
    assert all("Counter reset to 0." in engine.tokenizer.decode(request.prompt_ids) for request in first)


@pytest.mark.slow
def test_environments_as_written_with_the_real_tokenizer(hub: Path, shared: Path, run: Any) -> None:
    """Nothing is scripted: the template of Qwen3 and the engine that samples from the model."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "data" / "qwen3-tokenizer")
    tokenizer.save_pretrained(hub / "Qwen/Qwen3-0.6B")
    torch.manual_seed(0)
    config = Qwen3Config(**{**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 32768})
    Qwen3ForCausalLM(config).save_pretrained(hub / "Qwen/Qwen3-0.6B")
    trainer = run(ENVIRONMENT.replace("GRPOConfig(", "GRPOConfig(max_steps=1, "))["trainer"]
    assert trainer.state.global_step == 1
    assert trainer.execution.engine_choice.name == "native"
    (log, *_) = trainer.state.log_history
    assert log["tools/call_frequency"] == 0.0
    assert log["rollouts/turns"] == 1.0
    assert log["sampling/logp_mismatch"] < 1e-5
