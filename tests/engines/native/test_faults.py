"""The native engine under NaN weights and failing allocations."""

from __future__ import annotations

import pytest
import torch

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine

REQUESTS = [Request([5, 6, 7], seed=i, max_new_tokens=4) for i in range(3)]
OPTIONS = SamplingOptions(max_new_tokens=4)


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_weights_that_are_no_numbers_are_named(build, name):
    model = build(name)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="3 of 3 rows got log-probs that are no finite numbers"):
        NativeEngine(model).sample(REQUESTS, OPTIONS)


def test_token_ids_that_are_not_there_may_be_suppressed(build):
    engine = NativeEngine(build("qwen3"))
    plain = engine.sample(REQUESTS, OPTIONS)
    odd = SamplingOptions(max_new_tokens=4, extra={"suppress_tokens": [-1, 48, 10**6]})
    assert [s.ids for s in engine.sample(REQUESTS, odd)] == [s.ids for s in plain]
