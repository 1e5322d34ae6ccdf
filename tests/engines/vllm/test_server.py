"""What groupgrad adds to vLLM's server, in front of an application and an engine with a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from groupgrad.engines.vllm.http import LEFT
from groupgrad.engines.vllm.server import Refusal, Routes
from groupgrad.engines.vllm.worker import OTHER_GROUP, WeightReceiver


class Engine:
    """Its only worker has what is asked of it done, and fails in vLLM's words."""

    def __init__(self, worker: Any):
        self._worker = worker

    async def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> None:
        try:
            getattr(self._worker, name)(*args)
        except RuntimeError as error:
            raise Exception(f"Call to {name} method failed: {error}") from None


class Asked:
    """A request with a body of JSON, or with words in its address."""

    def __init__(self, told: Any = None, **query: str):
        self._told, self.query_params = told, query

    async def json(self) -> Any:
        return self._told

    async def body(self) -> bytes:
        return b""


def test_a_worker_in_another_group_has_a_status_of_its_own() -> None:
    routes = Routes(None)
    routes._weights.whole, routes._weights.pushing = False, "3-a"
    engine = Engine(WeightReceiver())
    bucket = Asked(stamp="3-a", first="0", count="1", group="mine", num_bytes="64")
    with pytest.raises(Refusal, match=f"{OTHER_GROUP} None, and weights are to come over mine") as caught:
        asyncio.run(routes._bucket(engine, bucket))
    assert caught.value.status == LEFT
