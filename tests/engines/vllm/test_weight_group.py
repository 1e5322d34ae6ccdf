"""The process group over which weights may travel."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupgrad.engines.vllm import weight_group as group_module
from groupgrad.engines.vllm.weight_group import GroupBroken, WeightGroup, digest, open_store, pack_on, unpack_from
from groupgrad.engines.vllm.wire import TensorSpec

NOTES = [
    TensorSpec("a", "float32", (2, 3)),
    TensorSpec("b", "bfloat16", (5,)),
    TensorSpec("c", "int64", ()),
    TensorSpec("d", "float32", (0, 4)),
]
TENSORS = [torch.arange(6.0).view(2, 3), torch.linspace(-1, 1, 5), torch.tensor(7), torch.zeros(0, 4)]
CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.integers(1, 400))
def test_what_is_unpacked_is_what_was_packed_in_the_dtype_announced(bucket_bytes: int) -> None:
    buckets = list(pack_on(CPU, NOTES, TENSORS, bucket_bytes=bucket_bytes))
    found = []
    for bucket in buckets:
        assert len(bucket.data) % 64 == 0
        found += unpack_from(NOTES[bucket.first : bucket.first + bucket.count], bucket.data)
    assert [name for name, _ in found] == ["a", "b", "c", "d"]
    for (_, tensor), note, sent in zip(found, NOTES, TENSORS):
        assert str(tensor.dtype) == f"torch.{note.dtype}" and torch.equal(tensor, sent.to(tensor.dtype))
    checksum = 0
    for bucket in buckets:
        checksum = digest(bucket.data, checksum)
        assert bucket.checksum == checksum
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))


def test_tensors_that_were_not_announced_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"tensor 0 has the shape \(3, 2\), but a of shape \(2, 3\) was announced"):
        list(pack_on(CPU, NOTES[:1], [torch.zeros(3, 2)]))
    with pytest.raises(RuntimeError, match="but no more tensors was announced"):
        list(pack_on(CPU, NOTES[:1], TENSORS[:2]))
    with pytest.raises(RuntimeError, match="2 tensors were announced, but only 1 came"):
        list(pack_on(CPU, NOTES[:2], TENSORS[:1]))


def test_a_bucket_of_another_length_is_an_error() -> None:
    (bucket,) = pack_on(CPU, NOTES[:2], TENSORS[:2])
    with pytest.raises(ValueError, match="ends inside the tensor b"):
        unpack_from(NOTES[:2], bucket.data[:64])
    with pytest.raises(ValueError, match="a bucket has 128 bytes, but its tensors have 64"):
        unpack_from(NOTES[:1], bucket.data)


def test_a_digest_is_what_its_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([3, -5], dtype=torch.int64).view(torch.uint8)
    factor = 0x5851F42D4C957F2D
    # Weights are 0 | 1 and factor | 1, which is odd already.
    assert digest(words) == (3 - 5 * factor) % 2**64
    assert digest(words, 9) == (9 * factor + 3 - 5 * factor) % 2**64
    assert digest(words[:0], 2**64 - 1) == 2**64 - 1
    monkeypatch.setattr(group_module, "_WORDS_AT_A_TIME", 1)
    assert digest(words) == (3 * factor - 5) % 2**64


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2047), st.integers(0, 7))
def test_any_changed_bit_changes_the_digest(place: int, bit: int) -> None:
    data = torch.arange(2048, dtype=torch.int64).to(torch.uint8)
    before = digest(data)
    data[place] ^= 1 << bit
    assert digest(data) != before


def test_parts_in_another_order_change_the_digest() -> None:
    data = torch.randint(0, 255, (1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert digest(torch.cat([data[512:], data[:512]])) != digest(data)


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(trainer: Callable[[Any], Any], worker: Callable[[Any], Any], timeout_s: float = 20.0) -> list[Any]:
    """What two ranks of a group give or raise; each in a thread."""
    results: list[Any] = [None, None]
    served = open_store("127.0.0.1", chosen := port(), serves=True, timeout_s=timeout_s)
    reached = open_store("127.0.0.1", chosen, serves=False, timeout_s=timeout_s)

    def run(rank: int, store: Any, work: Callable[[Any], Any]) -> None:
        try:
            results[rank] = work(WeightGroup("gloo", store, rank, 2, timeout_s=timeout_s))
        except Exception as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=arguments) for arguments in ((0, reached, trainer), (1, served, worker))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_bytes_arrive_as_they_were_sent() -> None:
    sent = torch.arange(256, dtype=torch.uint8)

    def trainer(group: WeightGroup) -> None:
        group.send(sent, lambda: None)
        group.send(sent[:8], lambda: None)

    _, found = together(trainer, lambda group: (group.receive(256), group.receive(8)))
    assert torch.equal(found[0], sent) and torch.equal(found[1], sent[:8])


def test_a_receiver_that_nothing_comes_to_gives_up_in_time() -> None:
    started = time.monotonic()
    _, error = together(lambda group: time.sleep(1.5), lambda group: group.receive(8), timeout_s=1.0)
    assert isinstance(error, GroupBroken) and "8 bytes did not come" in str(error)
    assert time.monotonic() - started < 15.0


def test_a_sender_gives_up_when_it_is_told_why() -> None:
    def trainer(group: WeightGroup) -> None:
        group.send(torch.zeros(64 * 2**20, dtype=torch.uint8), lambda: ValueError("the server said no"))

    error, _ = together(trainer, lambda group: time.sleep(0.5))
    assert isinstance(error, ValueError) and "said no" in str(error)


def test_nobody_to_meet_is_an_error_in_time() -> None:
    store = open_store("127.0.0.1", port(), serves=True, timeout_s=1.0)
    with pytest.raises(GroupBroken, match="rank 0 of 2 met nobody over gloo"):
        WeightGroup("gloo", store, 0, 2, timeout_s=1.0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(GroupBroken, match=f"port {taken} of 127.0.0.1.* cannot be opened.*set vllm_group_port"):
            open_store("127.0.0.1", taken, serves=True, timeout_s=1.0)


def test_a_port_that_nobody_opens_is_named() -> None:
    with pytest.raises(GroupBroken, match="was not reached"):
        open_store("127.0.0.1", port(), serves=False, timeout_s=1.0)
