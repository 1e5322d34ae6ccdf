"""Rows that a server streams, from a scripted engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupgrad.integrations.vllm import server as rows_module
from groupgrad.integrations.vllm.server import RowStream, ServerLoad

WEIGHTS = SimpleNamespace(version="0-a", adapter=None)


class Engine:
    """Samples one token a row, and expands an image's placeholder (9) to three tokens."""

    model_config = SimpleNamespace(hf_config=SimpleNamespace(image_token_id=9))

    def __init__(self, *versions: str) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.versions = [SimpleNamespace(version=v, start=i, end=i + 1) for i, v in enumerate(versions or ["0-a"])]
        self.num_tokens = len(self.versions)

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> AsyncIterator[Any]:
        self.prompts.append(prompt)
        images = "multi_modal_data" in prompt
        expanded = [token for token in prompt["prompt_token_ids"] for _ in range(3 if token == 9 and images else 1)]
        count = self.num_tokens
        part = SimpleNamespace(token_ids=[4] * count, finish_reason="length")
        part.logprobs = [{4: SimpleNamespace(logprob=-0.5)}] * count
        part.weight_versions = self.versions
        yield SimpleNamespace(outputs=[part], prompt_token_ids=expanded)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of vLLM's classes."""
    package, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    params.StructuredOutputsParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def stream_lines(engine: Engine, **body: Any) -> dict[int, dict[str, Any]]:
    """The lines of a call, by row."""
    load = ServerLoad()

    async def run() -> list[bytes]:
        stream = RowStream(engine, {"sampling": {}, **body}, "0-a", WEIGHTS, load)
        return [line async for line in stream.lines()]

    lines = [json.loads(line) for line in asyncio.run(run())]
    return {line["row"]: line for line in lines if "row" in line}


def row(number: int, prompt: int) -> dict[str, Any]:
    return {"row": number, "prompt": prompt, "seed": number, "max_tokens": 1}


def test_a_row_ends_with_its_ids_and_log_probs() -> None:
    """It shares keys and values with rows of the same weights alone."""
    engine = Engine()
    lines = stream_lines(engine, prompts=[[5, 6]], rows=[row(3, 0)])
    line = {"row": 3, "weight_versions": [["0-a", 1]], "finish_reason": "length", "ids": [4], "logprobs": [-0.5]}
    assert lines == {3: line} and engine.prompts == [{"prompt_token_ids": [5, 6], "cache_salt": "0-a"}]


def test_a_row_names_the_weights_that_vllm_has_sampled_it_from() -> None:
    found = [stream_lines(Engine(*versions), prompts=[[5]], rows=[row(3, 0)]) for versions in (["1-b"], ["0-a", "1-b"])]
    assert [lines[3]["weight_versions"] for lines in found] == [[["1-b", 1]], [["0-a", 1], ["1-b", 1]]]


def test_a_record_that_lacks_a_token_fails_its_row() -> None:
    engine = Engine("0-a", "1-b")
    engine.versions[1].end = 1
    lines = stream_lines(engine, prompts=[[5]], rows=[row(3, 0)])
    assert "vLLM gave 2 tokens, and the weight versions of [('0-a', 1), ('1-b', 0)]" in lines[3]["error"]


def test_heartbeats_tell_of_the_tokens_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's rows may wait for all of another's, without the server being stuck."""
    monkeypatch.setattr(rows_module, "HEARTBEAT_S", 0.01)
    load, body = ServerLoad(), {"sampling": {}, "prompts": [[5]], "rows": [row(0, 0)]}

    class Busy(Engine):
        async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            await free.wait()
            async for output in super().generate(*args, **options):
                yield output

    async def run() -> int:
        waiting = RowStream(Busy(), body, "0-a", WEIGHTS, load).lines()
        heartbeat = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0.1)
        assert not heartbeat.done()  # silence while nothing is sampled
        _ = [line async for line in RowStream(Engine(), body, "0-a", WEIGHTS, load).lines()]
        assert json.loads(await heartbeat) == {}
        free.set()
        assert [line async for line in waiting]
        return load.num_tokens

    free = asyncio.Event()
    assert asyncio.run(run()) == 2


def test_each_prompt_has_its_own_images() -> None:
    engine = Engine()
    prompts = [[5, 9, 9, 9, 6, 9, 9, 9], [5, 9, 9, 9], [5, 6]]
    rows = [{**row(0, 0), "images": "both"}, {**row(1, 1), "images": "blue"}, row(2, 2)]
    lines = stream_lines(engine, prompts=prompts, images={"both": ["red", "blue"], "blue": ["blue"]}, rows=rows)
    assert [lines[number]["ids"] for number in range(3)] == [[4]] * 3
    assert [(prompt["prompt_token_ids"], prompt.get("multi_modal_data")) for prompt in engine.prompts] == [
        ([5, 9, 6, 9], {"image": ["red", "blue"]}),
        ([5, 9], {"image": ["blue"]}),
        ([5, 6], None),
    ]


def test_images_that_vllm_expands_otherwise_fail_their_row_alone() -> None:
    rows = [{**row(number, number), "images": "picture"} for number in range(2)]
    lines = stream_lines(Engine(), prompts=[[5, 9, 9], [5, 9, 9, 9]], images={"picture": ["picture"]}, rows=rows)
    assert "4 tokens instead of 3" in lines[0]["error"] and lines[1]["ids"] == [4]
