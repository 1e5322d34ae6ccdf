"""`groupgrad plan` recommends what the trainer's rules accept, and says how to start it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from plan_output import recommendation

from groupgrad import compat
from groupgrad.apps.cli.launch import launch_command
from groupgrad.config import GRPOConfig
from groupgrad.config.rules import problems

SEVEN_BILLION = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1_000_000,
    "tie_word_embeddings": False,
}
SERVER = "--use_vllm --vllm_mode server"
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit"}


@pytest.fixture
def planned(shown_plan_of: Any) -> Any:
    """The output of `groupgrad plan` for Qwen2.5-7B's sizes, or of further ones, in bfloat16."""
    return lambda words, code=0, **sizes: shown_plan_of(SEVEN_BILLION | sizes, f"--dtype bfloat16 {words}", code)


def accepted(shown: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recommended way; the configuration of what is printed breaks none of the trainer's rules."""
    name, settings = recommendation(shown)
    flags = dict(re.findall(r"--([\w-]+) (\S+)", words))
    devices = int(flags.get("devices", 1))
    monkeypatch.setattr(GRPOConfig, "world_size", devices)
    profile = _launched(shown, devices, monkeypatch)
    if profile.get("fsdp_config"):
        settings["fsdp"] = True
    if SERVER in words:
        settings |= {"use_vllm": True, "vllm_mode": "server"}
    settings["optim"] = OPTIMIZERS.get(flags.get("optim", "adamw"), flags.get("optim"))
    settings["max_completion_length"] = int(flags.get("completion", 256))
    config = GRPOConfig(str(folder), use_cpu=True, bf16=False, **settings)
    if stage := profile.get("deepspeed_config", {}).get("zero_stage"):
        config.deepspeed = {"zero_optimization": {"stage": stage}}
    assert problems(config) == [] and config.generation_batch_size_resolved % 8 == 0
    assert name.endswith(f"zero{stage}") if stage else "zero" not in name
    assert name.endswith("fsdp2") == bool(settings.get("fsdp"))
    return name


def _launched(shown: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The launcher's configuration file that the flags at the end of the recommendation choose."""
    monkeypatch.setattr(compat, "is_available", lambda name: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    start = re.search(r"Recommended: .* Start it with groupgrad train (.*)\.$", shown, re.MULTILINE)
    assert (start is None) == (devices == 1)
    if start is None:
        return {}
    command = launch_command(start[1].split())
    assert command is not None and command[5:7] == ["--num_processes", str(devices)]
    return yaml.safe_load(Path(command[4]).read_text())


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--device 80GB --devices 8 --set fsdp=true", "full, fsdp2"),
        ("--device 80GB --devices 8 --set fsdp=true --use_vllm --vllm_mode server", "full, fsdp2"),
        ("--device 22GB --devices 8 --use_vllm --vllm_mode server", "full, fsdp2"),
        ("--device 27GB --devices 8 --use_vllm --vllm_mode server", "full, zero3"),
        ("--device 22GB --devices 8 --optim sgd", "full, fsdp2"),
        ("--device 22GB --devices 8 --optim adamw_8bit", "LoRA"),
        ("--device 22GB --devices 8 --optim adafactor", "LoRA"),
        ("--device 30GB --devices 8 --use_vllm", "LoRA, zero3"),
        ("--device 80GB --devices 8 --completion 8192", "full, zero1"),
        ("--device 80GB --devices 8 --completion 8192 --use_vllm", "full, zero1"),
        ("--device 80GB --devices 2 --optim adamw_8bit", "full"),
        ("--device 80GB", "LoRA"),
        ("--device 80GB --devices 3 --micro-batch 6", "full, zero1"),
    ],
)
def test_the_trainer_accepts_what_is_recommended(
    words: str, name: str, planned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert accepted(planned(words).out, words, tmp_path, monkeypatch) == name


def test_fsdp_is_left_out_where_the_trainer_refuses_it(planned: Any) -> None:
    assert "fsdp2" not in planned("--device 80GB --devices 8 --use_vllm").out
    shown = planned("--device 80GB --devices 16").out
    assert "full, fsdp2" in shown and "--num-processes 16" in shown
    assert shown.endswith(" on one machine, or accelerate launch --num_machines on each of several.\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--devices 8 --use_vllm --set fsdp=true", "and not with vLLM on the training devices"),
        ("--devices 8 --set fsdp=true --set optim=paged_adamw_8bit", "fsdp goes with the optimizers adamw and sgd"),
        (
            "--devices 8 --use_vllm --vllm-tensor-parallel-size 3",
            "8 training ranks cannot be shared out in groups",
        ),
        ("--devices 8 --use_vllm --vllm-tensor-parallel-size 8", "28 attention heads cannot be shared out in 8"),
    ],
)
def test_settings_that_leave_no_way_cannot_be_planned_for(words: str, text: str, planned: Any) -> None:
    shown = planned(f"--device 80GB {words}", code=2)
    assert text in re.sub(r"\s+", " ", shown.err) and shown.out == ""


def test_the_least_device_is_named(planned: Any) -> None:
    """Weights in 4 bits beside a colocated vLLM need more than 24 GB: those of vLLM stay whole."""
    assert "needs devices of 25.5 GiB" in planned("--device 24GB --completion 1024 --use_vllm", code=1).out


def test_the_table_has_the_share_of_a_colocated_vllm(planned: Any) -> None:
    words = "--device 80GB --devices 8 --completion 8192"
    shown = planned(f"{words} --use_vllm").out
    rows = {line[:16].strip(): line[16:].split() for line in shown.split("\n\n")[1].splitlines()}
    assert rows["GiB on a device"][9:] == ["vLLM", "micro-batch"]
    share = re.search(r"vllm_gpu_memory_utilization=([\d.]+)", shown)
    assert share is not None and float(rows["full, zero1"][9]) == round(float(share[1]) * 80e9 / 2**30, 2)
    # At least 2 bytes a weight, a tenth of that as a workspace, and a row of 8,192 + 512 tokens.
    least = 2.2 * 7_615_616_512 + (8192 + 512) * 28 * 2 * 4 * 128 * 2
    assert rows["full"][9:] == [f"{least / 2**30:.2f}", "does", "not", "fit"]
    assert " vLLM " not in planned(words).out.split("\n\n")[1]
