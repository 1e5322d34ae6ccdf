"""Families that compute attention themselves run dense and are sampled by `generate`, with their own numbers."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.selection import EngineOptions, choose_engine
from groupgrad.scoring.attention import attention_dropout, flat_obstacle
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.self_check import check_layout

FAMILIES = ("gpt-neo (local attention)", "bloom (alibi)", "mpt (alibi)", "falcon", "falcon (alibi)")
REASON = "its attention does not go through transformers' attention interface"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_without_the_interface_runs_dense_and_says_why(name: str, build: Any) -> None:
    model = build(name)
    assert flat_obstacle(model) == REASON
    report, engine = check_layout(model, ForwardOptions()), choose_engine(model, EngineOptions(), SamplingOptions(5))
    assert (report.layout, report.reason, engine.name) == ("dense", REASON, "transformers")


@pytest.mark.parametrize("name", ["codegen", "gpt-j (head bias)"])
def test_a_family_that_has_moved_to_the_interface_runs_all_fast_paths(name: str, build: Any) -> None:
    """Releases of transformers in which GPT-J and CodeGen compute attention in a method of their own run them dense."""
    model = build(name)
    has_moved = not hasattr(type(model.transformer.h[0].attn), "_attn")
    assert (flat_obstacle(model) is None) == has_moved
    report, engine = check_layout(model, ForwardOptions()), choose_engine(model, EngineOptions(), SamplingOptions(5))
    assert (report.layout, engine.name) == (("shared", "native") if has_moved else ("dense", "transformers"))


def test_dropout_of_attention_weights_is_known(build: Any) -> None:
    """A model that trains with it goes dense, since the shared layout does not draw it."""
    for name, where in (("gpt-neo (local attention)", "attn_dropout"), ("bloom (alibi)", "attention_dropout")):
        model = build(name)
        assert attention_dropout(model) == 0.0
        next(module for name, module in model.named_modules() if name.endswith(where)).p = 0.2
        assert attention_dropout(model) == 0.2
