"""An arm of a sweep has the weights and the metrics of the same configuration trained alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.trainer import resuming

VARY = {"learning_rate": [1e-2, 3e-2], "loss_type": ["grpo", "dapo"]}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batches of two steps": {"steps_per_generation": 2, "logging_steps": 4},
    "reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
}


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])])
def test_arms_equal_runs_alone(make_sweep, train_alone, arguments, tools, tmp_path, case):
    given: dict[str, Any] = {}
    if "eval_strategy" in CASES[case]:
        given["eval_dataset"] = arguments["train_dataset"].select(range(3))
    results = make_sweep(VARY, args=CASES[case], turn_steps=2, **given).run()
    assert [result.state for result in results] == ["done"] * 4
    folders = [tmp_path / "sweep/arms" / result.name for result in results]
    for result, folder in list(zip(results, folders))[:2]:
        train_alone(result.name, given, **CASES[case], **result.changes)
        assert tools.equal_files(folder, tmp_path / result.name)
        assert tools.logs(folder) == tools.logs(tmp_path / result.name)
        assert len(tools.logs(folder)) >= 1
    assert not tools.equal_files(*folders[:2])


def test_a_trainer_in_memory_goes_on_without_reading_its_checkpoint(
    make_sweep, train_alone, tools, tmp_path, monkeypatch
):
    chosen: list[Any] = []
    choose = resuming.choose
    monkeypatch.setattr(resuming, "choose", lambda *a, **k: chosen.append(a[1]) or choose(*a, **k))
    # The schedule, the entropy coefficient and the numbers since the last log event differ from step to step.
    args = {"lr_scheduler_type": "cosine", "logging_steps": 4, "use_adaptive_entropy": True, "entropy_coef": 0.1}
    results = make_sweep({"learning_rate": [1e-2, 3e-2]}, args=args, turn_steps=1).run()
    assert chosen == [None, None]  # the first turn of each arm
    for result in results:
        train_alone(result.name, **args, **result.changes)
        assert tools.equal_files(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)
        assert tools.logs(tmp_path / "sweep/arms" / result.name) == tools.logs(tmp_path / result.name)


@pytest.mark.slow
def test_adapters_with_dropout_equal_runs_alone(make_sweep, train_alone, tools, tmp_path):
    from peft import LoraConfig

    def adapter(r: int) -> LoraConfig:
        return LoraConfig(r=r, target_modules=["q_proj", "v_proj"], lora_dropout=0.3)

    vary = {"learning_rate": [1e-2, 3e-2], "peft_config.r": [2, 4]}
    results = make_sweep(vary, peft_config=adapter(8), turn_steps=2).run()
    assert [result.state for result in results] == ["done"] * 4
    for result in results:
        given = {"peft_config": adapter(result.changes["peft_config.r"])}
        train_alone(result.name, given, learning_rate=result.changes["learning_rate"])
        folder = tmp_path / "sweep/arms" / result.name
        assert tools.equal_files(folder, tmp_path / result.name, "adapter_model.safetensors")
        assert tools.logs(folder) == tools.logs(tmp_path / result.name)


@pytest.mark.slow
def test_trainers_that_do_not_fit_are_made_anew(make_sweep, train_alone, tools, tmp_path, monkeypatch):
    monkeypatch.setattr("groupgrad.apps.sweep.arm_turns.MEMORY_SHARE", 0.0)
    for result in make_sweep({"learning_rate": [1e-2, 3e-2]}, turn_steps=2).run():
        train_alone(result.name, **result.changes)
        assert tools.equal_files(tmp_path / "sweep/arms" / result.name, tmp_path / result.name)


def test_only_the_last_checkpoint_is_kept_beside_those_that_were_asked_for(make_sweep, tmp_path):
    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"save_strategy": "steps", "save_steps": 3}, turn_steps=2)
    for result in sweep.run():
        folder = tmp_path / "sweep/arms" / result.name
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
