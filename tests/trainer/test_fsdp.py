"""Processes that share a model by FSDP compute what one process does, and their checkpoints fit any number of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsdp_ranks as script
import pytest
import ranks
import torch
from forked_ranks import on_ranks, two_once
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from groupgrad.checkpoints.choosing import choose
from groupgrad.checkpoints.manifest import Manifest
from groupgrad.errors import CheckpointError

SAVED = ["saved", pytest.param("saved_lora", marks=pytest.mark.slow)]
SLOW = [case for case in script.CASES if not case.startswith("saved") and case not in script.EXTRA]
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`one(case)` makes the run in this process, without FSDP, perhaps with other settings."""
    out, made = tmp_path_factory.mktemp("one"), {}

    def make(case: str, **changes: Any) -> dict[str, Any]:
        key = case, *changes.items()
        if key not in made:
            trainer = script.build(case, out, save_strategy="no", **changes)
            trainer.train()
            made[key] = script.result(trainer)
        return made[key]

    return make


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Results]]:
    """`two(case)`: the folder of two processes that saved, and what they ended with."""

    def found(case: str) -> tuple[Path, Results]:
        folder, ranks = two_once(tmp_path_factory, f"fsdp-{case}", lambda out: script.found([case], out))
        return folder, [rank[case] for rank in ranks]

    return found


def on(num_ranks: int, out: Path, cases: list[str], checkpoint: Path | None = None) -> dict[str, Results]:
    """Runs the cases, from `checkpoint` on if there is one: what the ranks ended with, by case."""
    out.mkdir(exist_ok=True)
    make = lambda rank: script.found(cases, out, checkpoint)  # noqa: E731
    ranks = on_ranks(make, out, num_ranks, timeout_s=500, connect=False)
    return {case: [rank[case] for rank in ranks] for case in cases}


def assert_equal(found: Results, expected: dict[str, Any], tools: Any) -> None:
    """Weights to 1e-5 relative and equal on all ranks, every logged number to 1e-5."""
    assert all(torch.equal(rank["weights"], found[0]["weights"]) for rank in found)
    assert tools.relative(found[0]["weights"], expected["weights"]) < 1e-5
    # What is known from sampling is computed again, and no gap to it is measured. Rows with images are decoded by the
    # modules, and one of the processes may have none.
    tools.assert_like(
        found[0]["log"], expected["log"], 1e-5, without=["sampling/path/"], optional=["sampling/logp_mismatch"]
    )
    assert list(found[0]["pushed"]) == list(expected["pushed"])
    for name, tensor in expected["pushed"].items():
        torch.testing.assert_close(found[0]["pushed"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", SAVED)
def test_two_processes_with_shards_equal_one(one, two, tools, case):
    """The native engine samples, and training uses the layout with shared prompts and the tiled head."""
    _, found = two(case)
    assert_equal(found, one(case), tools)
    for rank in found:
        is_sharded, own, all_of_them = rank["sharded"]
        assert is_sharded and 0.4 * all_of_them < own < 0.6 * all_of_them
        assert (rank["engine"], rank["layout"].layout, rank["layout"].tiled_head) == ("native", "shared", True)


@pytest.mark.parametrize("case", SAVED)
def test_a_resumed_run_continues_bit_for_bit(two, case):
    for rank in two(case)[1]:
        assert torch.equal(rank["again"]["weights"], rank["weights"])
        assert rank["again"]["log"][:-1] == rank["log"][:-1]


def test_what_save_model_writes_is_whole(two, tools):
    saved = AutoModelForCausalLM.from_pretrained(two("saved")[0] / "run" / "fsdp_saved" / "final")
    assert type(saved).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(tools.weights(saved), two("saved")[1][0]["weights"])


@pytest.mark.parametrize("case", SAVED)
def test_a_checkpoint_in_shards_is_resumed_on_one_process(two, tools, tmp_path, case):
    trainer = script.build(case, tmp_path, save_strategy="no")
    folder, found = two(case)
    trainer.train(str(folder / "run" / f"fsdp_{case}" / "checkpoint-2"))
    assert tools.relative(tools.weights(trainer.model), found[0]["weights"]) < 1e-5


OTHER_MODELS = {
    "named": [
        ({"num_hidden_layers": 3}, r"not trained then: model\.layers\.2\."),
        ({"tie_word_embeddings": True}, r"trained then and not now: lm_head\.weight"),
        ({"intermediate_size": 64}, r"mlp\.gate_proj\.weight is float32 48x32 there and float32 64x32 here"),
    ],
    "older": [
        ({"num_hidden_layers": 3}, r"Missing key in checkpoint state_dict: model\.layers\.2\."),
        ({"intermediate_size": 64}, r"Size mismatch between saved torch\.Size\(\[32, 48\]\) .*mlp\.down_proj\.weight"),
    ],
}


@pytest.mark.parametrize("age", OTHER_MODELS)
def test_a_checkpoint_in_shards_of_another_model_is_refused(two, tmp_path, age):
    """Also one of an earlier release, which does not name what is trained, so that torch finds the difference."""
    source = two("saved")[0] / "run" / "fsdp_saved" / "checkpoint-2"
    checkpoint = Path(shutil.copytree(source, tmp_path / "checkpoint-2"))
    if age == "older":
        found = Manifest.read(checkpoint)
        assert found is not None and found.trained is not None
        replace(found, trained=None, reference=None).write(checkpoint)
    for changes, text in OTHER_MODELS[age]:
        other = ranks.BASE.make_model(0, initializer_range=0.15, **changes)
        with pytest.raises((CheckpointError, RuntimeError, ValueError), match=text):
            script.build("saved", tmp_path / "other", save_strategy="no", model=other).train(str(checkpoint))


def test_a_checkpoint_lists_its_shards_and_a_damaged_one_is_named(two, tmp_path):
    source = two("saved")[0] / "run" / "fsdp_saved"
    found: Any = choose(source, True)
    manifest = found.manifest
    shards = {f"sharded/{part}/__{rank}_0.distcp" for part in ("model", "optimizer") for rank in range(2)}
    assert shards < set(manifest.files) and "model.safetensors" not in manifest.files
    path = source / "checkpoint-3" / "sharded" / "model" / "__1_0.distcp"
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:-7] + b"damaged")
        with pytest.raises(CheckpointError, match=r"sharded/model/__1_0\.distcp has other content"):
            choose(source, str(source / "checkpoint-3"))
    finally:
        path.write_bytes(kept)


def test_the_size_of_a_pass_is_bounded_on_all_ranks_together(one, two, tools):
    """The ranks make equally many passes, and more than the four of two steps of two micro-batches."""
    _, found = two("cut")
    assert_equal(found, one("cut"), tools)
    assert found[0]["passes"] == found[1]["passes"] > 4


def test_a_pass_that_does_not_fit_ends_all_processes(two):
    first, second = (rank["error"] for rank in two("too_large")[1])
    assert re.match(r"RuntimeError: a pass .* does not fit .* one of the 2 processes .*max_tokens_per_pass=\d", second)
    assert re.match(r"RankError: stopped because rank 1.* failed with RuntimeError: a pass .* does not fit", first)


@pytest.mark.slow
def test_activations_that_do_not_fit_on_one_rank_are_recomputed_on_all(one, two, tools):
    """Ranks that share a model compute it in the same way; `by_need` leaves rank 1 alone without memory."""
    _, found = two("by_need")
    assert_equal(found, one("by_need"), tools)
    assert [rank["recomputes"] for rank in found] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_loss_and_kind_of_run(one, tools, tmp_path, num_ranks):
    """A model that takes images is saved as other programs read it: its weights have other names in files."""
    found = on(num_ranks, tmp_path, SLOW)
    images = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "fsdp_images" / "final")
    assert torch.equal(tools.weights(images), found["images"][0]["weights"])
    for case in SLOW:
        split = {"micro_batches": num_ranks} if case == "bnpo" else {}
        assert_equal(found[case], one(case, **split), tools)


@pytest.mark.slow
def test_half_precision_keeps_float32_weights_and_reduces_gradients_in_float32(tools, tmp_path):
    """The mean of two ranks' bfloat16 gradients is no number of bfloat16, where one rank's own is.

    The weights go where one process in bfloat16 takes them; its passes keep other intermediate results in float32.
    """
    found = on(2, tmp_path, ["half_precision"])["half_precision"]
    alone = script.half_precision(tmp_path / "one")
    for rank in found:
        assert rank["gradients"] == rank["dtypes"] == {torch.float32}
        assert max(rank["in_bf16"]) < 0.9
    first = tools.weights(ranks.first_model())
    change = tools.relative(alone["weights"], first)
    assert change > 0.01
    assert tools.relative(found[0]["weights"], alone["weights"]) < change / 2


@pytest.mark.slow
def test_save_only_model_writes_whole_weights_that_a_run_with_shards_loads(tools, tmp_path):
    for rank in on(2, tmp_path, ["weights_only"])["weights_only"]:
        assert torch.equal(rank["again"], rank["weights"]) and not torch.equal(rank["first"], rank["weights"])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "weights_only" / "checkpoint-1")
    assert torch.equal(tools.weights(saved), rank["weights"])


@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_gets_those_of_all_ranks(one, tools, tmp_path):
    for rank in on(2, tmp_path, ["served"])["served"]:
        assert tools.relative(rank["weights"], one("lora")["weights"]) < 1e-5


@pytest.mark.slow
def test_a_full_disk_on_one_rank_costs_one_checkpoint(tmp_path):
    first, second = on(2, tmp_path, ["full_disk"])["full_disk"]
    assert torch.equal(first["weights"], second["weights"])
    assert first["found"] == ["checkpoint-1", "checkpoint-3"]
    newest: Any = choose(tmp_path / "full", True)
    assert newest.folder.name == "checkpoint-3"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_checkpoint_in_shards_is_resumed_on_other_numbers(one, tools, tmp_path, before, after):
    cases = ["saved", "saved_lora"]
    on(before, tmp_path / "first", cases)
    for case in cases:
        checkpoint = tmp_path / "first" / "run" / f"fsdp_{case}" / "checkpoint-2"
        for rank in on(after, tmp_path / "second", [case], checkpoint)[case]:
            assert tools.relative(rank["weights"], one(case)["weights"]) < 1e-5
