"""vLLM in several ranks: group sizes and tensor-parallel sessions."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from groupgrad.engines.base import Request, Sample, sample_all
from groupgrad.integrations.vllm.colocate import TensorParallelSession
from groupgrad.integrations.vllm.colocate_start import check_tensor_parallel

CONFIG = SimpleNamespace(num_attention_heads=12, num_key_value_heads=4)


@pytest.mark.parametrize(("size", "ranks"), [(1, 3), (2, 2), (2, 6), (4, 8)])
def test_ranks_that_can_share_a_model(size: int, ranks: int) -> None:
    check_tensor_parallel(CONFIG, size, ranks=ranks)


@pytest.mark.parametrize(
    ("size", "ranks", "words"),
    [
        (2, 1, "is 2, but 1 training rank cannot be shared out in groups of 2: set it to a number that divides 1"),
        (2, 3, "is 2, but 3 training ranks cannot be shared out in groups of 2"),
        (8, 4, "is 8, but 4 training ranks"),
        (5, 5, "the model's 12 attention heads cannot be shared out in 5 equal parts"),
        (6, 6, "neither divides the model's 4 key-value heads nor is a multiple of them"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused_with_the_reason(size: int, ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_tensor_parallel(CONFIG, size, ranks=ranks)


class Engine:
    """One of several engines that must act alike: each step samples a token, which is the row's seed."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self._open: dict[int, tuple[Request, int]] = {}

    def submit(self, request: Request) -> int:
        if not request.prompt_ids:
            raise ValueError("an empty prompt")
        ticket = len([entry for entry in self.log if entry[0] == "submit"])
        self.log.append(("submit", request.seed))
        self._open[ticket] = request, 0
        return ticket

    def advance(self) -> list[tuple[int, Sample]]:
        self.log.append(("step", sorted(self._open)))
        ended = []
        for ticket, (request, length) in list(self._open.items()):
            self._open[ticket] = request, length + 1
            if length + 1 == request.max_new_tokens:
                del self._open[ticket]
                ended.append((ticket, Sample([request.seed] * request.max_new_tokens, "length")))
        return ended

    def abort(self, tickets: list[int]) -> None:
        if tickets:
            self.log.append(("abort", tickets))
        for ticket in tickets:
            self._open.pop(ticket, None)

    def close(self) -> None:
        self.log.append(("close", sorted(self._open)))


class Ranks:
    """Ranks simulated by threads."""

    def __init__(self, size: int):
        self.size, self._barrier = size, threading.Barrier(size, timeout=5.0)
        self._gathered: list[Any] = [None] * size
        self.engines = [Engine() for _ in range(size)]
        self.results: list[Any] = [None] * size

    def run(self, work: Any) -> None:
        def of(rank: int) -> None:
            def gather(obj: Any) -> list[Any]:
                self._gathered[rank] = obj
                self._barrier.wait()
                gathered = list(self._gathered)
                self._barrier.wait()
                return gathered

            session = TensorParallelSession(self.engines[rank], rank, gather)
            try:
                self.results[rank] = work(rank, session)
            except ValueError as error:
                self.results[rank] = error
            finally:
                session.close()

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)
        assert not any(thread.is_alive() for thread in threads)


def rows(*seeds: int, tokens: int = 3) -> list[Request]:
    return [Request([5], seed=seed, max_new_tokens=tokens) for seed in seeds]


def test_each_rank_gets_its_own_rows_and_all_engines_do_the_same() -> None:
    """A rank with nothing to sample goes on for the others."""
    ranks = Ranks(3)
    requests = [rows(1), rows(2, 3, tokens=5), []]
    ranks.run(lambda rank, session: [sample.ids for sample in sample_all(session, requests[rank])])
    assert ranks.results == [[[1, 1, 1]], [[2] * 5, [3] * 5], []]
    assert ranks.engines[0].log == ranks.engines[1].log == ranks.engines[2].log
    assert ranks.engines[0].log[:3] == [("submit", 1), ("submit", 2), ("submit", 3)]
    assert ranks.engines[0].log[-1] == ("close", [])


def test_what_one_rank_gives_up_no_engine_samples_on() -> None:
    def work(rank: int, session: TensorParallelSession) -> Any:
        if rank == 0:
            session.submit(rows(1, tokens=100)[0])
            session.advance()
            return None
        return sample_all(session, rows(2, tokens=4))[0].ids

    ranks = Ranks(2)
    ranks.run(work)
    assert ranks.results == [None, [2, 2, 2, 2]]
    assert ("abort", [0]) in ranks.engines[1].log and ranks.engines[0].log == ranks.engines[1].log


def test_a_row_that_is_refused_is_an_error_on_all_ranks() -> None:
    ranks = Ranks(2)
    bad = Request([], seed=1, max_new_tokens=3)
    ranks.run(lambda rank, session: sample_all(session, [bad] if rank else rows(4)))
    assert all(isinstance(result, ValueError) for result in ranks.results)
    assert ranks.engines[0].log == ranks.engines[1].log


def test_a_row_that_one_rank_aborts_no_engine_samples_on() -> None:
    """One that has been sent, and one that has not."""

    def work(rank: int, session: TensorParallelSession) -> Any:
        if rank == 1:
            return sample_all(session, rows(9, tokens=4))[0].ids
        sent = session.submit(rows(1, tokens=100)[0])
        session.advance()
        session.abort([sent, session.submit(rows(2, tokens=100)[0])])
        return session.num_open, sample_all(session, rows(3, tokens=2))[0].ids

    ranks = Ranks(2)
    ranks.run(work)
    assert ranks.results == [(0, [3, 3]), [9] * 4]
    assert ranks.engines[0].log == ranks.engines[1].log
    assert [entry[1] for entry in ranks.engines[0].log if entry[0] == "submit"] == [1, 9, 3]
    assert [entry[1] for entry in ranks.engines[0].log if entry[0] == "abort"] == [[0]]
