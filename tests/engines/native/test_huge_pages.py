"""Large tensors of keys and values ask for pages of two megabytes, and hold zeros wherever they come from."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from groupgrad.engines.native.kv_cache import LARGE_PAGE, zeros_in_large_pages

CPU = torch.device("cpu")
has_large_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages to ask for"
)


@has_large_pages
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_tensors_begin_at_a_large_page(dtype: torch.dtype):
    tensor = zeros_in_large_pages((3, 400_001, 1), dtype, CPU)
    assert tensor.data_ptr() % LARGE_PAGE == 0
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 400_001, 1), True)
    assert not tensor.any()


@has_large_pages
def test_the_mapping_asks_for_large_pages():
    tensor = zeros_in_large_pages((LARGE_PAGE,), torch.float32, CPU)
    text = Path("/proc/self/smaps").read_text()
    areas = dict.fromkeys(line.split("-")[0] for line in text.splitlines() if "-" in line.split(" ")[0])
    begin = max(int(area, 16) for area in areas if int(area, 16) <= tensor.data_ptr())
    flags = next(line for line in text[text.index(f"{begin:x}-") :].splitlines() if line.startswith("VmFlags"))
    assert "hg" in flags.split()


def test_without_support_tensors_come_from_torch(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(22, "a kernel without large pages")

    monkeypatch.setattr(mmap, "mmap", refuse)
    tensor = zeros_in_large_pages((LARGE_PAGE,), torch.float32, CPU)
    assert tensor.shape == (LARGE_PAGE,)
    assert not tensor.any()
