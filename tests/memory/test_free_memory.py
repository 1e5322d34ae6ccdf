"""Free memory of a device, within the limit of the process's container."""

from __future__ import annotations

from pathlib import Path

import torch

from groupgrad.memory import free_memory
from groupgrad.memory.free_memory import free_bytes


def test_free_memory_is_that_of_the_device():
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


def test_a_control_group_limits_free_memory(monkeypatch, tmp_path):
    texts = {"memory.max": "5000\n", "memory.current": "2500\n", "memory.stat": "anon 7\ninactive_file 500\n"}

    def read(self: Path) -> str:
        if self.name not in texts:
            raise FileNotFoundError(self.name)
        return texts[self.name]

    monkeypatch.setattr(Path, "read_text", read)
    assert free_bytes(torch.device("cpu")) == 3000
    texts["memory.max"] = "max\n"
    assert free_bytes(torch.device("cpu")) > 2**20


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(free_memory, "_cgroup_free_bytes", lambda: 8000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == 2000
