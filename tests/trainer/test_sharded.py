"""Processes that share a model, by FSDP 2 or DeepSpeed ZeRO-3, compute what one process does with the whole model.

ZeRO-3 needs DeepSpeed, which is no part of the development environment (`pip install -e .[deepspeed]`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import script_on_ranks
from made_once import made_once
from transformers import AutoModelForImageTextToText
from two_ranks import run_on

from groupgrad.models.weights import checkpoint_weights

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
ZERO = [*SLOW, pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
FAST = ["middle_on_one", "images", "offload", "by_need", "hopeless"]
MORE = [
    "plain",
    "adapter",
    "no_signal",
    "drawn_again",
    "cut",
    "forward_on_one",
    "middle_on_both",
    "images_checkpointing",
]
TOGETHER = {"fsdp2": [FAST, MORE], "zero3": [[case for case in FAST + MORE if case != "offload"]]}
"""Cases of each kind that two processes run one after the other."""
CASES = [
    pytest.param(kind, case, marks=ZERO if kind == "zero3" else SLOW * (place > 0))
    for kind, groups in TOGETHER.items()
    for place, cases in enumerate(groups)
    for case in cases
    if case != "hopeless"
]
KINDS = ["fsdp2", pytest.param("zero3", marks=ZERO)]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("sharded_ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {*FAST, *MORE} == set(module.CASES)
    return module


@pytest.fixture(scope="module")
def one(script: Any, ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`one(case)` makes the run in this process."""
    out, made = tmp_path_factory.mktemp("one"), {}

    def make(case: str) -> dict[str, Any]:
        if case not in made:
            trainer = script.build(ranks, case, out, None)
            trainer.train()
            log = ranks.HELP.without_times(trainer.state.log_history)
            names = [name for name, _ in checkpoint_weights(trainer.model, shapes_only=True)]
            made[case] = {"weights": ranks.HELP.weights(trainer.model), "log": log, "names": names}
        return made[case]

    return make


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Results]:
    """`two(kind, case)`: what the two processes ended with."""

    def found(kind: str, case: str) -> Results:
        cases = next(tuple(cases) for cases in TOGETHER[kind] if case in cases)
        # DeepSpeed reads what its launcher puts into the environment.
        make = partial(run_on if kind == "zero3" else script_on_ranks, 2, SCRIPT, timeout_s=500)
        folder = made_once(tmp_path_factory, f"{kind}-{cases[0]}", lambda out: make(out, kind, *cases))
        ranks = [torch.load(folder / f"{case}_{rank}.pt", weights_only=False) for rank in range(2)]
        return [{**rank, "folder": folder} for rank in ranks]

    return found


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_two_processes_that_share_a_model_equal_one(one, two, tools, kind, case):
    """Final weights to 1e-5 relative and equal on both ranks, every logged number to 1e-4."""
    found, expected = two(kind, case), one(case)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert tools.relative(found[0]["weights"], expected["weights"]) < 1e-5
    for rank in found:
        assert rank["names"] == expected["names"]
        assert len(rank["log"]) == len(expected["log"]) > 2
        assert rank["log"][-1]["train_loss"] == pytest.approx(expected["log"][-1]["train_loss"], abs=1e-5, rel=1e-4)
        for entry, wanted in zip(rank["log"][:-1], expected["log"][:-1]):
            # What is known from sampling is computed again, and no gap to it is measured; modules sample from shards.
            entry, wanted = (
                {k: v for k, v in numbers.items() if not k.startswith("sampling/path/")} for numbers in (entry, wanted)
            )
            wanted = {key: value for key, value in wanted.items() if key != "sampling/logp_mismatch" or key in entry}
            assert entry == pytest.approx(wanted, abs=1e-4, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_takes_images_is_saved_as_other_programs_read_it(two, tools, kind):
    """Its weights have other names in files than in memory."""
    result = two(kind, "images")[0]
    saved = AutoModelForImageTextToText.from_pretrained(result["folder"] / "final")
    assert torch.equal(tools.weights(saved), result["weights"])


@pytest.mark.parametrize(
    ("kind", "case", "short"),
    [
        pytest.param(kind, case, short, marks=ZERO if kind == "zero3" else SLOW * (case not in FAST))
        for kind in TOGETHER
        for case, short in {"middle_on_one": {0}, "forward_on_one": {1}, "middle_on_both": {0, 1}}.items()
    ],
)
def test_a_rank_that_runs_out_of_memory_cuts_its_micro_batches(two, kind, case, short):
    """It fails until its parts fit, and later micro-batches are cut beforehand; the others keep their sizes."""
    for rank, result in enumerate(two(kind, case)):
        assert bool(result["failures"]) == (result["limit"] is not None) == (rank in short)
        assert result["failures"] < 6


@pytest.mark.parametrize("kind", [pytest.param("fsdp2", marks=SLOW), KINDS[1]])
def test_the_size_of_a_pass_is_bounded_on_all_ranks_together(two, kind):
    """The ranks make equally many passes, and more than without `max_tokens_per_pass`."""
    counts = {case: [rank["passes"] for rank in two(kind, case)] for case in ("plain", "cut")}
    assert counts["plain"] == [4, 4]  # two steps of two micro-batches
    assert counts["cut"][0] == counts["cut"][1] > 4


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_that_does_not_fit_ends_all_processes(two, kind):
    first, second = (rank["error"] for rank in two(kind, "hopeless"))
    assert second.startswith("RuntimeError: ") and "does not fit into memory" in second
    assert first.startswith("RankError: stopped because rank 1 failed with RuntimeError: ")


@pytest.mark.parametrize("kind", KINDS)
def test_activations_that_do_not_fit_on_one_rank_are_recomputed_on_all(two, kind):
    """Ranks that share a model compute it in the same way; `by_need` leaves rank 1 alone without memory."""
    assert [rank["recomputes"] for rank in two(kind, "by_need")] == [True, True]
