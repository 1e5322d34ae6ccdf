"""How weights travel."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.engines.vllm.wire import (
    SHARED_MEMORY,
    TensorSpec,
    notes_as_lists,
    notes_from_lists,
    pack,
    read_shared,
    remove_shared,
    remove_stale,
    unpack,
    write_shared,
)

NOTES = [
    TensorSpec("a", "float32", (2, 3)),
    TensorSpec("b", "bfloat16", (5,)),
    TensorSpec("c", "int64", ()),
    TensorSpec("d", "float32", (0, 4)),
]
TENSORS = [torch.arange(6.0).view(2, 3), torch.linspace(-1, 1, 5), torch.tensor(7), torch.zeros(0, 4)]


@settings(deadline=None)
@given(st.integers(1, 400))
def test_what_is_unpacked_is_what_was_packed_in_the_dtype_announced(bucket_bytes: int) -> None:
    buckets = list(pack(NOTES, TENSORS, bucket_bytes=bucket_bytes))

    found = []
    for bucket in buckets:
        found += unpack(NOTES[bucket.first : bucket.first + bucket.count], bytes(bucket.data))

    assert [name for name, _ in found] == ["a", "b", "c", "d"]
    for (_, tensor), note, sent in zip(found, NOTES, TENSORS):
        assert str(tensor.dtype) == f"torch.{note.dtype}"
        assert torch.equal(tensor, sent.to(tensor.dtype))
    assert buckets[-1].checksum == zlib.crc32(b"".join(bytes(bucket.data) for bucket in buckets))
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))


def test_tensors_begin_at_multiples_of_64_bytes() -> None:
    (bucket,) = pack(NOTES[:2], TENSORS[:2])
    assert len(bucket.data) == 64 + 5 * 2


def test_a_tensor_longer_than_a_bucket_has_one_of_its_own() -> None:
    assert [(b.first, b.count) for b in pack(NOTES[:3], TENSORS[:3], bucket_bytes=10)] == [(0, 1), (1, 1), (2, 1)]


def test_tensors_that_were_not_announced_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"tensor 0 has the shape \(3, 2\), but a of shape \(2, 3\) was announced"):
        list(pack(NOTES[:1], [torch.zeros(3, 2)]))
    with pytest.raises(RuntimeError, match="but no more tensors was announced"):
        list(pack(NOTES[:1], TENSORS[:2]))
    with pytest.raises(RuntimeError, match="2 tensors were announced, but only 1 came"):
        list(pack(NOTES[:2], TENSORS[:1]))


def test_a_bucket_of_another_length_is_an_error() -> None:
    (bucket,) = pack(NOTES[:2], TENSORS[:2])
    with pytest.raises(ValueError, match="ends inside the tensor b"):
        unpack(NOTES[:2], bytes(bucket.data[:-1]))
    with pytest.raises(ValueError, match="a bucket has 74 bytes, but its tensors have 24"):
        unpack(NOTES[:1], bytes(bucket.data))


def test_notes_survive_json() -> None:
    assert notes_from_lists(notes_as_lists(NOTES)) == NOTES


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'nonsense' is not the name of a torch dtype"):
        TensorSpec("a", "nonsense", (1,)).num_bytes  # noqa: B018


def test_shared_memory_is_read_where_it_lies_and_gone_when_removed() -> None:
    (bucket,) = pack(NOTES[:2], TENSORS[:2])
    name = write_shared(bucket.data)
    try:
        seen = read_shared(name)
    finally:
        remove_shared(name)
    found = dict(unpack(NOTES[:2], seen))
    assert torch.equal(found["a"], TENSORS[0])
    with pytest.raises(OSError, match=name):
        read_shared(name)


def test_only_names_of_buckets_are_read() -> None:
    with pytest.raises(OSError, match="is not the name of a bucket"):
        read_shared("../../etc/passwd")


def test_what_a_killed_trainer_left_is_removed_in_time() -> None:
    old, new = write_shared(b"old"), write_shared(b"new")
    try:
        os.utime(SHARED_MEMORY / old, (0, 0))
        remove_stale()
        assert not (SHARED_MEMORY / old).exists() and (SHARED_MEMORY / new).exists()
    finally:
        remove_shared(old)
        remove_shared(new)
