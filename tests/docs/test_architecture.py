"""The worked batch of the architecture page is the one that the code makes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from groupgrad import GRPOTrainer
from groupgrad.batch import Batch
from groupgrad.batching.collate import collate
from groupgrad.scoring.layout import dense_inputs, flat_inputs
from groupgrad.trainer import hooks
from groupgrad.types import Prompt, Rollout

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")


def numbers_of(name: str) -> list[float]:
    """The numbers in brackets behind a name of the page's table."""
    (found,) = re.findall(rf"^{name} +\[([^\]]+)\]", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"-?[\d.]+", found)]


def worked_batch() -> Batch:
    first, second = Prompt([10, 11], {"prompt": "a"}, 0), Prompt([20], {"prompt": "b"}, 1)

    def rollout(prompt: Prompt, index: int, ids: list[int], **changes: Any) -> Rollout:
        return Rollout(prompt, index, ids, **{"finish_reason": "eos", "completion": "", "text": "", **changes})

    rollouts = [
        rollout(first, 0, [7, 8, 1]),
        rollout(first, 1, [9, 9, 9, 1], sampled=[True, False, False, True]),
        rollout(second, 2, [5, 1]),
        rollout(second, 3, [6, 6], finish_reason="length"),
    ]
    return collate(rollouts, [0.7, -0.7, 0.7, -0.7], mask_truncated=True)


def test_the_worked_batch_is_what_collation_makes() -> None:
    batch = worked_batch()
    for name in ("completion_ids", "row_of_token", "offsets", "prompt_ids", "prompt_offsets", "prompt_of_row"):
        assert getattr(batch, name).tolist() == numbers_of(name), name
    assert batch.trained.long().tolist() == numbers_of("trained")
    assert torch.allclose(batch.advantages, torch.tensor(numbers_of("advantages")))
    assert f"tokens {int(batch.trained.sum())} " in PAGE and f"the {int(batch.trained.sum())} loss tokens" in PAGE


def test_its_layouts_have_the_tokens_that_the_page_counts() -> None:
    batch = worked_batch()
    num_prompt, num_completion = re.findall(r"sees (\d+) prompt tokens and (\d+) completion tokens", PAGE)[0]
    assert len(flat_inputs(batch, shared_prompts=True, aux_loss=False).ids) == int(num_prompt) + int(num_completion)
    rows, width = re.findall(r"a padded one would see (\d+) rows of (\d+)", PAGE)[0]
    assert dense_inputs(batch, 0, aux_loss=False).ids.shape == (int(rows), int(width))


def test_the_table_of_hooks_names_every_hook() -> None:
    named = set(re.findall(r"\w+", hooks.__doc__ or ""))
    overridden = {name for of in (hooks.Hooks, GRPOTrainer) for name in vars(of) if name in vars(Trainer)}
    assert {name for name in overridden if not name.startswith("__")} <= named
