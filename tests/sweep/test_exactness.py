"""An arm of a sweep has the weights and the metrics of the same configuration trained alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

VARY = {"learning_rate": [1e-2, 3e-2], "loss_type": ["grpo", "dapo"]}

CASES: dict[str, dict[str, Any]] = {
    # The schedule, the entropy coefficient and the numbers since the last log event differ from step to step.
    "plain": {
        "lr_scheduler_type": "cosine",
        "logging_steps": 4,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.1,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    "batches of two steps": {"steps_per_generation": 2, "logging_steps": 4},
    "reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
}


def assert_equal_to_runs_alone(results, train_alone, tools, tmp_path, settings, given=None):
    assert {result.state for result in results} == {"done"}
    folders = [tmp_path / "sweep/arms" / result.name for result in results]
    for result, folder in list(zip(results, folders))[:2]:
        train_alone(result.name, given, **settings, **result.changes)
        tools.assert_same(folder, tmp_path / result.name)
        assert len(tools.logs(folder)) >= 1
    assert not tools.equal_files(*folders[:2])


def test_arms_equal_runs_alone(make_sweep, train_alone, tools, tmp_path):
    """The last checkpoint stays, as do those that `save_steps` asks for."""
    results = make_sweep({"learning_rate": [1e-2, 3e-2]}, args=CASES["plain"], turn_steps=1).run()
    for result in results:
        kept = (tmp_path / "sweep/arms" / result.name).glob("checkpoint-*")
        assert sorted(path.name for path in kept) == ["checkpoint-3", "checkpoint-6"]
    assert_equal_to_runs_alone(results, train_alone, tools, tmp_path, CASES["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_arms_of_each_kind_equal_runs_alone(make_sweep, train_alone, arguments, tools, tmp_path, case):
    given: dict[str, Any] = {}
    if "eval_strategy" in CASES[case]:
        given["eval_dataset"] = arguments["train_dataset"].select(range(3))
    results = make_sweep(VARY, args=CASES[case], turn_steps=2, **given).run()
    assert len(results) == 4
    assert_equal_to_runs_alone(results, train_alone, tools, tmp_path, CASES[case], given)


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
        tools.assert_same(folder, tmp_path / result.name, "adapter_model.safetensors")
