"""Every argument of the trainer, what it accepts, and what it refuses before anything is sampled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from base_fixtures import SIZES
from datasets import Dataset
from small_runs import weights
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
)

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.run_folder.progress import ProgressCallback

MakeTrainer = Callable[..., GRPOTrainer]

# trl-behaviour: the order in which positional arguments of the documents' trainers arrive.
POSITIONAL = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes",
    "callbacks", "optimizers", "quantization_config", "peft_config", "tools", "rollout_func", "environment_factory",
)  # fmt: skip
OTHER_SPELLINGS = (
    "agent",
    "response_parser",
    "eval_reward_funcs",
    "tokenizer",
    "reward_fn",
    "reward_model",
    "num_generations",
)
SMALL = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False}


def rows(number: int = 4, **columns: Any) -> Dataset:
    return Dataset.from_list([{"prompt": f"{a}+1=", **columns} for a in range(number)])


@pytest.fixture
def judge() -> BertForSequenceClassification:
    """A sequence classifier over the small tokenizer's vocabulary."""
    torch.manual_seed(3)
    return BertForSequenceClassification(BertConfig(**{**SIZES, "vocab_size": 120, "num_labels": 1}))


@pytest.fixture
def judge_dir(tmp_path: Path, judge: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "models" / "judge"
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


# --- The signature ---


def test_order_of_the_arguments() -> None:
    parameters = inspect.signature(GRPOTrainer.__init__).parameters
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert tuple(by_position) == ("self", *POSITIONAL)
    assert tuple(p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY) == OTHER_SPELLINGS
    defaults = {name: p.default for name, p in parameters.items() if name not in ("self", "model")}
    assert defaults.pop("optimizers") == (None, None)
    assert set(defaults.values()) == {None}


def test_inherited_methods(make_trainer: MakeTrainer) -> None:
    def names(function: Any) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    methods = (
        "train", "evaluate", "save_model", "push_to_hub", "add_callback", "remove_callback", "pop_callback",
        "hyperparameter_search", "create_model_card", "log", "save_state", "is_world_process_zero",
    )  # fmt: skip
    assert issubclass(GRPOTrainer, Trainer)
    assert all(callable(getattr(GRPOTrainer, name)) for name in methods)
    assert names(GRPOTrainer.train)[:3] == ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"]
    assert names(GRPOTrainer.save_model)[0] == "output_dir"
    assert names(GRPOTrainer.push_to_hub)[:4] == ["commit_message", "blocking", "token", "revision"]
    output = make_trainer({"max_steps": 2}).train(None, None, None)
    assert output.global_step == 2
    assert isinstance(output.training_loss, float)
    assert output.metrics["train_runtime"] > 0


# --- model ---


@pytest.mark.parametrize("kind", [str, Path])
def test_model_by_directory(kind: type, model_dir: Path, make_trainer: MakeTrainer, make_model: Any) -> None:
    trainer = make_trainer(model=kind(model_dir))
    assert type(trainer.model) is Qwen3ForCausalLM
    weight = trainer.model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(weight, make_model().get_parameter("model.layers.0.self_attn.q_proj.weight"))
    assert trainer.processing_class.get_vocab() == AutoTokenizer.from_pretrained(model_dir).get_vocab()
    assert trainer.train().global_step == 1


def test_model_class_is_that_of_the_checkpoint(tmp_path: Path, make_trainer: MakeTrainer, tokenizer: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 120})).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    assert type(make_trainer(model=str(tmp_path / "llama")).model) is LlamaForCausalLM


def test_model_init_kwargs(model_dir: Path, make_trainer: MakeTrainer) -> None:
    assert make_trainer(model=str(model_dir)).model.dtype == torch.float32
    trainer = make_trainer({"model_init_kwargs": {"dtype": "bfloat16"}}, model=str(model_dir))
    assert trainer.model.dtype == torch.bfloat16
    text = '{"dtype": "bfloat16", "attn_implementation": "eager"}'
    trainer = make_trainer({"model_init_kwargs": text}, model=str(model_dir))
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config._attn_implementation == "eager"


def test_the_revision_is_that_of_model_and_tokenizer(
    model_dir: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    for loader in (AutoConfig, Qwen3ForCausalLM, AutoTokenizer):

        def load(name: str, *, loader: Any = loader, plain: Any = loader.from_pretrained, **kwargs: Any) -> Any:
            asked[loader.__name__] = kwargs.get("revision")
            return plain(name, **kwargs)

        monkeypatch.setattr(loader, "from_pretrained", load)
    make_trainer({"model_init_kwargs": {"revision": "v1"}}, model=str(model_dir))
    assert asked == dict.fromkeys(["AutoConfig", "Qwen3ForCausalLM", "AutoTokenizer"], "v1")


def test_model_object_is_used_as_it_is(model: Any, tokenizer: Any, make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match="model_init_kwargs has no effect: the model is already loaded"):
        trainer = make_trainer({"model_init_kwargs": {"dtype": "bfloat16"}}, model=model, processing_class=tokenizer)
    assert trainer.model is model
    assert model.dtype == torch.float32
    with pytest.warns(UserWarning, match="quantization_config has no effect"):
        make_trainer(model=model, processing_class=tokenizer, quantization_config=object())


def test_peft_config_wraps_the_model(tokenizer: Any, model: Any, make_trainer: MakeTrainer, lora: Any) -> None:
    trainer = make_trainer(model=model, processing_class=tokenizer, peft_config=lora)
    trainable = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trainable) == 8  # 2 layers, q and v, A and B
    assert all("lora_" in name for name in trainable)


def test_a_new_adapter_is_that_of_the_seed(
    make_trainer: MakeTrainer, make_model: Any, tokenizer: Any, lora: Any
) -> None:
    """Whatever was drawn before, on whichever rank."""
    found = []
    for drawn, seed in ((0, 1), (9, 1), (0, 2)):
        model = make_model()
        torch.manual_seed(drawn)
        policy = make_trainer({"seed": seed}, model=model, processing_class=tokenizer, peft_config=lora).model
        found.append(torch.cat([p.flatten() for name, p in policy.named_parameters() if "lora_A" in name]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# --- reward_funcs, reward_processing_classes ---


class Grader:
    """A callable object."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    def method(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [2.0] * len(completions)


async def slow(completions: list[str], **kwargs: Any) -> list[float]:
    return [4.0] * len(completions)


def scaled(completions: list[str], factor: float, **kwargs: Any) -> list[float]:
    return [factor] * len(completions)


def test_kinds_of_rewards_in_one_list(
    judge: Any, judge_dir: Path, tokenizer: Any, make_trainer: MakeTrainer, checksum: Any
) -> None:
    from functools import partial

    functions = [Grader(), Grader().method, slow, partial(scaled, factor=8.0), lambda completions, **_: [16] * 4]
    funcs = [*functions, judge_dir, judge]
    given = list(funcs)
    classes = [None] * 6 + [tokenizer]
    trainer = make_trainer(reward_funcs=funcs, reward_processing_classes=classes)
    names = ["Grader", "method", "slow", "scaled", "<lambda>", "judge", "judge_2"]
    assert trainer.rewards.names[:6] == names[:6]
    assert funcs == given
    assert classes == [None] * 6 + [tokenizer]
    trainer.train()
    (step,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    parts = [step[f"rewards/{name}/mean"] for name in trainer.rewards.names]
    assert parts[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert step["reward"] == pytest.approx(sum(parts))


def test_spellings_of_the_reward(judge_dir: Path, make_trainer: MakeTrainer, checksum: Any) -> None:
    for spelling in ("reward_funcs", "reward_fn", "reward_model"):
        assert make_trainer(**{"reward_funcs": None, spelling: checksum}).rewards.names == ["checksum"]
    trainer = make_trainer(reward_funcs=None, reward_fn=checksum, reward_model=str(judge_dir))
    assert trainer.rewards.names == ["checksum", "judge"]


# --- args ---


def test_without_args(
    model_dir: Path, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer(str(model_dir) + "/", checksum, train_dataset=rows(8))
    assert isinstance(trainer.args, GRPOConfig)
    assert trainer.args.output_dir == "model-GRPO"
    assert (trainer.args.num_generations, trainer.args.learning_rate, trainer.args.logging_steps) == (8, 1e-6, 10)
    assert trainer.args.gradient_checkpointing is (None if trainer.args.device.type == "cpu" else True)
    trainer = GRPOTrainer(model, checksum, train_dataset=rows(8), processing_class=tokenizer)
    assert trainer.args.output_dir == "Qwen3ForCausalLM-GRPO"


def test_num_generations_of_the_constructor(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path / "out"), per_device_train_batch_size=8, **SMALL)
    trainer = make_trainer(args=args, num_generations=4)
    assert trainer.args.num_generations == 4
    assert trainer.plan.prompts_per_generation == 2
    assert args.num_generations == 8  # the caller's object stays as it was


# --- data sets ---


def test_iterable_train_dataset(make_trainer: MakeTrainer) -> None:
    with pytest.warns(UserWarning, match="dataloader_num_workers=2 is not used: train_dataset is a stream"):
        trainer = make_trainer(
            {"max_steps": 3, "dataloader_num_workers": 2}, train_dataset=rows(3).to_iterable_dataset()
        )
    assert (trainer.args.dataloader_num_workers, trainer.accelerator.dispatch_batches) == (0, False)
    assert trainer.train().global_step == 3


def test_evaluation_sets_given_to_methods(make_trainer: MakeTrainer) -> None:
    """`predict` measures under names of its own."""
    trainer = make_trainer()
    evaluated, predicted = trainer.evaluate(rows(2)), trainer.predict(rows(2)).metrics
    assert {"eval_loss", "eval_reward", "eval_completions/mean_length"} <= evaluated.keys()
    assert {key.removeprefix("test_") for key in predicted} >= {key.removeprefix("eval_") for key in evaluated} - {
        "epoch"
    }
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset"):
        trainer.evaluate()
    trainer = make_trainer(eval_dataset=rows(3).to_iterable_dataset())
    assert trainer.evaluate()["eval_completions/max_length"] <= 4


# --- processing_class ---


def test_pad_falls_back_to_eos(model: Any, tokenizer: Any, make_trainer: MakeTrainer) -> None:
    tokenizer.pad_token = None
    trainer = make_trainer(model=model, processing_class=tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert model.config.pad_token_id == 1
    assert trainer.train().global_step == 1


def test_tokenizer_is_another_name(model: Any, tokenizer: Any, make_tokenizer: Any, make_trainer: MakeTrainer) -> None:
    assert make_trainer(model=model, tokenizer=tokenizer).processing_class is tokenizer
    with pytest.raises(ValueError, match="processing_class and tokenizer are given"):
        make_trainer(model=model, tokenizer=tokenizer, processing_class=make_tokenizer())


def test_tokenizers_that_the_trainer_loads(model_dir: Path, make_trainer: MakeTrainer) -> None:
    for model in (str(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)):
        trainer = make_trainer(model=model)
        assert (trainer.processing_class.padding_side, trainer.processing_class.eos_token) == ("left", "<eos>")


# --- callbacks, optimizers ---


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)


def test_callbacks(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]) -> None:
    """Those by default can be removed too."""
    ours, added, removed = Steps(), Steps(), Steps()
    given = [ours, removed]
    trainer = make_trainer({"max_steps": 2}, callbacks=given)
    assert {ours, removed} <= set(trainer.callback_handler.callbacks)
    trainer.add_callback(added)
    trainer.remove_callback(removed)
    trainer.remove_callback(ProgressCallback)
    capsys.readouterr()
    trainer.train()
    assert (ours.seen, added.seen, removed.seen) == ([1, 2], [1, 2], [])
    assert given == [ours, removed]
    assert "step 1" not in "".join(capsys.readouterr())


def test_optimizers(model: Any, tokenizer: Any, make_trainer: MakeTrainer) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = model.lm_head.weight.detach().clone()
    gradients: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            gradients.append(model.lm_head.weight.grad.clone())

    trainer = make_trainer(
        {"max_grad_norm": 0.0},
        model=model,
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
        callbacks=[Watch()],
    )
    trainer.train()
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(model.lm_head.weight, before - 0.5 * gradients[0])
    assert scheduler.get_last_lr() == [0.25]


# --- saving ---


def test_saved_models_and_checkpoints_load_with_the_auto_classes(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer({"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    folders = [tmp_path / "saved", *(tmp_path / "run" / f"checkpoint-{step}" for step in (2, 1))]
    saved, last, first = (weights(AutoModelForCausalLM.from_pretrained(folder)) for folder in folders)
    assert torch.equal(saved, weights(trainer.model)) and torch.equal(last, saved)
    assert not torch.equal(first, last)
    text = "1+1=<think> \\boxed{2}"
    for folder in folders:
        assert AutoTokenizer.from_pretrained(folder)(text) == trainer.processing_class(text)
    # and it is a policy again
    assert make_trainer(model=str(tmp_path / "saved")).train().global_step == 1
