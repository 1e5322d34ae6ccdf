"""Sampling from a real vLLM server, and its refusal of incomplete weights."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from real_vllm import OPTIONS, Served, is_greedy, mean_difference, requests, true_logprobs, vary
from waiting import free_port

from groupgrad.engines.base import Request
from groupgrad.integrations.vllm.client import ServerClient
from groupgrad.integrations.vllm.http import Address, ServerRefused, call
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.weight_transport import (
    GroupBroken,
    GroupTransport,
    SharedMemoryTransport,
)


@pytest.fixture
def engine(server: Served, policy: Any) -> VLLMServerPool:
    engine = server.engine()
    engine.connect(policy, num_tokens=64, options=OPTIONS)
    return engine


def test_each_push_is_what_is_sampled_from(engine: VLLMServerPool, policy: Any) -> None:
    rows, greedy = requests(), replace(OPTIONS, temperature=0.0)
    texts = []
    for version in range(3):
        vary(policy, version)
        engine.push(policy, version)
        assert engine.weight_version.startswith(f"{version}-")
        samples = engine.sample(rows, OPTIONS)
        assert mean_difference(policy, rows, samples) < 1e-5
        assert all(is_greedy(policy, row, sample) for row, sample in zip(rows, engine.sample(rows, greedy)))
        texts.append([sample.ids for sample in samples])
    assert texts[0] != texts[1] != texts[2]


def test_log_probs_are_of_the_temperature_softmax(engine: VLLMServerPool, policy: Any) -> None:
    engine.push(policy, 0)
    rows = requests()
    samples = engine.sample(rows, replace(OPTIONS, temperature=0.6))
    assert mean_difference(policy, rows, samples, temperature=0.6) < 1e-5


def test_cuts_renormalise_log_probs_over_what_is_left(engine: VLLMServerPool, policy: Any) -> None:
    engine.push(policy, 0)
    rows = requests()
    for row, sample in zip(rows, engine.sample(rows, replace(OPTIONS, top_k=3))):
        left = true_logprobs(policy, row.prompt_ids, sample.ids).topk(3, dim=-1)
        renormalised = left.values.log_softmax(-1)
        for place, (token, logprob) in enumerate(zip(sample.ids, sample.logprobs or [])):
            rank = left.indices[place].tolist().index(token)
            assert logprob == pytest.approx(float(renormalised[place, rank]), abs=1e-5)


def test_rows_end_at_the_ids_that_end_completions(engine: VLLMServerPool, policy: Any) -> None:
    engine.push(policy, 0)
    rows = requests()
    free = engine.sample(rows, replace(OPTIONS, eos_ids=()))
    assert all(sample.finish_reason == "length" and len(sample.ids) == 12 for sample in free)

    stop = free[0].ids[5]
    ended = engine.sample(rows[:1], replace(OPTIONS, eos_ids=(stop,)))[0]

    assert ended.ids == free[0].ids[: free[0].ids.index(stop) + 1] and ended.finish_reason == "eos"


def test_shared_memory_brings_the_weights(server: Served, policy: Any) -> None:
    engine = server.engine(transport=SharedMemoryTransport())
    engine.push(vary(policy, 7), 0)
    assert mean_difference(policy, requests(), engine.sample(requests(), OPTIONS)) < 1e-5


def test_a_process_group_brings_weights_again_and_again(server: Served, policy: Any) -> None:
    transport = GroupTransport(free_port())
    engine = server.engine(transport=transport)
    for version in range(2):
        engine.push(vary(policy, version), version)
        assert mean_difference(policy, requests(), engine.sample(requests(), OPTIONS)) < 1e-5
    # A restarted trainer meets the workers again, at another port or the same.
    again = server.engine(transport=GroupTransport(transport._port))
    again.push(vary(policy, 5), 0)
    assert mean_difference(policy, requests(), again.sample(requests(), OPTIONS)) < 1e-5
    again.close()


def test_a_group_that_cannot_be_formed_says_why(server: Served, policy: Any) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        engine = server.engine(transport=GroupTransport(taken))
        with pytest.raises(GroupBroken, match=rf"(?s)the server says: .*port {taken} .*set vllm_group_port"):
            engine.push(policy, 0)
    # The server still works.
    engine = server.engine()
    engine.push(policy, 0)
    assert len(engine.sample(requests(), OPTIONS)) == 6


class Flips:
    """A transport that flips a bit of the second bucket."""

    def __init__(self, inner: SharedMemoryTransport):
        self._inner = inner
        self.device, self.connect, self.close = inner.device, inner.connect, inner.close

    def send(self, address: Address, weight_version: str, bucket: Any, *, timeout_s: float) -> None:
        if bucket.first > 0:
            bucket.data[17] ^= 1
        self._inner.send(address, weight_version, bucket, timeout_s=timeout_s)


@pytest.mark.parametrize("make", [SharedMemoryTransport, lambda: GroupTransport(free_port())], ids=["shared", "group"])
def test_weights_that_arrived_changed_are_refused(
    make: Callable[[], SharedMemoryTransport], server: Served, policy: Any
) -> None:
    engine = server.engine(transport=Flips(make()))
    with pytest.raises(ServerRefused, match=r"pushing version 3 .*its bytes have the checksum") as caught:
        engine.push(policy, 3)
    assert caught.value.status == 500
    _nothing_is_sampled(server, engine)
    engine.close()


def test_a_push_that_leaves_weights_out_is_refused(server: Served, policy: Any) -> None:
    engine = server.engine()
    engine.connect(policy)
    del policy.lm_head.weight
    with pytest.raises(ServerRefused, match=r"nothing was sent for lm_head\.weight"):
        engine.push(policy, 0)
    _nothing_is_sampled(server, engine)


def test_a_push_that_does_not_end_leaves_a_server_that_does_not_sample(
    server: Served, engine: VLLMServerPool, policy: Any
) -> None:
    engine.push(policy, 0)
    before = [sample.ids for sample in engine.sample(requests(), OPTIONS)]
    body = {"weight_version": "1-dead", "tensors": [], "timeout_s": 5.0}
    call(server.address, "start", body, timeout_s=30.0)
    _nothing_is_sampled(server, engine, "1-dead")

    engine.push(policy, 1)
    assert [sample.ids for sample in engine.sample(requests(), OPTIONS)] == before


def _nothing_is_sampled(server: Served, engine: VLLMServerPool, other: str = "") -> None:
    """Neither groupgrad's route nor vLLM's own samples."""
    body = {"weight_version": engine.weight_version, "sampling": {}, "prompts": [], "rows": []}
    with pytest.raises(ServerRefused, match="nothing is sampled until one has") as caught:
        call(server.address, "generate", body, timeout_s=10.0)
    assert caught.value.status == 503 and other in str(caught.value)
    with pytest.raises(urllib.error.HTTPError) as refused:
        _completion(server)
    assert refused.value.code == 503


def _completion(server: Served) -> int:
    """The status of vLLM's own answer."""
    data = json.dumps({"model": server.command[server.command.index("--model") + 1], "prompt": [5, 6]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    request = urllib.request.Request(f"{server.address}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return answer.status


def test_another_trainer_pushes(server: Served, policy: Any) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    client, source = ServerClient(server.address), ModuleSource(vary(policy, 5))
    client.push_weights(source, "5-other")
    engine = server.engine(pushes=False)
    engine.connect(policy)
    engine.expect("5-other")
    assert mean_difference(policy, requests(), engine.sample(requests(), OPTIONS)) < 1e-5
    del policy.model.layers[1].mlp.down_proj.weight
    with pytest.raises(ServerRefused, match=r"nothing was sent for model\.layers\.1\.mlp\.down_proj\.weight"):
        client.push_weights(source, "6-other")


@pytest.mark.parametrize("regex", ["[0-9", "a{3,2}", r"\bword"])
def test_a_regex_that_cannot_be_held_to_is_refused_at_once(regex: str, server: Served, policy: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)Grammar error.*vllm_structured_outputs_regex=" + re.escape(repr(regex))):
        server.engine(regex=regex).connect(policy, options=OPTIONS)
    # Python's `re` has no such class; vLLM's expressions do.
    server.engine(regex=r"\p{Lu}+").connect(policy, options=OPTIONS)


def test_a_row_that_does_not_fit_is_named(engine: VLLMServerPool, policy: Any) -> None:
    engine.push(policy, 0)
    with pytest.raises(ValueError, match=r"row 1 \(a prompt of 140 tokens\)"):
        engine.sample([*requests(1), Request([5] * 140, seed=1, max_new_tokens=4)], OPTIONS)
    assert len(engine.sample(requests(), OPTIONS)) == 6


def test_what_is_given_up_is_not_sampled_on(server: Served, engine: VLLMServerPool, policy: Any) -> None:
    engine.push(policy, 0)
    with engine.session(OPTIONS) as session:
        session.submit(replace(requests(1)[0], max_new_tokens=100))
        session.advance()
    engine.push(policy, 1)
    assert torch.isfinite(torch.tensor(mean_difference(policy, requests(1), engine.sample(requests(1), OPTIONS))))
