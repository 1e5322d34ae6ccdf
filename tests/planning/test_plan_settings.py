"""The settings that `groupgrad plan` prints make up a `GRPOConfig`."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from groupgrad.cli.main import main
from groupgrad.config import GRPOConfig
from groupgrad.planning import shapes
from groupgrad.planning.shapes import model_shape, read_config

SMALL = {"model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 8192}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: Any) -> Any:
    """Runs `groupgrad plan` on a model that is measured once, and returns its exit code."""
    folder, measured = tmp_path_factory.mktemp("model"), functools.cache(_measured)
    (folder / "config.json").write_text(json.dumps({**SMALL, **HEADS}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "model_shape", lambda name, config, half: measured(name, half))
        yield lambda *flags: main(["plan", "--model", str(folder), *map(str, flags)])


def _measured(name: str, half: bool) -> Any:
    return model_shape(name, read_config(name), half=half)


def settings_of(shown: str) -> dict[str, Any]:
    """The settings of the line `Recommended: ...`."""
    line = re.search(r"Recommended: .*", shown)
    assert line is not None, shown
    return {name: yaml.safe_load(value) for name, value in re.findall(r"(\w+)=([^\s,]*[^\s,.])", line[0])}


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    "flags",
    [[], ["--accumulation", 1], ["--micro-batch", 6], ["--micro-batch", 5, "--num-generations", 4], ["--rows", 48]],
)
def test_the_printed_settings_make_up_a_configuration(
    flags: list[Any], devices: int, planned: Any, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOConfig, "world_size", devices)
    group, found = 4 if "--num-generations" in flags else 8, set()
    for size in ("7GB", "8GB", "10GB", "16GB", "80GB"):
        assert planned(*flags, "--devices", devices, "--device", size, "--completion", 4096) == 0
        settings = settings_of(capsys.readouterr().out)
        settings.pop("vllm_gpu_memory_utilization", None)
        settings.pop("vllm_max_model_length", None)
        config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, num_generations=group, **settings)
        assert config.generation_batch_size_resolved % group == 0
        found.add(
            (
                config.per_device_train_batch_size,
                config.per_device_train_batch_size * config.gradient_accumulation_steps,
            )
        )
    assert len({rows for rows, _ in found}) > 1, "the sizes of devices make a difference"
    assert len({step for _, step in found}) == 1, "the step keeps its completions"


def test_a_step_that_would_cut_a_group_is_made_longer(planned: Any, capsys: Any) -> None:
    assert planned("--accumulation", 1, "--micro-batch", 6, "--device", "80GB") == 0
    shown = capsys.readouterr().out
    assert "num_generations=8 does not divide the 6 completions of a generation batch, so 24 are planned." in shown
    assert settings_of(shown)["gradient_accumulation_steps"] == 4
    assert planned("--device", "80GB") == 0
    assert "does not divide" not in capsys.readouterr().out
