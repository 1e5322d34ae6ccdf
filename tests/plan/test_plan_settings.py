"""`groupgrad plan` reads sizes from the settings of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_output import recommendation

SMALL = {"model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 8192}


@pytest.fixture
def planned(shown_plan_of: Any) -> Any:
    """The output of `groupgrad plan` for a model of 400 million parameters."""
    return lambda *flags, code=0: shown_plan_of({**SMALL, **HEADS}, " ".join(map(str, flags)), code)


def test_a_step_that_would_cut_a_group_is_made_longer(planned: Any) -> None:
    shown = planned("--accumulation", 1, "--micro-batch", 6, "--device", "80GB").out
    assert "num_generations=8 does not divide the 6 completions of a generation batch, so 24 are planned." in shown
    assert recommendation(shown)[1]["gradient_accumulation_steps"] == 4
    assert "does not divide" not in planned("--device", "80GB").out


@pytest.fixture
def run_file(tmp_path: Path) -> Any:
    """Writes a run's YAML file with these settings, and returns its path."""

    def write(**settings: Any) -> str:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"dtype": "bfloat16", **settings}))
        return str(tmp_path / "run.yaml")

    return write


def ways_of(shown: str) -> dict[str, bool]:
    """The ways of the table, and for each whether it fits."""
    lines = shown.split("\n\n")[1].splitlines()[1:]
    return {line.split("  ")[0]: not line.endswith("does not fit") for line in lines}


def test_a_colocated_vllm_must_fit_beside_training(planned: Any, run_file: Any) -> None:
    """Full weights fit alone, beside a vLLM that sleeps and with a server, but not beside one that does not sleep."""
    colocate = {"use_vllm": True}
    shown = {}
    for name, settings in {
        "alone": {},
        "colocate": colocate,
        "asleep": {**colocate, "vllm_enable_sleep_mode": True},
        "server": {**colocate, "vllm_mode": "server"},
    }.items():
        shown[name] = planned("--config", run_file(**settings), "--device", "5.5GB", code=None).out
    assert {name: ways_of(text)["full"] for name, text in shown.items()} == {
        "alone": True,
        "colocate": False,
        "asleep": True,
        "server": True,
    }
    assert "vllm_gpu_memory_utilization=" in shown["asleep"] and "vllm_gpu_memory" not in shown["server"]
    again = planned("--use_vllm", "--dtype", "bfloat16", "--accumulation", "1", "--device", "5.5GB", code=None)
    served = planned("--config", run_file(**colocate), "--vllm_mode", "server", "--device", "5.5GB", code=None)
    assert (again.out, served.out) == (shown["colocate"], shown["server"]), "a flag wins"


def test_the_length_of_the_file_and_the_least_device_are_named(planned: Any, run_file: Any) -> None:
    file = run_file(use_vllm=True, vllm_max_model_length=2048)
    assert " with vllm_max_model_length=2048 leaves room" in planned("--config", file, "--device", "80GB").out
    assert " with vllm_max_model_length=768 leaves room" in planned("--device", "80GB").out
    shown = planned("--config", run_file(use_vllm=True), "--device", "1GB", code=1).out
    least = re.search(r"needs devices of ([\d.]+) GiB", shown)
    assert least is not None
    planned("--config", run_file(use_vllm=True), "--device", f"{float(least[1]) + 0.1:.1f}GiB")
    planned("--config", run_file(use_vllm=True), "--device", f"{float(least[1]) - 0.2:.1f}GiB", code=1)


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        ({"fsdp": True}, ["full, fsdp2", "LoRA, fsdp2"]),
        ({"fsdp": "full_shard", "use_peft": True}, ["LoRA, fsdp2"]),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, ["full, zero2", "LoRA, zero2", "4-bit, zero2"]),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}, "use_peft": True}, ["LoRA, zero3"]),
        ({"deepspeed": {}, "use_peft": True, "load_in_4bit": True}, ["4-bit"]),
    ],
)
def test_the_file_says_how_a_model_is_divided(
    settings: dict[str, Any], ways: list[str], planned: Any, run_file: Any
) -> None:
    assert list(ways_of(planned("--config", run_file(**settings), "--device", "80GB", "--devices", 2).out)) == ways


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"deepspeed": "nowhere.json"}, "deepspeed='nowhere.json' has no ZeRO stage from 0 to 3 that can be read"),
        ({"fsdp": True, "load_in_4bit": True}, "remove fsdp, deepspeed or load_in_4bit"),
    ],
)
def test_settings_of_the_file_that_cannot_be_planned_for(
    settings: dict[str, Any], text: str, planned: Any, capsys: Any, run_file: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        planned("--config", run_file(**settings), "--device", "80GB", "--devices", 2)
    assert ended.value.code == 2
    assert text in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_settings_that_are_not_considered_are_named_in_a_line(planned: Any, run_file: Any) -> None:
    file = run_file(learning_rate=1e-5, vllm_max_model_length=64, gradient_dtype="auto", max_steps=None)
    said = planned("--config", file, "--device", "80GB").err
    assert said == f"Not considered of {file}: learning_rate, vllm_max_model_length\n"
    assert planned("--config", run_file(use_vllm=True, vllm_max_model_length=1024), "--device", "80GB").err == ""


def test_a_micro_batch_grows_up_to_the_step_unless_it_is_asked_for(planned: Any) -> None:
    size = ["--device", "80GB", "--accumulation", "4"]
    for flags, rows, label in (([], 32, "  32\n"), (["--micro-batch", "8"], 8, "  8 (asked for)\n")):
        shown = planned(*size, *flags).out
        settings = recommendation(shown)[1]
        assert settings["per_device_train_batch_size"] == rows and settings["gradient_accumulation_steps"] == 32 // rows
        assert label in shown
    shown = planned("--device", "7GB", "--completion", "4096", "--micro-batch", "8").out
    assert recommendation(shown)[1]["per_device_train_batch_size"] < 8 and "full" in shown
    assert "asked for" not in next(line for line in shown.splitlines() if line.startswith("full"))


def test_set_is_a_setting_of_the_run_with_and_without_a_file(planned: Any, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("max_completion_length: 512\nfsdp: full_shard\n")
    adapter = ["--set", "use_peft=true", "--set", "model_init_kwargs.dtype=bfloat16"]
    alone = planned("--device", "80GB", "--completion", 512, *adapter).out
    assert re.findall(r"^(full|LoRA|4-bit) ", alone, re.MULTILINE) == ["LoRA"]
    assert planned("--device", "80GB", "--config", tmp_path / "run.yaml", *adapter, "--set", "fsdp=").out == alone
    for setting, problem in [
        ("use_pef=true", "unknown field 'use_pef'; did you mean use_peft?"),
        ("optim=lion_32bit", "optim='lion_32bit' cannot be planned for; it is none of adamw"),
    ]:
        with pytest.raises(SystemExit):
            planned("--device", "80GB", "--completion", 512, "--set", setting)
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize(("name", "own"), [("adamw_torch_fused", "adamw"), ("paged_adamw_8bit", "adamw_8bit")])
def test_an_optimizer_may_have_the_name_that_transformers_gives_it(name: str, own: str, planned: Any) -> None:
    shown = planned("--device", "80GB", "--optim", own).out
    assert planned("--device", "80GB", "--optim", name).out == shown
