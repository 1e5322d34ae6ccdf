"""Arguments that the trainer refuses before it samples, with the value seen and what to set in the message."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from refusals import assert_refused, rows
from scripted_agents import with_tools
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
)

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import ConfigError, UnavailableError
from groupgrad.trainer.best_metric import check_best_metric
from groupgrad.trainer.constructor_arguments import use_one_device

MakeTrainer = Callable[..., GRPOTrainer]
SMALL = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "gradient_checkpointing": False}


class Grader:
    """A class, passed instead of an instance."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


@pytest.fixture
def lora() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def test_empty_lists_of_tools_are_none(make_trainer: MakeTrainer) -> None:
    assert make_trainer(tools=[], callbacks=[]).train().global_step == 1


# --- bad arguments ---

MESSAGES = [{"role": "user", "content": "hello"}]
BERT = BertConfig(
    vocab_size=200,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    initializer_range=0.5,
)
T5 = T5Config(vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)


def no_eos(tokenizer: Any, model: Any) -> dict[str, Any]:
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return {"processing_class": tokenizer, "model": model}


def no_template(tokenizer: Any, model: Any) -> dict[str, Any]:
    tokenizer.chat_template = None
    return {
        "processing_class": tokenizer,
        "model": model,
        "train_dataset": Dataset.from_list([{"prompt": MESSAGES}] * 2),
    }


def prompts(*values: Any) -> dict[str, Any]:
    return {"train_dataset": Dataset.from_list([{"prompt": value} for value in values])}


BAD: dict[str, tuple[Any, type[Exception], str, str]] = {
    # arguments · error · the value seen · what to set
    "model of another kind": ({"model": 7}, TypeError, "model is a int", "a model id, a directory"),
    "model class": ({"model": Qwen3ForCausalLM}, TypeError, "model is a type", "a model id, a directory"),
    "no such directory": ({"model": "./nowhere"}, ValueError, "model='./nowhere': there is no such", "set it to"),
    "encoder-decoder": (
        lambda t, m: {"model": T5ForConditionalGeneration(T5), "processing_class": t},
        UnavailableError,
        "T5ForConditionalGeneration is an encoder-decoder",
        "decoder-only",
    ),
    "encoder": (
        lambda t, m: {"model": BertLMHeadModel(BERT), "processing_class": t},
        UnavailableError,
        "BertLMHeadModel looks to the right",
        "is_decoder=True",
    ),
    "no reward": ({"reward_funcs": None}, ValueError, "no reward source", "give a reward function"),
    "empty list of rewards": ({"reward_funcs": []}, ValueError, "no reward source", "give a reward function"),
    "reward that cannot be called": ({"reward_funcs": [3.5]}, TypeError, "3.5", "give functions"),
    "reward class": ({"reward_funcs": [Grader]}, TypeError, "Grader", "give functions"),
    "name of a built-in reward": (
        {"reward_funcs": "accuracy_reward"},
        ValueError,
        "accuracy_reward",
        "give the function itself",
    ),
    "reward given twice": (
        {"reward_fn": print},
        ValueError,
        "reward_funcs and reward_fn",
        "put all of them into reward_funcs",
    ),
    "reward by position": (
        {"reward_funcs": lambda completions, /, **kw: []},
        ValueError,
        "completions",
        "remove the '/'",
    ),
    "classes of rewards": (
        {"reward_processing_classes": [None, None]},
        ValueError,
        "2 reward_processing_classes for 1",
        "list of the same length",
    ),
    "args of another kind": (
        {"args": TrainingArguments(output_dir="out", use_cpu=True)},
        TypeError,
        "args is a TrainingArguments",
        "groupgrad.GRPOConfig",
    ),
    "args as a dict": ({"args": {"beta": 0.1}}, TypeError, "args is a dict", "groupgrad.GRPOConfig"),
    "group size that does not fit": ({"num_generations": 3}, ConfigError, "num_generations=3", "num_generations to"),
    "group of one": ({"num_generations": 1}, ConfigError, "num_generations=1", "2"),
    "no train set": ({"train_dataset": None}, ValueError, "train_dataset is None", "give a data set"),
    "list of rows": ({"train_dataset": [{"prompt": "a"}]}, TypeError, "train_dataset is a list", "Dataset.from_list"),
    "dict of train sets": (
        {"train_dataset": DatasetDict({"train": rows(), "test": rows()})},
        TypeError,
        "train_dataset is a DatasetDict of the splits 'train', 'test'",
        r"such as dataset\['train'\]",
    ),
    "too few rows": ({"train_dataset": rows(1)}, ValueError, "train_dataset has 1 rows", "lower generation_batch_size"),
    "empty train set": (
        {"train_dataset": Dataset.from_dict({"prompt": []})},
        ValueError,
        "train_dataset has no rows",
        "at least one row",
    ),
    "empty stream": (
        {"train_dataset": IterableDataset.from_generator(lambda: iter(()))},
        ValueError,
        "train_dataset has no rows",
        "at least one row",
    ),
    "missing prompt column among columns that nothing uses": (
        {
            "args": GRPOConfig("out", use_cpu=True, remove_unused_columns=True, report_to="none"),
            "train_dataset": Dataset.from_list([{"question": "1+1?", "answer": "2"}] * 4),
        },
        ValueError,
        "'answer', 'question'",
        "'question' looks like one: dataset.rename_column",
    ),
    "missing prompt column": (
        {"train_dataset": Dataset.from_list([{"question": "1+1?"}] * 4)},
        ValueError,
        "question",
        "rename_column",
    ),
    "empty text": (prompts("a", "", "b"), ValueError, "row 1 of train_dataset", "write a prompt"),
    "empty conversation": (prompts([], MESSAGES), ValueError, "row 0 of train_dataset", "add a user message"),
    "prompt without a value": (
        prompts("a", None),
        ValueError,
        "row 1 of train_dataset: its prompt is None",
        "a text or a list of messages",
    ),
    "prompt of numbers": (prompts(1, 2), ValueError, "its prompt is 1", "a text or a list of messages"),
    "message without a role": (
        prompts([{"content": "x"}], [{"content": "y"}]),
        ValueError,
        "{'content': 'x'}",
        "'role' and 'content'",
    ),
    "prompts longer than the context": (
        prompts("a" * 600, "b" * 700, "c"),
        ValueError,
        "2 prompts of train_dataset are too long.*700 tokens.*512 positions",
        "filter such rows",
    ),
    "image column": (
        {"train_dataset": rows(image="x.png")},
        ValueError,
        "'image' of row 0 of train_dataset, but Qwen3ForCausalLM reads text alone",
        "train a model that takes images",
    ),
    "images column": (
        {"train_dataset": rows(images=["x.png"])},
        ValueError,
        "'images' of row 0 of train_dataset, but Qwen3ForCausalLM reads text alone",
        "remove the images",
    ),
    "evaluation set of another kind": (
        {"eval_dataset": [{"prompt": "a"}]},
        TypeError,
        "eval_dataset is a list",
        "Dataset.from_list",
    ),
    "evaluation set without prompts": (
        {"eval_dataset": {"a": rows(), "b": rows().rename_column("prompt", "text")}},
        ValueError,
        r"eval_dataset\['b'\] has the columns \['text'\]",
        "rename_column",
    ),
    "tokenizer of another kind": (
        {"processing_class": "Qwen/Qwen3-0.6B"},
        TypeError,
        "processing_class is a str",
        "AutoTokenizer.from_pretrained",
    ),
    "no end of sequence": (no_eos, ValueError, "end-of-sequence", "set tokenizer.eos_token"),
    "conversation without a template": (
        no_template,
        ValueError,
        "no chat template",
        "chat_template or use text prompts",
    ),
    "no tokenizer to load": (lambda t, m: {"model": m}, ValueError, "processing_class is None", "pass the tokenizer"),
    "peft_config of another kind": ({"peft_config": {"r": 8}}, TypeError, "peft_config is a dict", "peft.LoraConfig"),
}

BEST = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2, "save_strategy": "steps"}
BEST |= {"save_steps": 1, "load_best_model_at_end": True}

BAD_WITH_CONFIG: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str, str]] = {
    # configuration · arguments · error · the value seen · what to set
    "number of weights": (
        {"reward_weights": [1.0, 2.0]},
        {},
        ValueError,
        r"2 entries \(\[1.0, 2.0\]\).*1 reward functions",
        "one weight for each",
    ),
    "stream without an end": (
        {"max_steps": -1},
        {"train_dataset": rows().to_iterable_dataset()},
        ValueError,
        "max_steps is -1",
        "set max_steps",
    ),
    "evaluation without a set": (
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
        {},
        ValueError,
        "eval_strategy is 'steps'",
        "eval_strategy='no'",
    ),
    "evaluation at the start without a set": (
        {"eval_on_start": True, "per_device_eval_batch_size": 2},
        {},
        ValueError,
        "eval_on_start",
        "eval_on_start=False",
    ),
    "experts of a model without any": (
        {"router_aux_loss_coef": 0.1},
        {},
        ValueError,
        "router_aux_loss_coef=0.1",
        "set it to 0",
    ),
    "environment without rows and length": (
        {"max_steps": -1},
        {"train_dataset": None, "environment_factory": Grader},
        ValueError,
        "train_dataset is None.*max_steps is -1",
        "set max_steps",
    ),
    "environments without rows": (
        {},
        {"train_dataset": None, "environment_factory": {"a": Grader, "b": Grader}},
        ValueError,
        "train_dataset is None and environment_factory names 2",
        "column 'environment'",
    ),
    "large generation batch": (
        {"generation_batch_size": 16},
        {},
        ValueError,
        "train_dataset has 4 rows.* 8 distinct",
        "lower generation_batch_size",
    ),
    "no evaluation set in a dict": (
        {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
        {"eval_dataset": {}},
        ValueError,
        "eval_dataset is a dict without a data set",
        "eval_strategy='no'",
    ),
    "best metric of a reward that does not exist": (
        {**BEST, "metric_for_best_model": "rewards/checksums/mean"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='rewards/checksums/mean' is no metric",
        "did you mean 'rewards/checksum/mean'",
    ),
    "best metric that training alone has": (
        {**BEST, "metric_for_best_model": "grad_norm"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='grad_norm' is no metric",
        "Set it to 'reward'",
    ),
    "best metric of a KL term that is off": (
        {**BEST, "metric_for_best_model": "eval_kl"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='eval_kl' is no metric",
        "Set it to 'reward'",
    ),
    "best metric with a made-up name": (
        {**BEST, "metric_for_best_model": "clip_ratio/nonsense"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='clip_ratio/nonsense' is no metric",
        "Set it to 'reward'",
    ),
    "best metric of tools without tools": (
        {**BEST, "metric_for_best_model": "tools/call_frequency"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='tools/call_frequency' is no metric",
        "Set it to 'reward'",
    ),
    "best metric of the sampler without vLLM": (
        {**BEST, "metric_for_best_model": "sampling/importance_sampling_ratio/mean"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='sampling/importance_sampling_ratio/mean' is no metric",
        "Set it to 'reward'",
    ),
    "best metric of another loss": (
        {**BEST, "metric_for_best_model": "cispo_clip_ratio"},
        {"eval_dataset": rows(2)},
        ValueError,
        "metric_for_best_model='cispo_clip_ratio' is no metric",
        "Set it to 'reward'",
    ),
    "best metric that nobody can log": (
        {**BEST, "metric_for_best_model": "accuracy"},
        {"eval_dataset": rows(2), "reward_funcs": lambda completions: [0.0] * len(completions)},
        ValueError,
        "metric_for_best_model='accuracy' is no metric",
        "log it in a reward function by log_metric",
    ),
    "best metric without the name of its set": (
        BEST,
        {"eval_dataset": {"easy": rows(2), "hard": rows(2)}},
        ValueError,
        "metric_for_best_model='loss' is looked for as 'eval_loss'",
        "set it to 'eval_easy_loss'",
    ),
    "missing optimizer package": (
        {"optim": "grokadamw"},
        {},
        ValueError,
        "optim='grokadamw'",
        "set optim='adamw_torch'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str, make_trainer: MakeTrainer, tokenizer: Any, model: Any, unsampled: None) -> None:
    arguments, error_type, seen, remedy = BAD[case]
    with pytest.raises(error_type) as error:
        make_trainer(**(arguments(tokenizer, model) if callable(arguments) else arguments))
    assert_refused(error, seen, remedy)


MISPLACED: dict[str, tuple[Any, str]] = {
    "config": (GRPOConfig, "it is 'args' here"),
    "ref_model": (None, "the reference is the policy from before training, kept where args=GRPOConfig(beta=...)"),
    "beta": (0.04, "set args=GRPOConfig(beta=...)"),
    "kl_coef": (0.04, "it is args=GRPOConfig(beta=...) here"),
    "max_new_tokens": (64, "it is args=GRPOConfig(max_completion_length=...) here"),
    "max_prompt_length": (64, "it has no effect (prompts are never cut"),
    "load_in_4bit": (True, "pass GRPOTrainer(quantization_config=BitsAndBytesConfig(load_in_4bit=...))"),
    "stop": ("#", "it is an option of sampling, set generation_kwargs={'stop_strings': ...}"),
    "learning_rat": (1e-6, "did you mean args=GRPOConfig(learning_rate=...)?"),
    "dataset": (None, "it is 'train_dataset' here"),
    "reward_fucns": (None, "did you mean 'reward_funcs'?"),
    "fnord": (None, "take it out"),
}


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, type("Subclass", (GRPOTrainer,), {})])
def test_all_misplaced_arguments_are_named_at_once(trainer_class: type[GRPOTrainer], unsampled: None) -> None:
    """Before arguments that are missing, such as the model."""
    with pytest.raises(TypeError) as caught:
        trainer_class(reward_funcs=len, **{name: value for name, (value, _) in MISPLACED.items()})
    for name, (_, place) in MISPLACED.items():
        assert f"no argument {name!r}: {place}" in str(caught.value)


def test_a_subclass_that_passes_its_arguments_on_gets_the_same_error(unsampled: None) -> None:
    class Passing(GRPOTrainer):
        def __init__(self, *args: Any, own: int = 0, **kwargs: Any):
            super().__init__(*args, **kwargs)

    with pytest.raises(TypeError, match="no argument 'beta': set args=GRPOConfig"):
        Passing(own=1, beta=0.1)


@pytest.mark.parametrize("case", BAD_WITH_CONFIG)
def test_bad_arguments_beside_settings(case: str, make_trainer: MakeTrainer, unsampled: None) -> None:
    config, arguments, error_type, seen, remedy = BAD_WITH_CONFIG[case]
    with pytest.raises(error_type) as error:
        make_trainer(config, **arguments)
    assert_refused(error, seen, remedy)


def test_unknown_loading_options(make_trainer: MakeTrainer, model_dir: Path, unsampled: None) -> None:
    for option, remedy in (("atn_implementation", "did you mean 'attn_implementation'"), ("fnord", "Take it out")):
        with pytest.raises(ValueError, match="model_init_kwargs has") as error:
            make_trainer({"model_init_kwargs": {option: "sdpa"}}, model=str(model_dir))
        assert_refused(error, f"{option}='sdpa', which neither from_pretrained nor", remedy)


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
        for name, sets in (("rewards/checksum/std", rows(2)), ("eval_a_reward", named), ("eval_a_b_reward", named)):
            make_trainer({**BEST, "metric_for_best_model": name}, eval_dataset=sets)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "agents"])
def test_every_metric_of_an_evaluation_may_choose_the_best_model(
    loss_type: str, make_trainer: MakeTrainer, tokenizer: Any, model: Any
) -> None:
    def look_up() -> str:
        """Looks up."""
        return "1"

    def zeros(completions: list[Any], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    settings: dict[str, Any] = {**BEST, "loss_type": loss_type, "beta": 0.1, "entropy_coef": 0.1, "epsilon_high": 5.0}
    arguments: dict[str, Any] = {"eval_dataset": rows(2)}
    if loss_type == "agents":
        settings, data = BEST, Dataset.from_list([{"prompt": MESSAGES}] * 2)
        arguments = {"eval_dataset": data, "train_dataset": data, "tools": [look_up], "reward_funcs": zeros}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(settings, model=model, processing_class=with_tools(tokenizer), **arguments)
        names = trainer.evaluate().keys() - {"epoch"}
    assert len(names) > 12
    for name in names:
        if name.startswith("eval_sampling/path/"):  # how tokens were computed is no measure of a model
            continue
        trainer.args.metric_for_best_model = name
        check_best_metric(
            trainer.args, trainer.eval_dataset, trainer.rewards, trainer.rollout_components, is_open=False
        )


def test_number_of_bad_cases() -> None:
    assert len(BAD) + len(BAD_WITH_CONFIG) >= 50


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


def test_adapter_on_an_adapter(
    model: Any, tokenizer: Any, make_trainer: MakeTrainer, lora: Any, unsampled: None
) -> None:
    from peft import get_peft_model

    with pytest.raises(
        ValueError, match="already has an adapter and peft_config is given too; pass the PeftModel alone"
    ):
        make_trainer(model=get_peft_model(model, lora), processing_class=tokenizer, peft_config=lora)


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
