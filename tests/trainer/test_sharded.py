"""Processes that share a model, by FSDP 2 or DeepSpeed ZeRO-3, compute what one process does with the whole model.

ZeRO-3 needs DeepSpeed, which is no part of the development environment (`pip install -e .[deepspeed]`).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded_ranks as script
import torch
from forked_ranks import results_of, run_on, two_once
from made_once import made_once
from transformers import AutoModelForImageTextToText

from groupgrad.models.weights import checkpoint_weights

SCRIPT = Path(__file__).with_name("sharded_ranks.py")
SLOW = [pytest.mark.slow, pytest.mark.timeout(600)]
ZERO = [*SLOW, pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")]
FAST = ["cut", "too_large"]
MORE = [case for case in script.CASES if case not in FAST]
TOGETHER = {"fsdp2": [FAST, MORE], "zero3": [[case for case in MORE + FAST if case != "offload"]]}
"""Cases of each kind that two processes run one after the other. The processes end with `too_large`."""
CASES = [
    pytest.param(kind, case, marks=ZERO if kind == "zero3" else SLOW * (place > 0))
    for kind, groups in TOGETHER.items()
    for place, cases in enumerate(groups)
    for case in cases
    if case != "too_large"
]
KINDS = ["fsdp2", pytest.param("zero3", marks=ZERO)]
SLOW_KINDS = [pytest.param("fsdp2", marks=SLOW), pytest.param("zero3", marks=ZERO)]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def one(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`one(case)` makes the run in this process."""
    out, made = tmp_path_factory.mktemp("one"), {}

    def make(case: str) -> dict[str, Any]:
        if case not in made:
            trainer = script.build(case, out, None)
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
        if kind == "zero3":
            folder = made_once(tmp_path_factory, kind, lambda out: run_on(2, SCRIPT, out, *cases, timeout_s=500))
            ranks = results_of(folder, 2)
        else:
            folder, ranks = two_once(tmp_path_factory, f"{kind}-{cases[0]}", partial(script.found, kind, cases))
        return [{**rank[case], "folder": folder} for rank in ranks]

    return found


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_two_processes_that_share_a_model_equal_one(one, two, tools, kind, case):
    """Final weights to 1e-5 relative and equal on both ranks, every logged number to 1e-4."""
    found, expected = two(kind, case), one(case)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert tools.relative(found[0]["weights"], expected["weights"]) < 1e-5
    for rank in found:
        assert rank["names"] == expected["names"]
        assert rank["log"][-1]["train_loss"] == pytest.approx(expected["log"][-1]["train_loss"], abs=1e-5, rel=1e-4)
        # What is known from sampling is computed again, and no gap to it is measured; modules sample from shards.
        tools.assert_like(
            rank["log"], expected["log"], 1e-4, without=["sampling/path/"], optional=["sampling/logp_mismatch"]
        )


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_a_model_that_takes_images_is_saved_as_other_programs_read_it(two, tools, kind):
    """Its weights have other names in files than in memory."""
    result = two(kind, "images")[0]
    saved = AutoModelForImageTextToText.from_pretrained(result["folder"] / "final")
    assert torch.equal(tools.weights(saved), result["weights"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_pass_is_bounded_on_all_ranks_together(two, kind):
    """The ranks make equally many passes, and more than the four of two steps of two micro-batches."""
    first, second = (rank["passes"] for rank in two(kind, "cut"))
    assert first == second > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_does_not_fit_ends_all_processes(two, kind):
    first, second = (rank["error"] for rank in two(kind, "too_large"))
    assert re.match(r"RuntimeError: a pass .* does not fit .* one of the 2 processes .*max_tokens_per_pass=\d", second)
    assert re.match(r"RankError: stopped because rank 1.* failed with RuntimeError: a pass .* does not fit", first)


@pytest.mark.parametrize("kind", SLOW_KINDS)
def test_activations_that_do_not_fit_on_one_rank_are_recomputed_on_all(two, kind):
    """Ranks that share a model compute it in the same way; `by_need` leaves rank 1 alone without memory."""
    assert [rank["recomputes"] for rank in two(kind, "by_need")] == [True, True]
