"""State of a run in checkpoints."""

from __future__ import annotations

from typing import Any

from groupgrad import dist
from groupgrad.trainer.run_state import RunState


class Counter:
    """A callback with state."""

    def __init__(self, value: int = 0):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def join_states(self, states: Any) -> None:
        """Never called with as many ranks as before."""


def test_all_ranks_restore_or_none(tmp_path, monkeypatch, caplog):
    """If a folder has the files of the first node only, no rank restores, since the others could not."""
    RunState({"counter": Counter(3)}).save(tmp_path)
    monkeypatch.setattr(dist, "all_gather_objects", lambda mine: [mine, "groupgrad_state_1.pt"])
    counter = Counter()
    with caplog.at_level("WARNING", logger="groupgrad"):
        assert not RunState({"counter": counter}).load(tmp_path)
    assert counter.value == 0
    assert "(groupgrad_state_1.pt is missing)" in caplog.text


def test_what_all_ranks_share_is_written_once(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        RunState({"mine": Counter(10 + rank)}, shared={"ours": Counter(5)}).save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "groupgrad_state_0.pt",
        "groupgrad_state_1.pt",
        "groupgrad_state_shared.pt",
    ]
    mine, ours = Counter(), Counter()
    assert RunState({"mine": mine}, shared={"ours": ours}).load(tmp_path)
    assert (mine.value, ours.value) == (11, 5)


def test_nothing_is_restored_without_the_shared_file(tmp_path, caplog):
    RunState({"mine": Counter(1)}).save(tmp_path)
    mine = Counter()
    with caplog.at_level("WARNING", logger="groupgrad"):
        assert not RunState({"mine": mine}, shared={"ours": Counter()}).load(tmp_path)
    assert mine.value == 0
    assert "groupgrad_state_shared.pt is missing" in caplog.text
