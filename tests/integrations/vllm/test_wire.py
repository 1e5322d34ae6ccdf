"""Wire format of weights: buckets, checksums, shared memory."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.integrations.vllm import wire
from groupgrad.integrations.vllm.wire import (
    SHARED_MEMORY,
    TensorSpec,
    digest,
    pack,
    read_shared,
    remove_stale,
    running_checksum,
    shared_file,
    unpack,
)

SPECS = [
    TensorSpec("a", "float32", (2, 3)),
    TensorSpec("b", "bfloat16", (5,)),
    TensorSpec("c", "int64", ()),
    TensorSpec("d", "float32", (0, 4)),
]
TENSORS = [torch.arange(6.0).view(2, 3), torch.linspace(-1, 1, 5), torch.tensor(7), torch.zeros(0, 4)]
WEIGHTS = list(zip("abcd", TENSORS))


@settings(deadline=None)
@given(st.integers(1, 400))
def test_what_is_unpacked_is_what_was_packed_in_the_dtype_announced(bucket_bytes: int) -> None:
    buckets = list(pack(SPECS, WEIGHTS, bucket_bytes=bucket_bytes))

    unpacked, checksum = [], 0
    for bucket in buckets:
        assert len(bucket.data) % 64 == 0 and len(bucket.data) > 0
        unpacked += unpack(SPECS[bucket.first : bucket.first + bucket.count], bucket.data)
        checksum = running_checksum(bucket.data, checksum)
        assert bucket.checksum == checksum

    assert [name for name, _ in unpacked] == ["a", "b", "c", "d"]
    for (_, tensor), spec, sent in zip(unpacked, SPECS, TENSORS):
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
        assert torch.equal(tensor, sent.to(tensor.dtype))
    assert buckets[-1].checksum == zlib.crc32(b"".join(bytes(bucket.data.numpy()) for bucket in buckets))


def test_a_tensor_longer_than_a_bucket_has_one_of_its_own() -> None:
    assert [(b.first, b.count) for b in pack(SPECS[:3], WEIGHTS[:3], bucket_bytes=10)] == [(0, 1), (1, 1), (2, 1)]


def test_tensors_that_were_not_announced_are_an_error() -> None:
    for weights, story in (
        ([("a", torch.zeros(3, 2))], r"tensor 0 is a of shape \(3, 2\), but a of shape \(2, 3\) was announced"),
        ([("b", TENSORS[0])], r"tensor 0 is b of shape \(2, 3\), but a of shape"),
        (WEIGHTS[:2], "argument 2 is longer"),
        ([], "argument 2 is shorter"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=story):
            list(pack(SPECS[:1], weights))


def test_a_bucket_of_another_length_is_an_error() -> None:
    (bucket,) = pack(SPECS[:2], WEIGHTS[:2])
    with pytest.raises(ValueError, match="ends inside the tensor b"):
        unpack(SPECS[:2], bucket.data[:64])
    with pytest.raises(ValueError, match="a bucket has 128 bytes, but its tensors have 64"):
        unpack(SPECS[:1], bucket.data)


def test_shared_memory_is_read_in_place_and_gone_when_removed() -> None:
    (bucket,) = pack(SPECS[:2], WEIGHTS[:2])
    with shared_file(bucket.data.numpy().data) as name:
        mapped = torch.frombuffer(read_shared(name), dtype=torch.uint8)
    assert torch.equal(dict(unpack(SPECS[:2], mapped))["a"], TENSORS[0])
    with pytest.raises(OSError, match=name):
        read_shared(name)


def test_only_names_of_buckets_are_read() -> None:
    with pytest.raises(OSError, match="is not the name of a bucket"):
        read_shared("../../etc/passwd")


def test_files_of_a_killed_trainer_are_removed_later() -> None:
    with shared_file(b"old") as old, shared_file(b"new") as new:
        os.utime(SHARED_MEMORY / old, (0, 0))
        remove_stale()
        assert not (SHARED_MEMORY / old).exists() and (SHARED_MEMORY / new).exists()


def test_a_digest_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([3, -5], dtype=torch.int64).view(torch.uint8)
    factor = 0x5851F42D4C957F2D
    # Weights are 0 | 1 and factor | 1, which is odd already.
    assert digest(words) == (3 - 5 * factor) % 2**64
    assert digest(words, 9) == (9 * factor + 3 - 5 * factor) % 2**64
    assert digest(words[:0], 2**64 - 1) == 2**64 - 1
    monkeypatch.setattr(wire, "_WORDS_AT_A_TIME", 1)
    assert digest(words) == (3 * factor - 5) % 2**64


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2047), st.integers(0, 7))
def test_any_changed_bit_changes_the_digest(place: int, bit: int) -> None:
    data = torch.arange(2048, dtype=torch.int64).to(torch.uint8)
    before = digest(data)
    data[place] ^= 1 << bit
    assert digest(data) != before
