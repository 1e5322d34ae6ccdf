"""The device onto which a policy is loaded by its name."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad import GRPOConfig
from groupgrad.models import load
from groupgrad.trainer import build


@pytest.mark.parametrize(
    ("ranks", "sharded_by", "expected"), [(1, "", True), (8, "", True), (8, "fsdp", False), (8, "deepspeed", False)]
)
def test_a_rank_with_a_whole_model_loads_it_onto_its_device(ranks, sharded_by, expected, monkeypatch, tmp_path):
    """A model that is loaded into host memory first takes it there once for each rank."""
    asked: list[bool] = []

    def load_policy(*_args: Any, on_device: bool, **_options: Any) -> None:
        asked.append(on_device)

    monkeypatch.setattr(load, "load_policy", load_policy)
    monkeypatch.setattr(GRPOConfig, "world_size", property(lambda self: ranks))
    monkeypatch.setattr(build, "uses_fsdp", lambda config: sharded_by == "fsdp")
    monkeypatch.setattr(build, "uses_deepspeed", lambda config: sharded_by == "deepspeed")
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_train_batch_size=8)
    build._load_model("a/model", config, None)
    assert asked == [expected]
