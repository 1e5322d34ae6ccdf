"""Models, tokenizers, optimizers and data that the trainer refuses before it samples, with value, reason and remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from refusals import assert_refused, rows
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    TrainerCallback,
)
from transformers.utils import is_flash_attn_2_available

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import ConfigError

MakeTrainer = Callable[..., GRPOTrainer]
Arguments = Callable[[Any, Any], dict[str, Any]]
QWEN = Qwen3Config(
    vocab_size=200,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
)


def with_nan(tokenizer: Any, model: Any) -> dict[str, Any]:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, :2] = torch.nan
    return {"model": model, "processing_class": tokenizer}


def with_more_tokens(tokenizer: Any, model: Any) -> dict[str, Any]:
    rows_of_model = model.get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<new{i}>" for i in range(rows_of_model + 1 - len(tokenizer))])
    return {"model": model, "processing_class": tokenizer}


def with_raising_template(tokenizer: Any, model: Any) -> dict[str, Any]:
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}x"
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in "aab"])
    return {"model": model, "processing_class": tokenizer, "train_dataset": data}


def with_optimizer(parameters: Callable[[Any], list[Any]]) -> Arguments:
    def make(tokenizer: Any, model: Any) -> dict[str, Any]:
        optimizer = torch.optim.SGD(parameters(model), lr=0.1)
        return {"model": model, "processing_class": tokenizer, "optimizers": (optimizer, None)}

    return make


def frozen(model: Any) -> list[Any]:
    return [model.lm_head.weight.requires_grad_(False)]


def model_of(make: Callable[[], Any]) -> Arguments:
    return lambda tokenizer, model: {"model": make(), "processing_class": tokenizer}


BAD: dict[str, tuple[Arguments | dict[str, Any], type[Exception], str, str]] = {
    # arguments · error · the value seen · what to set
    "classifier": (
        model_of(lambda: Qwen3ForSequenceClassification(QWEN)),
        TypeError,
        "model is a Qwen3ForSequenceClassification",
        "AutoModelForCausalLM",
    ),
    "masked language model": (
        model_of(
            lambda: BertForMaskedLM(
                BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
            )
        ),
        TypeError,
        "model is a BertForMaskedLM, which fills gaps",
        "AutoModelForCausalLM",
    ),
    "model without a head": (
        model_of(lambda: Qwen3Model(QWEN)),
        TypeError,
        "Qwen3Model, which has no output head",
        "AutoModelForCausalLM",
    ),
    "plain module": (
        model_of(lambda: nn.Linear(2, 2)),
        TypeError,
        "model is a Linear, which is no language model",
        "AutoModelForCausalLM",
    ),
    "weights that are NaN": (
        with_nan,
        ValueError,
        r"2 of \d+ numbers of the model's model\.layers\.0\.mlp\.up_proj\.weight are NaN",
        "load a checkpoint",
    ),
    "tokenizer with more tokens than embeddings": (
        with_more_tokens,
        ValueError,
        r"tokenizer has \d+ tokens, but the model's embeddings have \d+ rows",
        "resize_token_embeddings",
    ),
    "template that raises": (
        with_raising_template,
        ValueError,
        "row 2 of train_dataset: the chat template cannot render .*no b",
        "chat_template",
    ),
    "one callback": ({"callbacks": TrainerCallback()}, TypeError, "callbacks is a TrainerCallback", "give a list"),
    "callback of another kind": ({"callbacks": [print]}, TypeError, "contains <built-in function print>", "derive it"),
    "one optimizer": (
        lambda t, m: {"model": m, "processing_class": t, "optimizers": torch.optim.SGD(m.parameters(), lr=0.1)},
        TypeError,
        "optimizers is SGD",
        "give a pair",
    ),
    "optimizer of another model": (
        with_optimizer(lambda model: list(Qwen3ForCausalLM(QWEN).parameters())),
        ValueError,
        "of the optimizer's .* parameters are not the model's",
        "from the parameters of the very model",
    ),
    "optimizer of frozen parameters": (
        with_optimizer(frozen),
        ValueError,
        "none of the optimizer's 1 parameters is trained",
        "trainable parameters",
    ),
    "column named like an argument": (
        {"train_dataset": rows(completions="x")},
        ValueError,
        "train_dataset has the column 'completions'",
        "rename_column",
    ),
    "argument that no column has": (
        {"reward_funcs": lambda completions, solution, **kwargs: [0.0] * len(completions)},
        ValueError,
        "'<lambda>' requires the argument 'solution', and train_dataset has no such column",
        "add the column",
    ),
    "argument that the evaluation set lacks": (
        {
            "reward_funcs": lambda completions, solution: [0.0] * len(completions),
            "train_dataset": rows(solution="1"),
            "eval_dataset": {"easy": rows(solution="1"), "hard": rows()},
        },
        ValueError,
        r"requires the argument 'solution', and eval_dataset\['hard'\] has no such column",
        "give the argument a default",
    ),
    "rollout_func of one argument": (
        {"rollout_func": lambda prompts: {}},
        TypeError,
        r"rollout_func takes \(prompts\)",
        r"a function of \(prompts, trainer\)",
    ),
    "optimizer class": (
        {"optimizers": (torch.optim.SGD, None)},
        TypeError,
        "optimizers has <class 'torch.optim.sgd.SGD'> as its optimizer",
        "made already",
    ),
    "name of an optimizer": ({"optimizers": ("adam", None)}, TypeError, "optimizers has 'adam' as", "or None"),
    "scheduler of another kind": ({"optimizers": (None, 5)}, TypeError, "optimizers has 5 as its scheduler", "or None"),
    "weights without numbers": (
        model_of(lambda: Qwen3ForCausalLM(QWEN).to("meta")),
        ValueError,
        "weights of this Qwen3ForCausalLM are on the device 'meta'",
        "AutoModelForCausalLM",
    ),
    "empty name of a model": ({"model": ""}, ValueError, "model is the empty text", "give a model id"),
    "quantization of another kind": (
        {"model": "tiny", "quantization_config": 4},
        TypeError,
        "quantization_config is a int",
        "BitsAndBytesConfig",
    ),
    "reward model that is not there": (
        {"reward_funcs": "./nowhere"},
        ValueError,
        r"reward_funcs has './nowhere'.* there is no such folder",
        "give the function itself",
    ),
    "content that is a number": (
        {"train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": 5}]}] * 2)},
        ValueError,
        "row 0 of train_dataset: its prompt has the content 5",
        "write a text",
    ),
    "policy that is nowhere": (
        {"model": "no/such-model"},
        ValueError,
        "model='no/such-model': there is no such folder.* HF_HUB_OFFLINE forbids",
        "set it to a folder",
    ),
    "reward model that is nowhere": (
        {"reward_funcs": "accuracy"},
        ValueError,
        "reward_funcs has 'accuracy'.* sequence-classification model",
        "give the function itself",
    ),
    "column named like the state": (
        {"eval_dataset": rows(trainer_state="x")},
        ValueError,
        "eval_dataset has the column 'trainer_state'",
        "rename_column",
    ),
}


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
    with pytest.raises(ValueError, match="tokenizer has"):
        make_trainer(model=model, processing_class=tokenizer)
    tokenizer.chat_template = None
    tokenizer.pad_token = "<image_soft_token>"
    with pytest.raises(ValueError, match="tokenizer has"):
        make_trainer(model=model, processing_class=tokenizer)


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs(case: str, make_trainer: MakeTrainer, tokenizer: Any, model: Any, unsampled: None) -> None:
    arguments, error_type, seen, remedy = BAD[case]
    with pytest.raises(error_type) as error:
        make_trainer(**(arguments(tokenizer, model) if callable(arguments) else arguments))
    assert_refused(error, seen, remedy)


SAMPLED = "generation_kwargs"
BAD_VALUES: dict[str, tuple[dict[str, Any], type[Exception], str, str]] = {
    # settings · error · the value seen · what to set
    "end beyond the vocabulary": (
        {SAMPLED: {"eos_token_id": [1, 10**6]}},
        ValueError,
        "generation_kwargs has 1000000 in eos_token_id, and the model has 92 tokens",
        "a token's id",
    ),
    "suppressed token beyond the vocabulary": (
        {SAMPLED: {"begin_suppress_tokens": [500]}},
        ValueError,
        "500 in begin_suppress_tokens",
        "take it out",
    ),
    "all tokens suppressed": (
        {SAMPLED: {"suppress_tokens": list(range(92))}},
        ValueError,
        "suppress_tokens of all 92 tokens",
        "leave some out",
    ),
    "old switch of quantization": (
        {"model_init_kwargs": {"load_in_4bit": True}},
        ValueError,
        "model_init_kwargs has load_in_4bit=True",
        r"quantization_config=BitsAndBytesConfig\(load_in_4bit=True\)",
    ),
    "quantization that is none": (
        {"model_init_kwargs": {"quantization_config": "4bit"}},
        ValueError,
        "cannot be loaded with model_init_kwargs={'quantization_config': '4bit'}",
        "Correct the entry",
    ),
    "sizes of another model": (
        {"model_init_kwargs": {"vocab_size": 10}},
        ValueError,
        "cannot be loaded with model_init_kwargs={'vocab_size': 10}",
        "Correct the entry",
    ),
    "value of another type for the model's config": (
        {"model_init_kwargs": {"use_cache": "no"}},
        ValueError,
        "cannot be loaded with model_init_kwargs={'use_cache': 'no'}",
        "Correct the entry",
    ),
    "attention without its package": (
        {"model_init_kwargs": {"attn_implementation": "flash_attention_2"}},
        ImportError,
        "model_init_kwargs={'attn_implementation': 'flash_attention_2'}",
        "Correct the entry",
    ),
    "unknown tracker": (
        {"report_to": "tensorbord"},
        ValueError,
        "tensorbord is not supported",
        "only .*tensorboard.* are supported",
    ),
    "tracker without its package": (
        {"report_to": ["clearml"]},
        RuntimeError,
        "ClearMLCallback requires 'clearml' to be installed",
        "pip install clearml",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_bad_values(case: str, make_trainer: MakeTrainer, model_dir: Any, unsampled: None) -> None:
    settings, error_type, seen, remedy = BAD_VALUES[case]
    if "flash_attention_2" in seen and is_flash_attn_2_available():
        pytest.skip("the package is installed")
    with pytest.raises(error_type) as error:
        make_trainer(settings, model=str(model_dir))
    assert_refused(error, seen, remedy)


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
