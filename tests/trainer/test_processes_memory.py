"""Under data parallelism, each rank makes as many passes as its memory allows, and gradients are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_ranks import two_once

CASES = {
    "full, middle on one": (1,),
    "full, forward on one": (1,),
    "full, forward on both once": (0, 1),
    "lora, middle on both": (0, 1),
    "lora, scoring on one": (1,),
    "flat, scoring on one": (0,),
}
"""The ranks whose memory runs out."""
SENT_EARLY = ["sent_early_torch.float32", "sent_early_torch.bfloat16"]
QUICK = ["full", "full, middle on one", "resumed", "joined", "half_precision_sum", *SENT_EARLY]
QUICK.append("hopeless_middle")
SLOW = ["full", "lora", "flat", *list(CASES)[1:], "hopeless_entropies", "hopeless_evaluation"]


def found_in(factory: pytest.TempPathFactory, name: str, cases: list[str]) -> Any:
    def action(out: Any) -> dict[str, Any]:
        import oom_ranks  # which sees the rank and changes passes as it is imported

        return oom_ranks.found(cases, out)

    return two_once(factory, name, action)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and results of two processes."""
    return found_in(tmp_path_factory, "oom", QUICK)


@pytest.fixture(scope="module")
def two_slow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of the slow cases."""
    return found_in(tmp_path_factory, "slow-oom", SLOW)


def results(two: Any, case: str) -> list[Any]:
    return [rank[case] for rank in two[1]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_runs_out_of_memory_changes_no_number(request, tools, case):
    """Final weights to 1e-6 relative and equal on both ranks, every logged number to 1e-5; the others do not notice."""
    out = request.getfixturevalue("two" if case in QUICK else "two_slow")
    (undisturbed, _), found = results(out, case.split(",")[0]), results(out, case)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert tools.relative(found[0]["weights"], undisturbed["weights"]) < 1e-6
    tools.assert_like(found[0]["log"], undisturbed["log"], 1e-5)
    for rank, result in enumerate(found):
        assert (result["failures"] > 0) == (rank in CASES[case])
        assert result["failures"] == 1 or "once" not in case or rank not in CASES[case]
        assert (result["half_made"] > 0) == ("middle" in case and rank in CASES[case])
        learned = rank in CASES[case] and case != "lora, scoring on one"  # where nothing is trained, nothing is learned
        assert (result["limit"] is not None) == learned


def test_what_a_rank_learned_of_its_memory_is_in_its_checkpoint(two):
    folder = two[0] / "run" / "short_full_middle_on_one" / "checkpoint-2"
    states = [torch.load(folder / f"groupgrad_state_{rank}.pt")["memory"]["limit"] for rank in range(2)]
    straight, resumed = results(two, "full, middle on one"), results(two, "resumed")
    assert states == [None, straight[1]["limit"]]
    assert states[1] > 0
    for before, after in zip(straight, resumed):
        assert torch.equal(before["weights"], after["weights"])
        assert (after["failures"], after["limit"]) == (0, before["limit"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["middle", "entropies", "evaluation"])
def test_a_row_that_does_not_fit_on_one_rank_ends_both(request, where):
    out = request.getfixturevalue("two" if f"hopeless_{where}" in QUICK else "two_slow")
    first, second = results(out, f"hopeless_{where}")
    said = "one row alone (1 completions," if where == "middle" else "scoring one row alone ("
    assert second["error"].startswith(f"RuntimeError: {said}")
    assert first["error"].startswith(f"RankError: stopped because rank 1 failed with RuntimeError: {said}")
    assert max(first["seconds"], second["seconds"]) < 60  # not the half hour of ddp_timeout


def test_gradients_sent_during_the_last_pass_are_those_sent_after_it(two):
    """Those sent after it are the float64 means, from rank 0's weights on, in every step, whether or not an evaluation
    came first; the weights are bit-equal in both ways."""
    first, second = results(two, "joined")
    assert len(first["before"]) == len(second["before"]) == 3
    for step in range(3):
        lists = (first["before"], second["before"], first["after"], second["after"])
        for mine, theirs, joined, other in zip(*(gradients[step] for gradients in lists)):
            mean = ((mine.double() + theirs.double()) / 2).float()
            assert torch.equal(joined, mean)
            assert torch.equal(joined, other)
        assert any(not torch.equal(*pair) for pair in zip(first["before"][step], second["before"][step]))
    for rank in (first, second):
        assert torch.equal(rank["weights"], results(two, "full")[0]["weights"])


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_gradients_are_sent_while_the_last_pass_runs(two, dtype):
    """Also where a rank's last pass runs out of memory or is left out, and where a rank fails, which all learn."""
    found = results(two, f"sent_early_{dtype}")
    for early, late in found:
        assert set(late["sent"]) == {0} and early["sent"][:2] == [0, 0]
        assert min(early["sent"][3], early["sent"][5]) > 0
        for step, pair in enumerate(zip(early["gradients"], late["gradients"])):
            for number, (one, other) in enumerate(zip(*pair)):
                assert (one is None) == (other is None) == (number >= 10), (step, number)
                assert one is None or torch.equal(one, other), (step, number)
        assert early["error"] == late["error"]
    assert [both[0]["error"] for both in found] == [
        "RankError: stopped because rank 1 failed with ValueError: no luck",
        "ValueError: no luck",
    ]
    for ours, theirs in zip(found[0][0]["gradients"], found[1][0]["gradients"]):
        assert all(torch.equal(one, other) for one, other in zip(ours[:10], theirs[:10]))


def test_ranks_join_as_they_are_told(two):
    """`ddp_bucket_cap_mb` bounds the pieces that travel, and `ddp_broadcast_buffers` leaves each rank its buffers."""
    found = results(two, "joined")
    assert [result["options"] for result in found] == [{"bucket_bytes": 2**20}] * 2
    assert [result["own"] for result in found] == [0.0, 1.0]


def test_half_precision_gradients_are_summed_and_averaged_in_float32(two):
    """The ranks' sums are 259 and 258, whose mean rounds to 258 in bfloat16, where numbers from 256 on are even.

    Sums in bfloat16 stay at 256; sums rounded before they are averaged give 260.
    """
    assert [float(rank) for rank in results(two, "half_precision_sum")] == [258.0, 258.0]
