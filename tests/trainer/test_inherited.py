"""Fields of `transformers.TrainingArguments` have their documented effect in this trainer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from noted_calls import note_calls, note_results
from step_events import At
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


def logged(trainer, key: str) -> dict[int, Any]:
    """Returns the values of a key by step."""
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


# ------------------------------------------------------------------------------------------------- length, schedule


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"num_train_epochs": 0.5}, 4),
        ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 2}, 6),
        ({"num_train_epochs": 2, "per_device_train_batch_size": 16}, 8),
        ({"num_train_epochs": 2, "max_steps": 3}, 3),
        ({"num_train_epochs": 1, "dataloader_drop_last": True, "rows": 15}, 7),
        ({"num_train_epochs": 1, "rows": 15}, 8),
    ],
    ids=str,
)
def test_number_of_steps(make_trainer, tools, settings, steps):
    """16 prompts; a step has 8 rows, which are two groups of 4."""
    rows = settings.get("rows", 16)
    config = {name: value for name, value in settings.items() if name != "rows"}
    trainer = make_trainer(
        train_dataset=tools.prompts(rows),
        **{"max_steps": -1, "max_completion_length": 1, "logging_steps": 50, **config},
    )
    assert trainer.train().global_step == steps


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"lr_scheduler_type": "linear", "warmup_steps": 1 / 3}, [0.0, 0.05, 0.1, 0.075, 0.05, 0.025]),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.02}},
            [0.02 + 0.08 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)],
        ),
    ],
    ids=["warmup", "options"],
)
def test_learning_rates(train, settings, rates):
    trainer = train(max_steps=6, max_completion_length=1, **SGD, **settings)
    assert list(logged(trainer, "learning_rate").values()) == pytest.approx(rates)


def test_the_rate_falls_when_evaluation_does_not_improve(train, tools):
    """Patience 0 and a metric that stays what it is: halved at every evaluation but the first."""
    trainer = train(
        trainer={"eval_dataset": tools.prompts(2)},
        reward_funcs=lambda completions, **kwargs: [1.0] * len(completions),
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"factor": 0.5, "patience": 0},
        metric_for_best_model="eval_reward",
        eval_strategy="steps",
        eval_steps=1,
        max_steps=4,
    )
    assert list(logged(trainer, "learning_rate").values()) == [1e-2, 1e-2, 5e-3, 2.5e-3]


def test_gradients_are_clipped(train, make_policy, tools):
    """With SGD at rate 1 the weights move by the largest norm that gradients may have."""
    policy = make_policy()
    start = tools.weights(policy)
    trainer = train(model=policy, optim="sgd", learning_rate=1.0, max_grad_norm=0.01, max_steps=1)
    assert logged(trainer, "grad_norm")[1] > 0.01
    assert float((tools.weights(policy) - start).norm()) == pytest.approx(0.01, rel=1e-3)


# ---------------------------------------------------------------------------------- log events, evaluations, saves


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("settings", "logs", "evaluations", "saves"),
    [
        (
            {"logging_steps": 2, "eval_steps": 2, "eval_on_start": True, "save_steps": 2},
            *([2, 4], [0, 2, 4, 5], [2, 4, 5]),
        ),
        (
            {"logging_steps": 3, "logging_first_step": True, "eval_steps": 1, "eval_delay": 3, "save_total_limit": 2},
            *([1, 3], [3, 4, 5], [4, 5]),
        ),
        ({"logging_steps": 0.5, "eval_strategy": "no", "save_strategy": "no"}, [3], [], []),
        (
            {f"{what}_strategy": "epoch" for what in ("logging", "eval", "save")} | {"per_device_train_batch_size": 32},
            *([2, 4, 5], [2, 4, 5], [2, 4, 5]),
        ),
        ({"logging_strategy": "no", "eval_steps": 5, "save_steps": 5}, [], [5], [5]),
    ],
    ids=str,
)
def test_when_it_logs_evaluates_and_saves(train, tools, tmp_path, settings, logs, evaluations, saves):
    """Over 5 steps. With the share 0.5 of them it logs at every third, rounded up."""
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "here")}
    given = {"trainer": {"eval_dataset": tools.prompts(2)}, "max_steps": 5, "max_completion_length": 1}
    trainer = train(**{**steps, **given, **settings})
    assert [step for step in logged(trainer, "loss") if step] == logs
    assert [step for step in logged(trainer, "reward") if step in logs] == logs
    assert list(logged(trainer, "eval_reward")) == evaluations
    assert checkpoints(tmp_path / "here") == saves


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_that_is_not_a_number(make_trainer, monkeypatch, filtered):
    """The second of two steps has no loss: the filter counts it as half of the first, of two in the window."""
    trainer = make_trainer(max_steps=2, logging_steps=2, logging_nan_inf_filter=filtered, beta=0.1)
    losses: list[float] = []
    compute = trainer.compute_loss

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = compute(*args, **kwargs) + 1.0
        losses.append(float(loss.detach()))
        return loss if len(losses) == 1 else loss * float("nan")

    monkeypatch.setattr(trainer, "compute_loss", broken)
    trainer.train()
    expected = 0.75 * losses[0] if filtered else float("nan")
    assert logged(trainer, "loss")[2] == pytest.approx(expected, nan_ok=True)


def test_a_changed_loss_keeps_the_metrics(make_trainer, monkeypatch):
    """The loss doubles, everything else that the first step measures stays; a replaced `batch_loss` stays replaced."""
    logs = []
    for factor in (1.0, 2.0):
        trainer = make_trainer(max_steps=1, beta=0.1)
        compute, batch_loss, calls = trainer.compute_loss, trainer.batch_loss, []
        monkeypatch.setattr(trainer, "compute_loss", lambda *a, c=compute, f=factor, **k: f * c(*a, **k))
        monkeypatch.setattr(trainer, "batch_loss", lambda *a, b=batch_loss, n=calls, **k: n.append(1) or b(*a, **k))
        trainer.train()
        assert calls
        logs.append(trainer.state.log_history[0])
    assert logs[1]["loss"] == pytest.approx(2 * logs[0]["loss"], rel=1e-4, abs=1e-6)
    for key in ("entropy", "kl", "clip_ratio/region_mean"):
        assert logs[1][key] == pytest.approx(logs[0][key], rel=1e-5)


def test_tokens_and_memory_are_measured_when_asked_for(make_trainer):
    """Neither is otherwise, and whether activations are computed again is left to the run."""
    pytest.importorskip("psutil")
    trainer = make_trainer(max_steps=2, include_num_input_tokens_seen="all", skip_memory_metrics=False)
    assert {"train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} <= set(trainer.train().metrics)
    seen, counted = logged(trainer, "num_input_tokens_seen"), logged(trainer, "num_tokens")
    assert {step: seen[step] for step in counted} == counted
    assert counted[2] > counted[1] > 0
    assert all(rate > 0 for rate in logged(trainer, "train_tokens_per_second").values())
    plain = make_trainer(max_steps=1)
    assert not any("mem_cpu" in key for key in plain.train().metrics)
    assert logged(plain, "num_input_tokens_seen") == {} and not recomputes(plain.model)


# ------------------------------------------------------------------------------------------- evaluation, checkpoints


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_checkpoint_holds(train, tmp_path, alone):
    train(max_steps=1, save_strategy="steps", save_only_model=alone)
    names = {path.name for path in (tmp_path / "run" / "checkpoint-1").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "tokenizer.json"} <= names
    state = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "groupgrad_state_0.pt"}
    assert names & state == (set() if alone else state)


class Counter(TrainerCallback, ExportableState):
    """Counts steps; checkpoints include the count."""

    def __init__(self, steps: int = 0):
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_callbacks_and_data_of_a_resumed_run(train, make_trainer, recorder, tmp_path):
    """`ignore_data_skip=True` restarts the epoch instead of continuing from the checkpoint's position."""
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "shuffle_dataset": False}
    train(trainer={"callbacks": [Counter()]}, **saved)
    for anew, steps, rows in ((False, 3, [4, 5]), (True, 1, [0, 1])):
        again = make_trainer(
            reward_funcs=recorder,
            trainer={"callbacks": [Counter()]},
            restore_callback_states_from_checkpoint=not anew,
            ignore_data_skip=anew,
            **saved,
        )
        again.train(str(tmp_path / "run" / "checkpoint-2"))
        (counter,) = [c for c in again.callback_handler.callbacks if isinstance(c, Counter)]
        assert counter.steps == steps
        assert sorted(set(recorder.take("row"))) == rows


@pytest.mark.slow
def test_a_checkpoint_asked_for_by_a_signal(make_trainer, make_policy, tools, tmp_path):
    """Wherever in the second step the request comes, the run stops with a checkpoint that it can go on from."""
    stateful = {**tools.STATEFUL, "steps_per_generation": 4, "max_steps": 4}
    managers: list[Any] = []

    def ask(_: Any) -> None:
        managers[-1].is_checkpoint_requested = True

    def make(**settings: Any) -> Any:
        return make_trainer(model=make_policy(attention_dropout=0.3), **stateful, **settings)

    straight = make()
    straight.train()
    for event in ("on_step_begin", "on_optimizer_step"):
        settings = {"output_dir": str(tmp_path / event), "enable_jit_checkpoint": True}
        stopped = make(trainer={"callbacks": [At(event, ask, 1)]}, **settings)
        managers += [c.jit_manager for c in stopped.callback_handler.callbacks if hasattr(c, "jit_manager")]
        stopped.train()
        assert stopped.state.global_step == 2
        assert checkpoints(tmp_path / event) == [2]
        resumed = make(**settings)
        resumed.train(str(tmp_path / event / "checkpoint-2"))
        assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))
        losses, expected = logged(resumed, "loss"), logged(straight, "loss")
        # The checkpoint was made before the log event of its step, which then counts to the next one's window.
        assert losses[3] == pytest.approx((expected[2] + expected[3]) / 2)
        assert losses[4] == expected[4]


# ------------------------------------------------------------------------------------------------------ randomness


def test_full_determinism(make_trainer, monkeypatch):
    """PyTorch then refuses operations whose result may vary; none of ours is one, on a CPU."""
    names = ["CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"]
    for name in [*names, "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"]:
        monkeypatch.setenv(name, "")
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, False)
    try:
        trainer = make_trainer(full_determinism=True, beta=0.1, entropy_coef=0.1, steps_per_generation=2)
        assert torch.are_deterministic_algorithms_enabled()
        trainer.train()
    finally:
        torch.use_deterministic_algorithms(False)


# --------------------------------------------------------------------------------------- what happens to the model


@pytest.fixture
def calls(monkeypatch):
    """`calls(name)`: the arguments of every later call of a function that the base class uses; it does nothing else."""

    def record(name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        made: list[Any] = []
        monkeypatch.setattr(f"transformers.trainer.{name}", lambda *args, **kwargs: made.append((args, kwargs)))
        return made

    return record


def test_the_cache_of_the_device_is_emptied(train, calls):
    """At the first and third of three steps of two micro-batches."""
    cleared = calls("clear_device_cache")
    train(torch_empty_cache_steps=2, gradient_accumulation_steps=2, max_steps=3)
    assert len(cleared) == 4


def test_noise_on_embeddings(train, tools):
    """In training passes alone: the rollouts stay, the weights do not, and the hook goes away."""
    finals = []
    for alpha in (None, 5.0):
        trainer = train(max_steps=1, neftune_noise_alpha=alpha)
        finals.append((tools.weights(trainer.model), logged(trainer, "reward")))
        assert not trainer.model.get_input_embeddings()._forward_hooks
    assert finals[0][1] == finals[1][1]
    assert tools.relative(finals[1][0], finals[0][0]) > 1e-4


def recomputes(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@pytest.mark.parametrize("name", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"])
def test_activation_checkpointing(train, make_policy, monkeypatch, name):
    """Two names of one setting and two of its options."""
    policy = make_policy()
    given = note_calls(monkeypatch, policy, "activation_checkpointing_enable", lambda **options: options)
    options = {"use_reentrant": False, "determinism_check": "none"}
    on = {"activation_checkpointing": True, "gradient_checkpointing": True}
    seen: list[bool] = []
    watch = At("on_step_end", lambda *_: seen.append(recomputes(policy)))
    train(model=policy, max_steps=1, trainer={"callbacks": [watch]}, **on, **{name: options})
    assert seen == [True] and not recomputes(policy)
    assert given[0]["activation_checkpointing_kwargs"] == options


@pytest.mark.slow
def test_compiled(make_policy, train, tools):
    """The training pass runs through the compiler: no weight differs by more than rounding, and after the second shape
    no further batch is compiled anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    finals, modules, graphs = [], [], []
    watch = At("on_step_end", lambda *_: graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    for settings in ({}, {"torch_compile_backend": "eager", "trainer": {"callbacks": [watch]}}):
        trainer = train(model=make_policy(num_hidden_layers=1), max_steps=4, **SGD, **settings)
        finals.append(tools.weights(trainer.model))
        modules.append(trainer.model_wrapped)
    assert modules[0] is not modules[1] and hasattr(modules[1], "_orig_mod")
    assert tools.relative(finals[1], finals[0]) < 1e-6
    assert 0 < graphs[0] <= graphs[2] == graphs[3]


def test_the_compiler_gets_its_options(make_trainer):
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": "reduce-overhead"}
    plugin = make_trainer(**settings).accelerator.state.dynamo_plugin
    assert (plugin.backend.value.lower(), plugin.mode) == ("aot_eager", "reduce-overhead")


def test_kernels_are_put_into_the_model(make_trainer, calls, monkeypatch):
    """Before the model is tried, and in the same way when training begins; without those of a loss on labels."""
    monkeypatch.setattr("groupgrad.compat.is_available", lambda name: True)
    monkeypatch.setattr("groupgrad.models.liger.WITHOUT_TRITON", ())
    first: list[Any] = []
    monkeypatch.setattr("groupgrad.models.liger.liger.apply_liger_kernel", lambda *given: first.append(given))
    then = calls("apply_liger_kernel")
    trainer = make_trainer(use_liger_kernel=True, liger_kernel_config={"rope": False}, max_steps=1)
    expected = {"cross_entropy": False, "fused_linear_cross_entropy": False, "rope": False}
    assert first == [(trainer.model, expected)]
    trainer.train()
    assert then == [((trainer.model, expected), {})]
    assert trainer.args.liger_kernel_config == {"rope": False}


def test_overflow_is_looked_for(train, monkeypatch):
    """The detector checks all passes of the policy, and a sound run raises no alarm."""
    watched = note_results(monkeypatch, transformers.trainer, "DebugUnderflowOverflow")
    trainer = train(debug="underflow_overflow", max_steps=1)
    assert watched[0].model is trainer.model
    assert watched[0].batch_number > 0 and not watched[0].detected_overflow
