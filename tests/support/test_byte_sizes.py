"""Amounts of memory in messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupgrad.byte_sizes import bytes_text
from groupgrad.run_folder.rollout_files import RolloutFiles


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (120_000, "120 KB"),
        (999_900, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_the_unit_fits_the_amount(size: float, text: str):
    assert bytes_text(size) == text


def test_the_space_of_rollouts_is_said_in_a_unit_that_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    RolloutFiles(tmp_path, rank=0, keep_bytes=120_000, seed=0)._thin()
    assert "do not fit into rollouts_keep (120 KB on this rank)" in caplog.text
