"""Start-up checks on a pretrained model, whose rounding is another than that of random weights."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from groupgrad.engines.base import SamplingOptions
from groupgrad.engines.selection import EngineOptions, choose_engine
from groupgrad.errors import ConfigError
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.rounding import Rounding
from groupgrad.scoring.self_check import check_causal, check_layout

pytestmark = pytest.mark.real

SAMPLING = SamplingOptions(max_new_tokens=4)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.float32, nullcontext),
        (torch.float32, autocast),
        (torch.bfloat16, nullcontext),
        (torch.float16, nullcontext),
    ],
    ids=["float32", "bf16 autocast", "bfloat16", "float16"],
)
def test_all_fast_paths_run_in_every_precision(
    smollm2: Path, dtype: torch.dtype, precision: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(smollm2, dtype)
    with caplog.at_level(logging.WARNING):
        check_causal(model, precision)
        report = check_layout(model, ForwardOptions(temperature=0.01), precision)
        chosen = choose_engine(model, EngineOptions(), SAMPLING, precision=precision)
    assert (report.layout, report.tiled_head, report.reason) == ("shared", True, None)
    assert chosen.name == "native"
    assert not caplog.records
    # Whole nats would be a fault; half of them are single roundings of logits around 30.
    assert chosen.gap is not None
    assert chosen.gap < (0.5 if Rounding.of(model, precision).is_half else 1e-3)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_sampled_as_they_are_trained_or_refused(
    smollm2: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Releases of peft that hand cached keys and values over by another name than transformers reads them by."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(load(smollm2), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    try:
        with caplog.at_level(logging.WARNING):
            chosen = choose_engine(model, EngineOptions(engine="transformers"), SAMPLING)
    except ConfigError as error:
        assert "transformers 5" in str(error) and "peft 0" in str(error)
        return
    assert chosen.gap is not None
    assert chosen.gap < 1e-3
