"""Attacks on a vLLM server, for the simulated one and for a real one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_http import raw_exchange, request

from groupgrad.integrations.vllm.http import Address, ServerRefused, call
from groupgrad.integrations.vllm.server_pool import VLLMServerPool
from groupgrad.integrations.vllm.wire import shared_file

PICKLE_ROUTES = ("check", "generate", "start", "finish", "init", "adapter")
PICKLE_PATHS = ("/v1/completions", "/v1/chat/completions", "/init_weight_transfer_engine", "/update_weights")
"""Routes of groupgrad, and paths of vLLM's own, that get a pickle as their body."""

BUCKETS: list[tuple[dict[str, Any], int]] = [
    ({"first": 1, "count": 1}, 409),
    ({"first": 0, "count": 2}, 409),
    ({"first": 0, "count": 0}, 409),
    ({"first": -1, "count": 1}, 409),
    ({"first": "a", "count": 1}, 400),
]
"""Buckets that a push of `head_of` refuses: query, status."""


BAD_JSON = (
    b"{",
    b"[1]",
    b"\xff",
    b'{"a": 1e}',
    b"[" * 100_000,
    b"null",
    b'{"name": "a"}',
    pickle.dumps({"group": "a"}),
)
"""Bodies that none of `JSON_ROUTES` takes."""

JSON_ROUTES = ("init", "check", "generate", "start", "finish")
"""Routes of groupgrad whose body is JSON."""

PUSH = {"weight_version": "9-x", "timeout_s": 1.0, "tensors": []}
ROWS = {"weight_version": "9-x", "sampling": {}, "prompts": [[5]]}
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    # Workers meet at the server's own address, not at one that the caller names.
    ("init", {"port": 5, "timeout_s": 1.0, "host": "10.0.0.1"}, "multiple values for keyword argument 'host'"),
    ("start", {**PUSH, "tensors": [5]}, "the route start does not take this"),
    ("start", {**PUSH, "tensors": [["a", "os", [1]]]}, "'os' is not the name of a torch dtype"),
    ("start", {**PUSH, "tensors": [["a", "int8", [-1]]]}, "has the shape"),
    ("generate", {**ROWS, "rows": [5]}, "the route generate does not take this"),
    ("generate", {**ROWS, "rows": [{}]}, "the route generate does not take this: KeyError"),
    ("generate", {**ROWS, "rows": [{"row": 0, "prompt": 1, "seed": 0, "max_tokens": 1}]}, "IndexError"),
]
"""Fields that a route refuses: route, body, words of the answer."""


def address_of(trainer: VLLMServerPool) -> Address:
    """The trainer's only server."""
    return trainer.members[0].address


def head_of(model: Any) -> list[Any]:
    """The announcement of the model's output layer."""
    return ["lm_head.weight", "float32", list(model.lm_head.weight.shape)]


def announce(trainer: VLLMServerPool, version: str, tensors: list[list[Any]]) -> None:
    """Begin a push."""
    body = {"weight_version": version, "tensors": tensors, "timeout_s": 1.0}
    call(address_of(trainer), "start", body, timeout_s=5.0)


def send_bucket(trainer: VLLMServerPool, version: str, data: bytes, **query: Any) -> None:
    """Sends a bucket in shared memory."""
    with shared_file(data) as name:
        query = {"weight_version": version, "shared": name, **query}
        call(address_of(trainer), "update", b"", query=query, timeout_s=30.0)


def bucket_is_refused(trainer: VLLMServerPool, model: Any, query: dict[str, Any], status: int) -> None:
    """Sends one of `BUCKETS` to a push of `head_of` that is under way as 1-x."""
    with pytest.raises(ServerRefused) as caught:
        send_bucket(trainer, "1-x", bytes(4 * model.lm_head.weight.numel()), **query)
    assert caught.value.status == status


def bad_bodies_are_refused(trainer: VLLMServerPool, port: int, key: str) -> None:
    """Sends each of `BAD_JSON` to each of `JSON_ROUTES`, and `BAD_FIELDS`."""
    for body in BAD_JSON:
        for route in JSON_ROUTES:
            status, answer = raw_exchange(port, request(f"/groupgrad/{route}", body, key))
            assert status == 400 and answer["error"], (route, status, answer)
    for route, fields, words in BAD_FIELDS:
        version = {"weight_version": trainer.weight_version} if route == "generate" else {}
        with pytest.raises(ServerRefused, match=words) as caught:
            call(address_of(trainer), route, {**fields, **version}, timeout_s=5.0)
        assert caught.value.status == 400


def send_half_a_push(trainer: VLLMServerPool, model: Any) -> None:
    """Announces two tensors, sends zeros for the first, and tries to commit."""
    announce(trainer, "1-x", [head_of(model), ["model.norm.weight", "float32", list(model.model.norm.weight.shape)]])
    send_bucket(trainer, "1-x", bytes(4 * model.lm_head.weight.numel()), first=0, count=1)
    with pytest.raises(ServerRefused, match="2 tensors were announced, 1 came"):
        call(address_of(trainer), "finish", {"weight_version": "1-x", "checksum": 0}, timeout_s=30.0)


def nothing_is_sampled(trainer: VLLMServerPool, port: int, key: str) -> None:
    """No route samples, and the server answers that a push has not ended."""
    assert raw_exchange(port, request("/v1/completions", b'{"prompt": "a"}', key))[0] == 503
    rows = {"prompts": [[5]], "rows": [{"row": 0, "prompt": 0, "seed": 0, "max_tokens": 1}]}
    for version in (trainer.weight_version, "1-x"):
        with pytest.raises(ServerRefused, match=r"the push '1-x' of weights has not ended") as caught:
            call(address_of(trainer), "generate", {"weight_version": version, "sampling": {}, **rows}, timeout_s=30.0)
        assert caught.value.status == 503
    assert call(address_of(trainer), "info", timeout_s=30.0)["complete"] is False


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._path,)


def pickles_stay_closed(port: int, key: str, trainer: VLLMServerPool, folder: Path) -> None:
    """Sends a pickle that writes a file, as the body of each route and as a tensor. It leaves a push under way."""
    bomb = pickle.dumps(Bomb(folder / "exploded"))
    pickle.loads(bomb)  # it works
    (folder / "exploded").unlink()
    for path in (*(f"/groupgrad/{route}" for route in PICKLE_ROUTES), *PICKLE_PATHS):
        raw_exchange(port, request(path, bomb, key))
    announce(trainer, "1-x", [["lm_head.weight", "uint8", [len(bomb)]]])
    padded = bomb + bytes(-len(bomb) % 64)
    with pytest.raises(ServerRefused):  # the worker's tensor has another shape
        send_bucket(trainer, "1-x", padded, first=0, count=1)
    assert not (folder / "exploded").exists()
