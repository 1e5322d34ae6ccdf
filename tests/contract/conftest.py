"""Small local stand-ins for the models and data sets that the documents' scripts name."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset
from scripted_agents import EOS, with_tools
from small_runs import SETTINGS

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.engines.selection import EngineChoice
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.trainer import build as trainer_build

MODEL_IDS = ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-72B")

MATH_ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {a}+{a}?"}], "solution": f"${2 * a}$"} for a in range(1, 5)
]

AFFORDABLE: dict[str, Any] = {"max_completion_length": 6, "use_cpu": True, "save_strategy": "no", "logging_steps": 1}
"""Defaults that a test run can pay for; what a script sets itself stays as it is."""
MAX_STEPS = 4


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_model: Any, make_tokenizer: Any) -> Path:
    """A working directory in which the documents' model and data-set ids are small local things."""
    for name in MODEL_IDS:
        make_model().save_pretrained(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)

    def load_dataset(path: str, *args: Any, split: str) -> Dataset:
        assert (path, args, split) == ("trl-lib/DeepMath-103K", (), "train")
        return Dataset.from_list(MATH_ROWS)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return tmp_path


@pytest.fixture
def affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations made from here on default to small settings and stop after four steps."""
    original = GRPOConfig.__init__

    def init(self: GRPOConfig, *args: Any, **kwargs: Any) -> None:
        steps = kwargs.get("max_steps", -1)
        small = {**AFFORDABLE, **kwargs, "max_steps": MAX_STEPS if steps < 0 else min(steps, MAX_STEPS)}
        original(self, *args, **small)

    monkeypatch.setattr(GRPOConfig, "__init__", init)


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if anything is sampled."""
    calls: list[int] = []
    monkeypatch.setattr(TransformersEngine, "sample", lambda self, requests, options: calls.append(len(requests)))
    yield
    assert calls == [], f"{sum(calls)} completions were sampled"


@pytest.fixture
def make_trainer(tmp_path: Path, make_model: Any, make_tokenizer: Any) -> Callable[..., GRPOTrainer]:
    """A trainer on four text prompts, by default; keywords of the configuration and of the trainer change it."""

    def make(config: dict[str, Any] | None = None, **arguments: Any) -> GRPOTrainer:
        settings = {
            **{name: value for name, value in SETTINGS.items() if name not in ("learning_rate", "lr_scheduler_type")},
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 4,
            "max_steps": 1,
            "disable_tqdm": True,
        }
        defaults: dict[str, Any] = {
            "reward_funcs": checksum,
            "train_dataset": Dataset.from_list([{"prompt": f"{a}+1="} for a in range(4)]),
        }
        if "args" not in arguments:
            arguments["args"] = GRPOConfig(**{**settings, **(config or {})})
        if "model" not in arguments:
            arguments["model"] = make_model()
            arguments.setdefault("processing_class", make_tokenizer())
        return GRPOTrainer(**{**defaults, **arguments})

    return make


def checksum(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs between texts."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.fixture(name="checksum")
def _checksum() -> Callable[..., list[float]]:
    return checksum


def run_sample(sample: str, **names: Any) -> dict[str, Any]:
    """The namespace after running a document's sample as a script, with `names` given."""
    code = inspect.cleandoc("\n" + sample).replace("from trl", "from groupgrad").replace("    ...,", "    **rest,")
    namespace = {"__name__": "__main__", "__annotations__": {}, **names}
    exec(compile(code, "sample.py", "exec"), namespace)
    return namespace


@pytest.fixture(name="run")
def _run() -> Callable[..., dict[str, Any]]:
    return run_sample


@pytest.fixture
def rest() -> Callable[..., dict[str, Any]]:
    """Makes the arguments that the `...` of a document's constructor call stands for."""

    def make(**changes: Any) -> dict[str, Any]:
        dataset = Dataset.from_list([{"prompt": f"{a}+1=", "ground_truth": str(a + 1)} for a in range(4)])
        return {"model": "Qwen/Qwen2-0.5B-Instruct", "train_dataset": dataset, **changes}

    return make


# --- agents ---


class CallingEngine(BatchEngine):
    """Calls a tool in the first `num_calls` turns, with a number that depends on the seed, then answers."""

    def __init__(self, tokenizer: Any, text: Callable[[int], str], num_calls: int):
        self.tokenizer, self._text, self._num_calls = tokenizer, text, num_calls
        self.asked: list[Request] = []
        self.rows_of_calls: list[int] = []

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        self.asked += requests
        self.rows_of_calls.append(len(requests))
        return [self._sample(request) for request in requests]

    def _sample(self, request: Request) -> Sample:
        num_replies = self.tokenizer.decode(request.prompt_ids).count("<tool>")
        number = int(hashlib.sha256(str(request.seed).encode()).hexdigest(), 16) % 5
        text = self._text(number) if num_replies < self._num_calls else "done"
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], EOS]
        return Sample(ids, "eos", [-0.5] * len(ids), [0.25] * len(ids))


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Trainers made from here on sample by this engine."""

    def use(engine: Any) -> None:
        monkeypatch.setattr(trainer_build, "choose_engine", lambda *a, **k: EngineChoice(engine, "given", "a test"))

    return use


@pytest.fixture
def calling(use_engine: Any, make_tokenizer: Any) -> Callable[..., CallingEngine]:
    """`calling(text, num_calls=1)`: the engine of the trainers made from here on, which calls tools."""

    def put(text: Callable[[int], str], num_calls: int = 1) -> CallingEngine:
        engine = CallingEngine(with_tools(make_tokenizer()), text, num_calls)
        use_engine(engine)
        return engine

    return put


@pytest.fixture
def make_agents(make_trainer: Any, make_model: Any, tokenizer: Any) -> Callable[..., GRPOTrainer]:
    """`make_trainer` on conversations, with room for descriptions of tools and four completions a prompt."""

    def make(config: dict[str, Any] | None = None, **arguments: Any) -> GRPOTrainer:
        settings = {
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 200,
            "log_completions": True,
            "num_completions_to_print": 0,
        }
        rows = [{"prompt": [{"role": "user", "content": f"Increment by {i}."}]} for i in range(1, 9)]
        defaults: dict[str, Any] = {
            "model": make_model(max_position_embeddings=2048),
            "processing_class": with_tools(tokenizer),
            "train_dataset": Dataset.from_list(rows),
            "reward_funcs": None,
        }
        return make_trainer({**settings, **(config or {})}, **{**defaults, **arguments})

    return make


@pytest.fixture
def train_agents(make_agents: Any) -> Callable[..., tuple[GRPOTrainer, dict[str, float]]]:
    """`train_agents(config, **arguments)`: such a trainer that has trained, and the log of its first step."""

    def train(config: dict[str, Any] | None = None, **arguments: Any) -> tuple[GRPOTrainer, dict[str, float]]:
        trainer = make_agents(config, **arguments)
        trainer.train()
        return trainer, trainer.state.log_history[0]

    return train
