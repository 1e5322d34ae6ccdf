"""Attention of decode steps by Triton's kernels: the numbers of matrix products, what is read, what compiles.

`make test-triton` runs these on a CPU, where Triton interprets its kernels; elsewhere they are skipped.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from noted_calls import note_calls
from sample_checks import assert_same_samples

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, attention_layouts
from groupgrad.engines.native.attention_layouts import DecodeBatch, DecodeLayout, StepShape
from groupgrad.engines.native.kv_cache import CacheRoom, KVCache, LayerShape
from groupgrad.scoring.attention_layout import AttentionCall

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set (make test-triton)", allow_module_level=True)
pytest.importorskip("triton")
from groupgrad.engines.native import triton_attention

CPU = torch.device("cpu")
KINDS = [(2, 1, 8, 8), (2, 2, 64, 64), (1, 7, 20, 20), (3, 3, 80, 80), (1, 16, 24, 40)]
"""Key heads, query heads for each, and widths of keys and values."""


def make_cache(kv_heads: int, key_dim: int, value_dim: int, batch: DecodeBatch, dtype: torch.dtype) -> KVCache:
    """A cache with random keys and values, NaN at places that no row has, with room for two more rows and groups."""
    cache = KVCache({0: LayerShape(kv_heads, key_dim, value_dim, dtype, CPU)}, 2**40)
    rows, groups = len(batch.groups) + 2, max(batch.groups) + 3
    longest, prompt = max(batch.lengths) + 6, max(batch.prompt_lengths) + 3
    cache.reserve(CacheRoom(rows, longest, groups, prompt, max_suffix_length=longest), CacheRoom(0, 0, 0, 0))
    for buffer in (cache.suffixes, cache.prompts):
        for tensor in buffer.tensors[0]:
            tensor.normal_()
    return cache


def spoil(cache: KVCache, batch: DecodeBatch) -> None:
    """Writes NaN to all places that no row has."""
    for keys in cache.suffixes.tensors[0]:
        for slot in range(len(keys)):
            keys[slot, :, batch.lengths[slot] if slot < len(batch.lengths) else 0 :] = torch.nan
    lengths = dict(zip(batch.groups, batch.prompt_lengths))
    for keys in cache.prompts.tensors[0]:
        for slot in range(len(keys)):
            keys[slot, :, lengths.get(slot, 0) :] = torch.nan


def make_batch(seed: int, most: int = 700, prompt: int = 600) -> DecodeBatch:
    draw = random.Random(seed)
    sizes = [draw.randint(1, prompt) for _ in range(3)]
    groups = sorted(draw.choice(range(3)) for _ in range(6))
    lengths = [draw.choice((0, 1, 255, 256, draw.randint(0, most))) for _ in groups]
    return DecodeBatch(groups, [sizes[group] for group in groups], lengths)


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets decode plans use the kernels for tensors on the CPU from the call on."""
    return lambda: monkeypatch.setattr(attention_layouts, "has_attention_kernels", lambda query: True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("special", [False, True])
def test_numbers_are_those_of_matrix_products(
    kind: tuple[int, int, int, int], window: int | None, special: bool, with_kernels: Callable[[], None]
) -> None:
    kv_heads, repeat, key_dim, value_dim = kind
    seed = 100 * kv_heads + repeat + (window or 0)
    torch.manual_seed(seed)
    batch = make_batch(seed)
    sinks = torch.randn(kv_heads * repeat) if special else None
    call = AttentionCall(0, key_dim**-0.5, window=window, softcap=5.0 if special else None, sinks=sinks)
    rows, groups = len(batch.groups), max(batch.groups) + 1
    cache = make_cache(kv_heads, key_dim, value_dim, batch, torch.float64)
    shape = StepShape(rows + 2, groups + 2, 6, max(batch.prompt_lengths) + 3, max(batch.lengths) + 6)
    exact = DecodeLayout(cache, batch)
    singles = KVCache({0: LayerShape(kv_heads, key_dim, value_dim, torch.float32, CPU)}, 2**40)
    with_kernels()
    for buffer, other in ((cache.suffixes, singles.suffixes), (cache.prompts, singles.prompts)):
        other.resize(buffer.num_slots, buffer.slot_size)
        for tensor, copy in zip(buffer.tensors[0], other.tensors[0]):
            tensor.copy_(tensor.float())
            copy.copy_(tensor)
    spoil(singles, batch)
    for attention, padding in ((DecodeLayout(singles, batch), 0), (DecodeLayout(singles, batch, shape), 2)):
        news = torch.randn(2, kv_heads + kv_heads * repeat, rows + padding, max(key_dim, value_dim))
        query, key = news[0, kv_heads:, :, :key_dim], news[0, :kv_heads, :, :key_dim]
        value = news[1, :kv_heads, :, :value_dim]
        found = attention.attend(query, key, value, call)[:rows]
        doubles = (x[:, :rows].double() for x in (query, key, value))
        expected = exact._products(*doubles, call)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        for stored, copy in zip(cache.suffixes.tensors[0], singles.suffixes.tensors[0]):
            for row, length in enumerate(batch.lengths):
                assert torch.equal(stored[row, :, : length + 1].float(), copy[row, :, : length + 1])


def test_keys_before_a_window_are_not_read(with_kernels: Callable[[], None]) -> None:
    """NaN there would come through: values are multiplied with weights of 0."""
    torch.manual_seed(0)
    window, batch = 40, DecodeBatch([0, 0, 1], [300, 300, 280], [10, 600, 700])
    call, cache = AttentionCall(0, 0.25, window=window), make_cache(2, 16, 16, batch, torch.float32)
    query, key, value = (torch.randn(heads, 3, 16) for heads in (4, 2, 2))
    expected = DecodeLayout(cache, batch)._products(query, key, value, call)
    for stored in cache.suffixes.tensors[0]:
        for row, newest in enumerate(batch.lengths):
            stored[row, :, : max(0, newest + 1 - window)] = torch.nan
    for stored in cache.prompts.tensors[0]:
        stored[0, :, : 300 + 10 + 1 - window] = torch.nan
        stored[1] = torch.nan
    with_kernels()
    torch.testing.assert_close(
        DecodeLayout(cache, batch).attend(query, key, value, call), expected, rtol=1e-5, atol=1e-5
    )


def test_half_precision(with_kernels: Callable[[], None]) -> None:
    torch.manual_seed(0)
    batch, call = make_batch(5, most=1500), AttentionCall(0, 0.125)
    cache = make_cache(2, 64, 64, batch, torch.float16)
    query, key, value = (torch.randn(heads, len(batch.groups), 64).half() for heads in (8, 2, 2))
    expected = DecodeLayout(cache, batch)._products(query, key, value, call)
    with_kernels()
    found = DecodeLayout(cache, batch).attend(query, key, value, call)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-4)


def test_rows_advance_and_change_within_a_recorded_shape(with_kernels: Callable[[], None]) -> None:
    torch.manual_seed(0)
    call, shape = AttentionCall(0, 0.25, window=90), StepShape(8, 4, 4, 70, 310)
    first = DecodeBatch([0, 0, 0, 1, 2], [70, 70, 70, 9, 33], [3, 250, 255, 0, 64])
    later = DecodeBatch([3, 1, 1], [50, 20, 20], [256, 7, 0])
    cache = make_cache(2, 16, 16, DecodeBatch([0] * 8, [70] * 8, [305] * 8), torch.float32)
    cache.prompts.resize(4, 70)
    for tensor in cache.prompts.tensors[0]:
        tensor.normal_()
    kernels, products = DecodeLayout(cache, first, shape), DecodeLayout(cache, first, shape)
    with_kernels()
    for batch in (first, later):
        kernels.change(batch)
        products.change(batch)
        for _ in range(3):
            query, key, value = (torch.randn(heads, 8, 16) for heads in (4, 2, 2))
            products.drop_masks()
            expected = products._products(query, key, value, call)
            found = kernels.attend(query, key, value, call)
            rows = len(batch.groups)
            torch.testing.assert_close(found[:rows], expected[:rows], rtol=1e-5, atol=1e-5)
            kernels.advance()
            products.advance()


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2 (soft caps)", "gpt-oss (experts, sinks)", "mistral (sliding window)"]
)
def test_rows_sampled_with_the_kernels_say_the_same(
    name: str, build: Any, with_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")
    model = build(name, max_position_embeddings=512)
    requests = [Request([5, 6, 7, 8, 9] if i < 4 else [10, 11], i, 10 + 6 * i) for i in range(6)]
    options = SamplingOptions(max_new_tokens=60, eos_ids=(1,))
    expected = NativeEngine(model).sample(requests, options)
    asked = note_calls(monkeypatch, triton_attention, "decode_attention")
    with_kernels()
    found = NativeEngine(model).sample(requests, options)
    assert len(asked) > 50
    assert_same_samples(found, expected, absolute=2e-5, relative=0.0)


COMPILE = Path(__file__).with_name("compile_decode_kernels.py")


def test_kernels_compile_for_gpus_and_keep_their_numbers_in_registers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    lines = subprocess.run(
        [sys.executable, COMPILE], env=environment, capture_output=True, text=True, check=True
    ).stdout
    found = [line.split() for line in lines.splitlines()]
    assert len(found) == 3 * 6 * 6
    for architecture, kernel, kind, registers, spilled, shared in found:
        assert int(spilled) == 0 and int(registers) <= 255, (architecture, kernel, kind)
        assert int(shared) <= 99 * 1024, (architecture, kernel, kind, shared)
