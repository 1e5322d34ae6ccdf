"""Arguments and inputs that the trainer refuses before it samples: the message has the value seen and what to set."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from base_fixtures import SIZES
from datasets import Dataset, DatasetDict
from torch import nn
from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import ConfigError, UnavailableError
from groupgrad.trainer.constructor_arguments import use_one_device

MakeTrainer = Callable[..., GRPOTrainer]
Arguments = dict[str, Any] | Callable[[Any, Any], dict[str, Any]]
"""Arguments of the trainer, or a function that makes them beside a tokenizer and a model."""
Table = dict[type[Exception], list[tuple[Arguments, str]]]
"""For each type of error: arguments, and a pattern of its text with the value seen and what to set."""
SMALL = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False}
MESSAGES = [{"role": "user", "content": "hello"}]
T5 = T5Config(vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
QWEN = Qwen3Config(**{**SIZES, "vocab_size": 200})
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
BEST = {**EVALUATED, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}


def rows(number: int = 4, **columns: Any) -> Dataset:
    """A data set of short prompts with further columns, the same in each row."""
    return Dataset.from_list([{"prompt": f"{a}+1=", **columns} for a in range(number)])


def prompts(*values: Any) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_list([{"prompt": value} for value in values])}


class Grader:
    """A class, passed instead of an instance."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


def no_eos(tokenizer: Any, model: Any) -> dict[str, Any]:
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return {}


def with_nan(tokenizer: Any, model: Any) -> dict[str, Any]:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :2] = torch.nan
    return {}


def with_raising_template(tokenizer: Any, model: Any) -> dict[str, Any]:
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    return prompts(*([{"role": "user", "content": text}] for text in "aab"))


def with_optimizer(parameters: Callable[[Any], list[Any]]) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda tokenizer, model: {"optimizers": (torch.optim.SGD(parameters(model), lr=0.1), None)}


def frozen(model: Any) -> list[Any]:
    return [model.lm_head.weight.requires_grad_(False)]


def model_of(make: Callable[[], Any]) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda tokenizer, model: {"model": make()}


BAD: Table = {
    OSError: [
        ({"model": "no/such-model"}, "model='no/such-model' cannot be loaded"),
        (
            {"reward_funcs": "accuracy"},
            "reward_funcs has 'accuracy'.* sequence-classification model.*give the function itself",
        ),
    ],
    TypeError: [
        ({"model": 7}, "model is a int.*a model id, a directory"),
        ({"model": Qwen3ForCausalLM}, "model is a type.*a model id, a directory"),
        ({"reward_funcs": [3.5]}, "3.5.*give functions"),
        (
            {"args": TrainingArguments(output_dir="out", use_cpu=True)},
            "args is a TrainingArguments.*groupgrad.GRPOConfig",
        ),
        ({"train_dataset": [{"prompt": "a"}]}, "train_dataset is a list.*Dataset.from_list"),
        (
            {"train_dataset": DatasetDict({"train": rows(), "test": rows()})},
            r"train_dataset is a DatasetDict.*such as dataset\['train'\]",
        ),
        ({"processing_class": "Qwen/Qwen3-0.6B"}, "processing_class is a str.*AutoTokenizer.from_pretrained"),
        ({"peft_config": {"r": 8}}, "peft_config is a dict.*peft.LoraConfig"),
        (
            model_of(lambda: Qwen3ForSequenceClassification(QWEN)),
            "model is a Qwen3ForSequenceClassification.*AutoModelForCausalLM",
        ),
        (model_of(lambda: Qwen3Model(QWEN)), "Qwen3Model, which has no output head.*AutoModelForCausalLM"),
        (model_of(lambda: nn.Linear(2, 2)), "model is a Linear, which is no language model.*AutoModelForCausalLM"),
    ],
    ValueError: [
        ({"model": "./nowhere"}, "model='./nowhere': there is no such.*set it to"),
        ({"reward_funcs": None}, "no reward source.*give a reward function"),
        ({"reward_fn": print}, "reward_funcs and reward_fn.*put all of them into reward_funcs"),
        ({"train_dataset": None}, "train_dataset is None.*give a data set"),
        ({"train_dataset": rows(1)}, "train_dataset has 1 rows.*lower generation_batch_size"),
        ({"train_dataset": Dataset.from_list([{"question": "1+1?"}] * 4)}, "question.*rename_column"),
        (
            {"eval_dataset": {"a": rows(), "b": rows().rename_column("prompt", "text")}},
            r"eval_dataset\['b'\] has the columns \['text'\].*rename_column",
        ),
        (no_eos, "end-of-sequence.*set tokenizer.eos_token"),
        (lambda t, m: {"processing_class": None}, "processing_class is None.*pass the tokenizer"),
        (
            {"config": {"reward_weights": [1.0, 2.0]}},
            r"2 entries \(\[1.0, 2.0\]\).*1 reward functions.*one weight for each",
        ),
        (
            {"config": {"max_steps": -1}, "train_dataset": rows().to_iterable_dataset()},
            "max_steps is -1.*set max_steps",
        ),
        ({"config": {"router_aux_loss_coef": 0.1}}, "router_aux_loss_coef=0.1.*set it to 0"),
        (
            {"train_dataset": None, "environment_factory": {"a": Grader, "b": Grader}},
            "train_dataset is None and environment_factory names 2.*column 'environment'",
        ),
        (
            {"config": BEST, "eval_dataset": {"easy": rows(2), "hard": rows(2)}},
            "metric_for_best_model='loss' is looked for as 'eval_loss'.*set it to 'eval_easy_loss'",
        ),
        (
            with_nan,
            r"2 of \d+ numbers of the model's model\.layers\.0\.mlp\.up_proj\.weight are NaN.*load a checkpoint",
        ),
        (with_raising_template, "row 2 of train_dataset: the chat template cannot render .*no b.*chat_template"),
        (
            with_optimizer(lambda model: list(Qwen3ForCausalLM(QWEN).parameters())),
            "of the optimizer's .* parameters are not the model's.*from the parameters of the very model",
        ),
        (with_optimizer(frozen), "none of the optimizer's 1 parameters is trained.*trainable parameters"),
        ({"train_dataset": rows(completions="x")}, "train_dataset has the column 'completions'.*rename_column"),
        (
            {"reward_funcs": lambda completions, solution, **kwargs: [0.0] * len(completions)},
            "'<lambda>' requires the argument 'solution', and train_dataset has no such column.*add the column",
        ),
        (
            {
                "reward_funcs": lambda completions, solution: [0.0] * len(completions),
                "train_dataset": rows(solution="1"),
                "eval_dataset": {"easy": rows(solution="1"), "hard": rows()},
            },
            r"'solution', and eval_dataset\['hard'\] has no such column.*give the argument a default",
        ),
        (
            {"reward_funcs": "./nowhere"},
            "reward_funcs has './nowhere'.* there is no such folder.*give the function itself",
        ),
    ],
    UnavailableError: [
        (
            model_of(lambda: T5ForConditionalGeneration(T5)),
            "T5ForConditionalGeneration is an encoder-decoder.*decoder-only",
        ),
    ],
    ConfigError: [
        ({"num_generations": 3}, "num_generations=3.*num_generations to"),
    ],
}


def cases(table: Table) -> list[Any]:
    return [pytest.param(given, error, text, id=text) for error, part in table.items() for given, text in part]


def assert_refused(action: Callable[[], Any], error_type: type[Exception], pattern: str) -> None:
    with pytest.raises(error_type) as error:
        action()
    text = " ".join(str(error.value).split())
    assert re.search(pattern, text), text


@pytest.mark.parametrize(("given", "error", "text"), cases(BAD))
def test_bad_arguments(
    given: Any, error: Any, text: str, make_trainer: MakeTrainer, tokenizer: Any, model: Any, unsampled: None
) -> None:
    parts = {"model": model, "processing_class": tokenizer}
    arguments = {**parts, **given(tokenizer, model)} if callable(given) else given
    assert_refused(lambda: make_trainer(**arguments), error, text)


BAD_SETTINGS: Table = {
    ValueError: [
        (
            {"model_init_kwargs": {"load_in_4bit": True}},
            "cannot be loaded with model_init_kwargs={'load_in_4bit': True}.*unexpected keyword argument",
        ),
        ({"report_to": "tensorbord"}, "tensorbord is not supported.*only .*tensorboard.* are supported"),
    ],
    RuntimeError: [
        ({"report_to": ["clearml"]}, "ClearMLCallback requires 'clearml' to be installed.*pip install clearml"),
    ],
}


@pytest.mark.parametrize(("settings", "error", "text"), cases(BAD_SETTINGS))
def test_bad_settings_of_a_model_on_disk(
    settings: Any, error: Any, text: str, make_trainer: MakeTrainer, model_dir: Path, unsampled: None
) -> None:
    assert_refused(lambda: make_trainer(settings, model=str(model_dir)), error, text)


def test_a_best_metric_that_a_reward_function_may_log(make_trainer: MakeTrainer) -> None:
    """A name that the trainer does not know is doubtful; its own and a user's work."""

    def reward(completions: list[str], log_metric: Any, **kwargs: Any) -> list[float]:
        log_metric("share", len(set(completions)) / len(completions))
        return [float(len(text)) for text in completions]

    with pytest.warns(UserWarning, match="metric_for_best_model='share' is no metric that the trainer measures"):
        trainer = make_trainer({**BEST, "metric_for_best_model": "share"}, eval_dataset=rows(2), reward_funcs=reward)
    trainer.train()
    assert trainer.state.best_metric == trainer.state.log_history[-2]["eval_share"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named = {"a": rows(2), "a_b": rows(2)}
        known = [("rewards/checksum/std", rows(2)), ("eval_a_b_reward", named), ("eval_a_b_pass@2", named)]
        for name, sets in [*known, ("maj@2_low", rows(2)), ("reward_low", rows(2)), ("reward/level=3", rows(2))]:
            make_trainer({**BEST, "metric_for_best_model": name}, eval_dataset=sets)


def test_one_process_with_several_gpus_trains_on_one_and_says_so(make_trainer: MakeTrainer, caplog: Any) -> None:
    args = GRPOConfig(output_dir="out", num_generations=4, **SMALL)
    args._n_gpu = 3
    trainer = make_trainer(args=args)
    assert trainer.args.n_gpu == 1
    assert "this process sees 3 GPUs and trains on one" in caplog.text
    assert "--num-processes all" in caplog.text


def test_a_model_spread_over_several_gpus_stays_so(caplog: Any) -> None:
    args = GRPOConfig(output_dir="out", num_generations=4, **SMALL)
    args._n_gpu = 2
    use_one_device(args, SimpleNamespace(hf_device_map={"model.embed_tokens": 0, "lm_head": 1}))
    assert args.n_gpu == 1 and not caplog.text


def test_a_bad_argument_leaves_the_callers_objects_alone(make_trainer: MakeTrainer, tokenizer: Any, model: Any) -> None:
    settings = {"dtype": "float32"}
    with pytest.raises(ValueError, match="no rows"):
        make_trainer(
            {"model_init_kwargs": settings, "reward_weights": [1.0]},
            train_dataset=Dataset.from_dict({"prompt": []}),
            model=model,
            processing_class=tokenizer,
        )
    assert settings == {"dtype": "float32"}


def test_a_special_token_beyond_the_embeddings_is_allowed_unless_the_template_writes_it(
    make_trainer: MakeTrainer, tokenizer: Any, model: Any
) -> None:
    """As Gemma 3 without images has the placeholder of an image."""
    missing = model.get_input_embeddings().num_embeddings - len(tokenizer)
    tokenizer.add_tokens([f"<new{i}>" for i in range(missing)])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    make_trainer(model=model, processing_class=tokenizer)
    data = Dataset.from_list([{"prompt": "a<image_soft_token>b"}] * 2)
    trainer = make_trainer(model=model, processing_class=tokenizer, train_dataset=data)
    with pytest.raises(ValueError, match=r"a prompt has the token \d+, but the model's embeddings have"):
        trainer.train()
    tokenizer.chat_template = "<image_soft_token>"
    refusal = r"tokenizer has \d+ tokens, but the model's embeddings have \d+ rows.*resize_token_embeddings"
    with pytest.raises(ValueError, match=refusal):
        make_trainer(model=model, processing_class=tokenizer)
    tokenizer.chat_template, pad_token = None, tokenizer.pad_token
    tokenizer.pad_token = "<image_soft_token>"
    with pytest.raises(ValueError, match=refusal):
        make_trainer(model=model, processing_class=tokenizer)
    tokenizer.pad_token = pad_token
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=refusal):
        make_trainer(model=model, processing_class=tokenizer)


def test_a_template_argument_that_no_template_reads_is_named(
    make_trainer: MakeTrainer, tokenizer: Any, model: Any
) -> None:
    tokenizer.chat_template = "{% if enable_thinking %}!{% endif %}x"
    parts = {"model": model, "processing_class": tokenizer}
    with pytest.warns(UserWarning, match="enable_thinkin=False, which .* did you mean 'enable_thinking'"):
        make_trainer({"chat_template_kwargs": {"enable_thinkin": False}}, **parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer({"chat_template_kwargs": {"enable_thinking": False}}, **parts)


@pytest.mark.parametrize("deepspeed", [{"zero_optimization": {"stage": 2}}, {"zero_optimization": {"stage": 3}}])
def test_a_refused_deepspeed_setting_leaves_the_next_run_alone(
    make_tokenizer: Any, make_model: Any, tmp_path: Any, deepspeed: Any
):
    """transformers keeps the last DeepSpeed settings of a process, such as a notebook in which a cell has failed."""
    make_model().save_pretrained(tmp_path / "model")
    with pytest.raises((ImportError, ConfigError)) as refusal:  # it holds the refused settings, as a notebook does
        GRPOConfig(str(tmp_path), use_cpu=True, deepspeed=deepspeed, beta=-1)
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", per_device_train_batch_size=8)
    trainer = GRPOTrainer(
        str(tmp_path / "model"),
        lambda completions, **kwargs: [0.0] * len(completions),
        config,
        rows(),
        processing_class=make_tokenizer(),
    )
    assert trainer.state.global_step == 0
    assert refusal.value is not None
