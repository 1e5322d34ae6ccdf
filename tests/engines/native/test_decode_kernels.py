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
from sample_checks import assert_same_samples

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native import NativeEngine, attention_layouts, decode_kernels
from groupgrad.engines.native.attention_layouts import DecodeBatch, DecodeLayout, StepShape
from groupgrad.engines.native.decode_tables import DecodeTables
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


def with_kernels(monkeypatch: pytest.MonkeyPatch, call: AttentionCall) -> None:
    """Lets decode plans use the kernels, without a comparison, for tensors on the CPU."""

    def kernels(query: Any, new: Any, own: Any, prompts: Any, tables: Any, products: Any) -> torch.Tensor:
        return triton_attention.decode_attention(query, new, own, prompts, tables, call)

    monkeypatch.setattr(attention_layouts, "decode_kernels_for", lambda *_: kernels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 40, 300])
@pytest.mark.parametrize("special", [False, True])
def test_numbers_are_those_of_matrix_products(
    kind: tuple[int, int, int, int], window: int | None, special: bool, monkeypatch: pytest.MonkeyPatch
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
    with_kernels(monkeypatch, call)
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


def test_keys_before_a_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with_kernels(monkeypatch, call)
    torch.testing.assert_close(
        DecodeLayout(cache, batch).attend(query, key, value, call), expected, rtol=1e-5, atol=1e-5
    )


def test_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch, call = make_batch(5, most=1500), AttentionCall(0, 0.125)
    cache = make_cache(2, 64, 64, batch, torch.float16)
    query, key, value = (torch.randn(heads, len(batch.groups), 64).half() for heads in (8, 2, 2))
    expected = DecodeLayout(cache, batch)._products(query, key, value, call)
    with_kernels(monkeypatch, call)
    found = DecodeLayout(cache, batch).attend(query, key, value, call)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-4)


def test_rows_advance_and_change_within_a_recorded_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    call, shape = AttentionCall(0, 0.25, window=90), StepShape(8, 4, 4, 70, 310)
    first = DecodeBatch([0, 0, 0, 1, 2], [70, 70, 70, 9, 33], [3, 250, 255, 0, 64])
    later = DecodeBatch([3, 1, 1], [50, 20, 20], [256, 7, 0])
    cache = make_cache(2, 16, 16, DecodeBatch([0] * 8, [70] * 8, [305] * 8), torch.float32)
    cache.prompts.resize(4, 70)
    for tensor in cache.prompts.tensors[0]:
        tensor.normal_()
    kernels, products = DecodeLayout(cache, first, shape), DecodeLayout(cache, first, shape)
    with_kernels(monkeypatch, call)
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
def test_rows_sampled_with_the_kernels_say_the_same(name: str, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUPGRAD_NATIVE_KERNELS", "0")
    model = build(name, max_position_embeddings=512)
    requests = [Request([5, 6, 7, 8, 9] if i < 4 else [10, 11], i, 10 + 6 * i) for i in range(6)]
    options = SamplingOptions(max_new_tokens=60, eos_ids=(1,))
    expected = NativeEngine(model).sample(requests, options)
    asked = []

    def kernels_for(*given: Any) -> Any:
        def kernels(query: Any, new: Any, own: Any, prompts: Any, tables: Any, products: Any) -> torch.Tensor:
            asked.append(given[-1].layer)
            return triton_attention.decode_attention(query, new, own, prompts, tables, given[-1])

        return kernels

    monkeypatch.setattr(attention_layouts, "decode_kernels_for", kernels_for)
    found = NativeEngine(model).sample(requests, options)
    assert len(asked) > 50
    assert_same_samples(found, expected, absolute=2e-5, relative=0.0)


class Call:
    """Arguments of the chosen kernels, whose products are ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, output: Callable[[], torch.Tensor]) -> None:
        self.query, self.num_products = torch.zeros(2, 3, 16), 0
        monkeypatch.setattr(decode_kernels, "_agrees", {})
        monkeypatch.setattr(decode_kernels, "_is_on_gpu", lambda query: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(triton_attention, "decode_attention", lambda *_: output())
        self.tables = DecodeTables(torch.zeros(3), torch.zeros(3), torch.zeros(1, 4), 2, 1, 1)

    def __call__(self) -> torch.Tensor:
        def products() -> torch.Tensor:
            self.num_products += 1
            return torch.ones(3, 2, 16)

        kernels = decode_kernels.decode_kernels_for(self.query, self.query, self.query, AttentionCall(0, 1.0))
        pair = (self.query, self.query)
        return products() if kernels is None else kernels(self.query, pair, pair, pair, self.tables, products)


def test_a_kind_of_call_is_compared_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ignored = torch.ones(3, 2, 16)
    ignored[2] = 7  # a row of padding
    call = Call(monkeypatch, lambda: ignored * 1.00001)
    assert call().max() == 1 and call().max() > 1 and call().max() > 1
    assert call.num_products == 1 and not caplog.records


def failing() -> torch.Tensor:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (failing, "RuntimeError: out of resource: shared memory"),
        (lambda: torch.full((3, 2, 16), 1.01), "their outputs differ by 1.0e-02"),
        (lambda: torch.full((3, 2, 16), torch.nan), "their outputs differ by nan"),
    ],
)
def test_kernels_that_fail_or_differ_are_not_used(
    output: Any, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = Call(monkeypatch, output)
    for _ in range(3):
        assert torch.equal(call(), torch.ones(3, 2, 16))
    (record,) = caplog.records
    assert problem in record.getMessage()


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
