"""Branches of a completion are scored behind their own contexts, and count as parts of one completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupgrad.batch import Batch
from groupgrad.batching.buffer import GenerationBuffer
from groupgrad.batching.packing import row_costs
from groupgrad.objectives import FORWARD_AND_BACKWARD
from groupgrad.scoring.forward import ForwardOptions, score_tokens
from groupgrad.scoring.layout import flat_layout
from groupgrad.types import Branch


def with_branches(batch: Batch, kind: str = "elsewhere") -> Batch:
    """The batch with two branches in its first row of three tokens.

    One repeats its prompt and one goes elsewhere, or both continue their prompt by a history that grows.
    """
    lengths = batch.offsets.diff().tolist()
    row = next(row for row, length in enumerate(lengths) if length >= 3)
    prompt = batch.prompts()[int(batch.prompt_of_row[row])]
    contexts = {"elsewhere": (prompt, (7, 6, 5)), "growing": ((*prompt, 9), (*prompt, 9, 8, 8, 5))}[kind]
    branches = tuple(Branch(start, context) for start, context in enumerate(contexts, 1))
    return replace(batch, branches=tuple(branches if r == row else () for r in range(len(lengths))))


def by_hand(model: Any, batch: Batch) -> torch.Tensor:
    """(L,) float64 log-probs, a forward pass for each token of the batch."""
    assert batch.branches is not None
    found = []
    for place, row in enumerate(batch.row_of_token.tolist()):
        inside = place - int(batch.offsets[row])
        begun = [branch for branch in batch.branches[row] if branch.start <= inside]
        start = begun[-1].start if begun else 0
        context = begun[-1].context if begun else batch.prompts()[int(batch.prompt_of_row[row])]
        first = int(batch.offsets[row]) + start
        ids = torch.cat([torch.tensor(context), batch.completion_ids[first:place]])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, -1]
        found.append(logits.double().log_softmax(-1)[batch.completion_ids[place]])
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["elsewhere", "growing"])
@pytest.mark.parametrize("layout", ["shared", "packed", "dense"])
def test_scores_and_gradients(layout: Any, kind: str, build, batch):
    model, branched = build("qwen3"), with_branches(batch, kind)
    expected = by_hand(model, branched)
    scores = score_tokens(model, branched, ForwardOptions(layout=layout))
    torch.testing.assert_close(scores.logprobs, expected.float(), rtol=0, atol=1e-5)
    straight = score_tokens(model, batch, ForwardOptions(layout=layout)).logprobs
    assert float((straight - scores.logprobs).abs().max()) > 1e-3
    weights, parameters = torch.linspace(-1, 2, batch.num_tokens), list(model.parameters())
    actual, wanted = (
        torch.autograd.grad((weights * values).sum(), parameters) for values in (scores.logprobs, expected.float())
    )
    for found, value in zip(actual, wanted):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_a_history_that_grows_is_computed_once(batch):
    branched = with_branches(batch, "growing").by_branch()
    apart, once = (len(flat_layout(branched, shared_prefixes=shared).ids) for shared in (False, True))
    row = next(row for row, length in enumerate(batch.offsets.diff().tolist()) if length >= 3)
    prompt = len(batch.prompts()[int(batch.prompt_of_row[row])])
    assert apart - once == prompt + (prompt + 1)


def test_a_row_costs_the_contexts_of_its_branches(batch):
    passes = [FORWARD_AND_BACKWARD] * batch.num_rows
    plain, branched = row_costs(batch, passes), row_costs(with_branches(batch), passes)
    row = next(row for row, length in enumerate(batch.offsets.diff().tolist()) if length >= 3)
    more = 3 * (len(batch.prompts()[int(batch.prompt_of_row[row])]) + 3)
    differences = [after.completion - before.completion for before, after in zip(plain, branched)]
    assert differences == [more if number == row else 0 for number in range(batch.num_rows)]


def test_a_checkpoint_holds_them(batch, tmp_path):
    buffer, again = GenerationBuffer(), GenerationBuffer()
    buffer.batches[3] = with_branches(batch)
    torch.save(buffer.state_dict(), tmp_path / "buffer")
    again.load_state_dict(torch.load(tmp_path / "buffer", weights_only=True))
    assert again.batches[3].branches == buffer.batches[3].branches
