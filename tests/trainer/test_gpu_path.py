"""Runs on a simulated CUDA device sample by the fast path, say so, leave nothing behind, and match the CPU."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from noted_calls import note_calls
from peft import LoraConfig
from simulated_cuda import Graph, to_cuda, trainers_on_simulated_cuda, waits
from step_events import At
from torch import nn
from triton_twins import triton_twins

from groupgrad.engines.native import decode_kernels, runner
from groupgrad.engines.native.direct_step import DirectModel, direct_model
from groupgrad.models.unwrapping import is_prepared
from groupgrad.scoring.forward import score_tokens
from groupgrad.scoring.self_check import random_batch


def lengths(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 5) for completion in completions]


@pytest.fixture
def make_gpu_trainer(make_trainer, make_model):
    """`make_gpu_trainer(**fields)`: a trainer on the simulated device, or its twin on the CPU."""

    def make(*, on_gpu: bool = True, peft_config: Any = None, **fields: Any) -> Any:
        chosen = {"bf16": None, "gradient_checkpointing": None}  # the defaults of a device
        settings = {**chosen, "max_steps": 1, "max_completion_length": 12, "learning_rate": 1e-3, **fields}
        model, given = make_model(), {"peft_config": peft_config}
        model = to_cuda(model) if on_gpu else model
        return make_trainer(model=model, reward_funcs=lengths, trainer=given, use_cpu=not on_gpu, **settings)

    return make


def said_by_engines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("groupgrad.engines")]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Computations of decode steps by each form; a recorded step is computed at its recording alone."""
    direct = note_calls(monkeypatch, DirectModel, "__call__")
    return {"direct": direct, "modules": note_calls(monkeypatch, runner, "step_logits")}


@pytest.mark.quick("default")
@pytest.mark.parametrize(
    "fields",
    [{}, {"gradient_checkpointing": True, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}],
    ids=["default", "adapter, checkpointing"],
)
def test_training_samples_by_the_direct_form(fields, steps, make_gpu_trainer, tmp_path, caplog, capsys):
    """Also under accelerate's mixed precision, which sets a forward method and returns float32 logits."""
    with trainers_on_simulated_cuda(), triton_twins():
        trainer = make_gpu_trainer(**fields)
        assert trainer.args.bf16  # the default
        trainer.train()
        logged = trainer.state.log_history[0]
    assert not said_by_engines(caplog)
    assert logged["sampling/path/direct"] == 1.0 and logged["sampling/recordings"] > 0
    assert logged["sampling/fallbacks"] == 0 and logged["sampling/memory_left"] < 64
    record = json.loads((tmp_path / "run" / "run_config.json").read_text())["sampling"]
    assert (record["engine"], record["path"], record["old_logprobs"]) == ("native", "direct", None)
    assert "native engine, steps run direct\n" in capsys.readouterr().out
    assert len(steps["direct"]) >= 3 and not steps["modules"]


@pytest.mark.slow
def test_a_known_family_without_its_direct_form_says_so_once(steps, make_gpu_trainer, tmp_path, caplog, capsys):
    """The form is lost after the first step, which is an event; old log-probs of bfloat16 are a training pass's."""

    hook = At("on_step_end", lambda at: at.model.model.layers[1].mlp.register_forward_hook(lambda *_: None), 2)
    with trainers_on_simulated_cuda(), triton_twins():
        trainer = make_gpu_trainer(max_steps=4, num_iterations=2)
        trainer.add_callback(hook)
        trainer.train()
    assert said_by_engines(caplog) == [
        "decode steps run through the model's modules, which is slower: Qwen3MLP has a forward hook"
    ]
    logged = trainer.state.log_history[2]
    assert logged["sampling/path/modules"] == 1.0 and logged["sampling/fallbacks"] == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    ((step, found),) = [(event["step"], event["text"]) for event in events if event["event"] == "path"]
    assert step == 3
    record, shown = json.loads((tmp_path / "run" / "run_config.json").read_text())["sampling"], capsys.readouterr().out
    assert (record["path"], record["old_logprobs"]) == ("direct", "training") and record["logp_gap"] < 0.5
    assert "\nold log-probs  those of a forward pass of training, from which those of sampling differ by up" in shown
    assert shown.count("decoding ") == shown.count("decoding       native engine, steps run direct\n") == 1
    assert found.startswith("modules; decode steps run through") and "Qwen3MLP" in found


def test_a_forward_method_of_the_user_is_called(make_model):
    """Before accelerate sets its own, and after."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")

    def replaced(model: nn.Module) -> nn.Module:
        forward = model.forward

        @functools.wraps(forward)
        def calling(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        model.forward = calling
        return model

    assert is_prepared(accelerator.prepare_model(make_model()))
    for model in (accelerator.prepare_model(replaced(make_model())), replaced(accelerator.prepare_model(make_model()))):
        assert not is_prepared(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode_kernels, "_is_on_gpu", lambda _: True)
            patch.setattr(decode_kernels, "_has_triton", lambda: True)
            form = direct_model(model, {})
        assert form == "the forward method of Qwen3ForCausalLM was replaced"


def test_a_micro_batch_makes_the_host_wait_for_nothing(make_gpu_trainer):
    """Forward and backward passes of a part; uploads are pinned and asynchronous."""
    found: list[Counter[str]] = []
    with trainers_on_simulated_cuda():
        trainer = make_gpu_trainer(mask_truncated_completions=True)
        loss, backward = trainer._loss, trainer._backward

        def waits_of(work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                before = Counter(waits)
                result = work(*arguments)
                found.append(waits - before)
                return result

            return call

        trainer._loss, trainer._backward = waits_of(loss), waits_of(backward)
        trainer.train()
    assert len(found) >= 2 and not sum(found, Counter())


def test_activations_are_recomputed_by_need(make_gpu_trainer, caplog):
    gradients, recomputed = [], []
    for free_bytes in (1 << 30, 1 << 17):
        with trainers_on_simulated_cuda(free_bytes):
            trainer = make_gpu_trainer(bf16=False)
            trainer.train()
            recomputed.append("gradient checkpointing is on" in caplog.text)
            gradients.append(trainer.state.log_history[0]["grad_norm"])
    assert recomputed == [False, True]
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-5)


NUMBERS = ("loss", "grad_norm", "reward", "entropy", "kl", "sampling/logp_mismatch")


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1, "gradient_checkpointing": True},
        pytest.param(
            {"num_iterations": 2, "gradient_accumulation_steps": 2, "loss_type": "grpo", "entropy_coef": 0.01},
            marks=pytest.mark.slow,
        ),
        pytest.param({"bf16": True, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, marks=pytest.mark.slow),
    ],
    ids=["reference, checkpointing", "old policy", "bfloat16, adapter"],
)
def test_a_run_gives_the_numbers_of_the_cpu(fields: dict[str, Any], make_gpu_trainer, tmp_path):
    saved = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "bf16": False, "gradient_checkpointing": False}

    def run(*, on_gpu: bool, resumed: bool = False) -> list[dict[str, float]]:
        trainer = make_gpu_trainer(on_gpu=on_gpu, **{**saved, **fields})
        assert trainer.accelerator.device.type == ("cuda" if on_gpu else "cpu")
        trainer.train(resume_from_checkpoint=resumed and str(tmp_path / "run" / "checkpoint-1"))
        return [{name: entry[name] for name in NUMBERS if name in entry} for entry in trainer.state.log_history]

    with trainers_on_simulated_cuda():
        before = Graph.num_replayed
        found = run(on_gpu=True)
        assert Graph.num_replayed > before
        # Another one of its own second step.
        assert run(on_gpu=True, resumed=True)[1] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    expected = run(on_gpu=False)
    assert len(found) == len(expected) >= 3
    for ours, theirs in zip(found, expected):
        assert ours.pop("sampling/logp_mismatch", 0.0) < (0.02 if "bf16" in fields else 1e-5)
        theirs.pop("sampling/logp_mismatch", None)
        assert ours == pytest.approx(theirs, rel=0.05 if "bf16" in fields else 1e-4, abs=1e-6)


def test_tf32_set_as_transformers_sets_it(tf32, make_gpu_trainer):
    with trainers_on_simulated_cuda():
        trainer = make_gpu_trainer(bf16=False)
        assert trainer.execution.engine_choice.name == "native"
    assert torch.get_float32_matmul_precision() == "high"  # torch's compiler reads it


def test_training_passes_are_not_computed_by_cudnn(make_gpu_trainer, monkeypatch):
    """It would build a plan for each shape of a padded micro-batch, forward and backward."""
    allowed: dict[str, set[bool]] = {"forward": set(), "backward": set()}
    attend = torch.nn.functional.scaled_dot_product_attention

    def note(when: str) -> None:
        allowed[when].add(torch.backends.cuda.cudnn_sdp_enabled())

    def attend_and_note(*tensors: Any, **options: Any) -> Any:
        output = attend(*tensors, **options)
        if output.requires_grad:
            note("forward")
            output.register_hook(lambda _: note("backward"))
        return output

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend_and_note)
    with trainers_on_simulated_cuda():
        trainer = make_gpu_trainer(bf16=False)
        for noted in allowed.values():
            noted.clear()
        options = replace(trainer.components.forward_options, layout="dense")
        with trainer._training_passes(is_last=False):
            score_tokens(trainer.model, random_batch(trainer.model), options).logprobs.sum().backward()
    assert allowed == {"forward": {False}, "backward": {False}}
    assert torch.backends.cuda.cudnn_sdp_enabled()
