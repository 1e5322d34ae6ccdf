"""The state of a run beside its weights."""

from __future__ import annotations

from typing import Any

from groupgrad import dist
from groupgrad.callbacks import RunState


class Counter:
    """Something with state."""

    def __init__(self, value: int = 0):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_state_comes_back(tmp_path):
    RunState({"counter": Counter(3)}).save(tmp_path / "checkpoint-1")
    counter = Counter()
    assert RunState({"counter": counter}).load(tmp_path / "checkpoint-1")
    assert counter.value == 3


def test_all_ranks_restore_or_none(tmp_path, monkeypatch, caplog):
    """Folders that hold the first node's files alone: were some ranks to restore, they would not meet the others."""
    RunState({"counter": Counter(3)}).save(tmp_path)
    monkeypatch.setattr(dist, "all_gather_objects", lambda mine: [mine, "groupgrad_state_1.pt"])
    counter = Counter()
    with caplog.at_level("WARNING", logger="groupgrad"):
        assert not RunState({"counter": counter}).load(tmp_path)
    assert counter.value == 0
    assert "(groupgrad_state_1.pt is missing)" in caplog.text
