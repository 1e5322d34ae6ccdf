"""The runs that `test_processes.py` makes on one process and on two."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback

from groupgrad import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import base_fixtures as BASE
import small_runs as HELP
from rank_cases import CASES, LOSSES, PAIRS, few_vary, loss_settings  # noqa: F401  # other scripts take them from here


def make_scorer() -> Any:
    """A random reward model that reads 8 tokens."""
    return HELP.make_scorer(max_position_embeddings=8)


class Tally:
    """An environment with an initial message for each row and its own reward."""

    def reset(self, row: int, **columns: Any) -> str:
        self.total = row
        return f" {row}"

    def add(self, number: int) -> int:
        """Adds a number.

        Args:
            number: What to add.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total % 5)


def first_model(hybrid: str | None = None) -> Any:
    """Builds the initial policy of most cases, or a hybrid model of this family."""
    if hybrid is not None:
        from tiny_hybrids import make_hybrid

        return make_hybrid(hybrid, vocab_size=len(BASE.make_tokenizer()))
    model = BASE.make_model(0, initializer_range=0.15)
    model.generation_config.eos_token_id = HELP.EOS
    return model


def build(name: str, out: Path, **changes: Any) -> GRPOTrainer:
    """The case's trainer for as many processes as there are: rows of steps and generation batches stay the same."""
    settings = {"step_rows": 16, "micro_batches": 2, **CASES.get(name, {}), **changes}
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    accumulation = settings.pop("micro_batches")
    if (
        settings.get("loss_type") == "bnpo"
    ):  # it is defined by the micro-batch: the same rows on any number of processes
        accumulation = max(1, accumulation // ranks)
    rows = settings.pop("step_rows") // accumulation // ranks
    settings.pop("resume_from", None)
    reward = settings.pop("reward", HELP.letters_reward)
    extra: dict[str, Any] = {}
    if reward == "model":
        reward, extra["reward_processing_classes"] = make_scorer(), BASE.make_tokenizer()
    if settings.pop("peft", False):
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=True)
    if settings.pop("eval", None):
        extra["eval_dataset"] = {"five": HELP.prompts(5), "one": HELP.prompts(1)}
        settings |= {"eval_strategy": "steps", "num_generations_eval": 1, "per_device_eval_batch_size": 4 // ranks}
    tokenizer, dataset = BASE.make_tokenizer(), HELP.prompts()
    if settings.pop("agents", False):
        from repeatable_runs import read_call
        from scripted_agents import with_tools

        tokenizer = with_tools(tokenizer)
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
        extra |= {"environment_factory": Tally, "response_parser": read_call}
    torch.manual_seed(0)
    model = settings.pop("model", None) or first_model(settings.pop("hybrid", None))
    if settings.pop("images", False):
        import tiny_vlms

        built = tiny_vlms.build("qwen2_vl")
        model, tokenizer = built.model, built.processor
        dataset = Dataset.from_list(
            [
                {"prompt": tiny_vlms.question(f"what {i}", 0), "images": [tiny_vlms.make_image("red")] * (i % 4 == 0)}
                for i in range(16)
            ]
        )
        model.generation_config.eos_token_id = HELP.EOS
    config: dict[str, Any] = {
        **HELP.SETTINGS,
        "output_dir": str(out / "run" / name),
        "ddp_backend": "gloo" if ranks > 1 else None,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": accumulation,
        **settings,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=dataset,
        processing_class=tokenizer,
        **extra,
    )


class StepCosts(TrainerCallback):
    """Notes the cost of this rank's rows of each step."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self.costs: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.costs.append(sum(micro_batch.cost for micro_batch in self._trainer._micro_batches))


def run(name: str, out: Path) -> dict[str, Any]:
    """Trains one case to its end and returns weights, log, stored completions and the cost of each step."""
    trainer = build(name, out)
    costs = StepCosts(trainer)
    trainer.add_callback(costs)
    trainer.train()
    if "resume_from" in CASES[name]:
        straight = HELP.weights(trainer.model), trainer.state.log_history
        trainer = build(name, out)
        trainer.train(str(out / "run" / name / f"checkpoint-{CASES[name]['resume_from']}"))
        assert torch.equal(HELP.weights(trainer.model), straight[0])
        assert HELP.without_times(trainer.state.log_history)[:-1] == HELP.without_times(straight[1])[:-1]
    return {
        "weights": HELP.weights(trainer.model),
        "log": HELP.without_times(trainer.state.log_history),
        "costs": costs.costs,
    }


def fail_on_last_rank(out: Path) -> dict[str, Any]:
    """Runs a reward function that raises on one rank in the second generation batch; returns each rank's error."""

    def reward(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step == 1 and int(os.environ.get("RANK", "0")) == 1:
            raise ZeroDivisionError("the judge is out")
        return [float(len(completion)) for completion in completions]

    try:
        build("failing", out, reward=reward).train()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def spoil_one_loss(out: Path) -> dict[str, Any]:
    """Makes the loss of the second step NaN on one rank, without a gradient that shows it."""
    trainer = build("failing", out, max_steps=2)
    batch_loss = trainer.batch_loss

    def spoilt(model: Any, batch: Any, **kwargs: Any) -> Any:
        result = batch_loss(model, batch, **kwargs)
        is_bad = trainer.state.global_step == 1 and int(os.environ.get("RANK", "0")) == 1
        return type(result)(result.loss + float("nan") if is_bad else result.loss, result.metrics)

    trainer.batch_loss = spoilt
    trainer.train()
    skipped = trainer.finite_steps.num_skipped
    return {"weights": HELP.weights(trainer.model), "skipped": skipped, "step": trainer.state.global_step}


class FullDisk(TrainerCallback):
    """Lets rank 1 write no file of more than 100 bytes at step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        is_full = state.global_step == 2 and os.environ["RANK"] == "1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_full else hard, hard))


def refuse_a_save(out: Path) -> dict[str, Any]:
    """Runs three steps, of which rank 1 cannot save the second; returns the checkpoints."""
    trainer = build("full", out, save_strategy="steps", save_steps=1, step_rows=8)
    trainer.add_callback(FullDisk())
    trainer.train()
    return {
        "found": sorted(path.name for path in (out / "run" / "full").iterdir() if path.name[0] != "."),
        "weights": HELP.weights(trainer.model),
    }


def go_on(out: Path, checkpoint: Path) -> dict[str, Any]:
    """Continues the run of `checkpoint` to its end."""
    trainer = build("resumed", out, save_strategy="no")
    trainer.train(str(checkpoint))
    return {"weights": HELP.weights(trainer.model), "log": HELP.without_times(trainer.state.log_history)}


TROUBLE = {"full": refuse_a_save, "failing": fail_on_last_rank, "nonfinite": spoil_one_loss}
"""Runs of two processes in which something fails on one of them."""
