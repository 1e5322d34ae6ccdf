"""Processes that train each row together (`context_parallel_size`) end where one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_cases
import tiny_vlms
import torch
from forked_ranks import forked_ranks, on_ranks, two_once

from groupgrad.errors import ConfigError
from groupgrad.scoring.layout import flat_layout
from groupgrad.scoring.self_check import LayoutReport
from groupgrad.trainer.build import context_group

FAST = ["grpo"]
NOT_HERE = ("images", "hybrid")  # models whose rows are not cut
SLOW = [case for case in rank_cases.CASES if case not in (*FAST, *NOT_HERE)]
OWN: dict[str, dict[str, Any]] = {
    "dapo": {"generation_batch_size": 32, "max_steps": 4, "eval": "sets", "eval_steps": 2},
    "grpo": {**rank_cases.CASES["grpo"], "eval": "sets", "eval_steps": 2},
    # One micro-batch a step is the same rows on one process and on a group.
    "bnpo": {**rank_cases.CASES["bnpo"], "micro_batches": 1},
}
"""Cases in another form than in `ranks.py`."""


def run(ranks: Any, case: str, out: Path, size: int) -> dict[str, Any]:
    """Trains the case to its end; with a checkpoint in its settings a resumed run comes to the same end."""
    settings = {**OWN.get(case, {}), "context_parallel_size": size}
    name = f"context_{case}" if case in OWN else case
    resume_from = ranks.CASES.get(name, {}).get("resume_from")
    trainer = ranks.build(name, out, **settings)
    trainer.train()
    if resume_from is not None:
        straight = ranks.HELP.weights(trainer.model)
        trainer = ranks.build(name, out, **settings)
        trainer.train(str(out / "run" / name / f"checkpoint-{resume_from}"))
        assert torch.equal(ranks.HELP.weights(trainer.model), straight)
    return {
        "weights": ranks.HELP.weights(trainer.model),
        "log": ranks.HELP.without_times(trainer.state.log_history),
        "tokens": sum(part.num_forward_tokens for part in trainer._micro_batches),
    }


def assert_equal(found: list[dict[str, Any]], expected: dict[str, Any], tools: Any) -> None:
    """Weights to 1e-5 relative and equal on all ranks, every logged number to 1e-5."""
    assert all(torch.equal(rank["weights"], found[0]["weights"]) for rank in found)
    assert tools.relative(found[0]["weights"], expected["weights"]) < 1e-5
    tools.assert_like(found[0]["log"], expected["log"], 1e-5)


def passes(ranks: Any, out: Path) -> list[tuple[int, int, int]]:
    """Rows, tokens of all ranks and tokens of this rank of each pass of a step."""
    settings = {"micro_batches": 1, "max_tokens_per_pass": 10_000, "max_steps": 1}
    trainer = ranks.build("passes", out, context_parallel_size=2, **settings)
    batches, computed, inner = [], [], trainer.batch_loss

    def watched(model: Any, batch: Any, **options: Any) -> Any:
        batches.append(batch)
        embedding = model.get_input_embeddings()
        handle = embedding.register_forward_pre_hook(lambda module, inputs: computed.append(inputs[0].numel()))
        result = inner(model, batch, **options)
        handle.remove()
        return result

    trainer.batch_loss = watched
    trainer.train()
    return [(b.num_rows, len(flat_layout(b).ids), tokens) for b, tokens in zip(batches, computed, strict=True)]


@pytest.fixture(scope="module")
def two(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The findings of two processes that train rows together."""

    def action(out: Path) -> dict[str, Any]:
        found = {case: run(ranks, case, out / "two", 2) for case in FAST}
        with pytest.raises(ConfigError) as caught:
            ranks.build("refused", out, context_parallel_size=2, hybrid="qwen3_5")
        return {**found, "passes": passes(ranks, out), "refused": str(caught.value)}

    return two_once(tmp_path_factory, "context", action)[1]


@pytest.mark.parametrize("case", FAST)
def test_two_processes_that_train_rows_together_equal_one(ranks, two, tools, tmp_path, case):
    """With a KL term, checkpointed layers and evaluation, or with one ratio a sequence."""
    found, alone = [rank[case] for rank in two], run(ranks, case, tmp_path / "one", 1)
    assert_equal(found, alone, tools)
    assert [rank["tokens"] for rank in found] == [alone["tokens"]] * 2  # each rank has the rows of both


def test_a_group_makes_a_pass_for_each_of_its_ranks(two):
    """A pass has about as many rows as one process has in a micro-batch, and each process half of their tokens."""
    first, second = (rank["passes"] for rank in two)
    assert len(first) == 2 and sum(rows for rows, _, _ in first) == 16
    assert all(4 <= rows <= 12 for rows, _, _ in first)
    for (rows, tokens, here), (same_rows, same_tokens, there) in zip(first, second):
        assert (rows, tokens) == (same_rows, same_tokens)
        assert here + there == tokens and abs(here - there) <= 2


def test_an_error_in_a_pass_of_one_rank_ends_both(ranks, tmp_path):
    """The other rank waits inside the same pass, where no agreement reaches it."""

    def action(rank: int) -> None:
        trainer = ranks.build("failing", tmp_path, context_parallel_size=2)
        inner = trainer.batch_loss

        def failing(*args: Any, **kwargs: Any) -> Any:
            if rank == 1 and trainer.state.global_step == 1:
                raise ZeroDivisionError("the second device is gone")
            return inner(*args, **kwargs)

        trainer.batch_loss = failing
        trainer.train()

    with forked_ranks(action, tmp_path) as two:
        codes = two.wait(60.0)
        assert None not in codes and 0 not in codes
        assert "ZeroDivisionError: the second device is gone" in two.log(0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2), (4, 4)])
def test_every_loss_and_kind_of_run(ranks, tools, tmp_path, num_ranks, size):
    """Also with several groups, which give rows to each other."""
    cases = [*FAST, *SLOW]
    folder = tmp_path / "ranks"
    folder.mkdir()

    def action(rank: int) -> list[dict[str, Any]]:
        return [run(ranks, case, folder, size) for case in cases if (num_ranks, case) != (4, "bnpo")]

    results = on_ranks(action, tmp_path, num_ranks, timeout_s=1500, connect=False)
    for number, case in enumerate([case for case in cases if (num_ranks, case) != (4, "bnpo")]):
        assert_equal([rank[number] for rank in results], run(ranks, case, tmp_path / "one", 1), tools)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_four_processes_train_a_row_of_16384_tokens(tmp_path, monkeypatch):
    """To the weights of one process, with at most 40 % of its activations on each."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import context_parallel

    (alone,), four = (context_parallel.measure(tmp_path / str(n), n, 16_384) for n in (1, 4))
    start, end = alone["weights"]
    assert float((end - start).norm() / start.norm()) > 1e-4
    for rank in four:
        assert float((rank["weights"][1] - end).norm() / end.norm()) < 1e-5
        assert float((rank["weights"][1] - end).norm() / (end - start).norm()) < 1e-3
        assert rank["saved_bytes"] < 0.4 * alone["saved_bytes"]
        assert rank["peak_bytes"] < 0.4 * alone["peak_bytes"]
    for number, results in ((1, [alone]), (4, four)):
        saved = max(rank["saved_bytes"] for rank in results)
        assert context_parallel.predicted(number, 16_384) == pytest.approx(saved, rel=0.1)


# ------------------------------------------------------------------------------------------------------- refusals


def test_a_model_with_recurrent_layers_is_refused_on_every_process(two):
    first, second = (rank["refused"] for rank in two)
    assert first == second
    assert "context_parallel_size=2 cuts the tokens of a row" in first and "recurrent layers" in first


FLAT, DENSE = LayoutReport("shared", True, None, 0.0), LayoutReport("dense", False, "it is compiled", None)


@pytest.mark.parametrize(
    ("changes", "layout", "aux_loss", "text"),
    [
        ({}, DENSE, False, "runs on padded rows only: it is compiled. Set context_parallel_size=1"),
        ({"attention_dropout": 0.1}, FLAT, False, "has an attention dropout of 0.1. Set disable_dropout=True"),
        ({}, FLAT, True, "counts all tokens of a pass. Set router_aux_loss_coef=0"),
    ],
)
def test_a_model_whose_tokens_must_stay_together_is_refused(make_model, changes, layout, aux_loss, text):
    config: Any = SimpleNamespace(context_parallel_size=2, ddp_timeout=60)
    with pytest.raises(ConfigError, match="context_parallel_size=2 cuts the tokens of a row over") as caught:
        context_group(config, make_model(0, **changes), layout, aux_loss=aux_loss)
    assert text in str(caught.value)


def test_a_model_that_takes_images_is_refused():
    config: Any = SimpleNamespace(context_parallel_size=2, ddp_timeout=60)
    with pytest.raises(ConfigError, match="takes images, whose tokens must stay together"):
        context_group(config, tiny_vlms.build("qwen2_vl").model, FLAT, aux_loss=False)
