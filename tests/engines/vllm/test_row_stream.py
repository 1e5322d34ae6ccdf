"""Rows that a server samples, from an engine with a script."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from groupgrad.engines.vllm import row_stream as rows_module
from groupgrad.engines.vllm.media import encode
from groupgrad.engines.vllm.row_stream import RowStream, TokenCount


class Engine:
    """Says one token a row; makes three tokens of an image's placeholder (9)."""

    model_config = SimpleNamespace(hf_config=SimpleNamespace(image_token_id=9))

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, params: Any, name: str, *, lora_request: Any) -> AsyncIterator[Any]:
        self.asked.append(prompt)
        images = "multi_modal_data" in prompt
        told = [token for token in prompt["prompt_token_ids"] for _ in range(3 if token == 9 and images else 1)]
        part = SimpleNamespace(token_ids=[4], finish_reason="length", logprobs=[{4: SimpleNamespace(logprob=-0.5)}])
        yield SimpleNamespace(outputs=[part], prompt_token_ids=told)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of vLLM's records."""
    package, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA="delta")  # type: ignore[attr-defined]
    params.StructuredOutputsParams = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)


def told(engine: Engine, **body: Any) -> dict[int, dict[str, Any]]:
    """The lines by row."""
    counts: list[int] = []

    async def run() -> list[bytes]:
        rows = RowStream(engine, {"weight_version": "0-a", "sampling": {}, **body}, None, counts.append, TokenCount())
        return [line async for line in rows.lines()]

    lines = [json.loads(line) for line in asyncio.run(run())]
    assert counts.count(1) == counts.count(-1) == len(body["rows"])
    return {line["row"]: line for line in lines if "row" in line}


def row(number: int, prompt: int) -> dict[str, Any]:
    return {"row": number, "prompt": prompt, "seed": number, "max_tokens": 1}


def test_a_row_ends_with_its_ids_and_log_probs() -> None:
    lines = told(Engine(), prompts=[[5, 6]], rows=[row(3, 0)])
    assert lines == {3: {"row": 3, "weight_version": "0-a", "reason": "length", "ids": [4], "logprobs": [-0.5]}}


def test_whoever_waits_is_told_of_tokens_that_others_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's rows may wait for all of another's; that is no server that hangs."""
    monkeypatch.setattr(rows_module, "HEARTBEAT_S", 0.01)
    tokens, body = TokenCount(), {"weight_version": "0-a", "sampling": {}, "prompts": [[5]], "rows": [row(0, 0)]}

    class Busy(Engine):
        async def generate(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
            await free.wait()
            async for output in super().generate(*args, **options):
                yield output

    async def run() -> list[int]:
        waiting = RowStream(Busy(), body, None, lambda change: None, tokens).lines()
        before = json.loads(await anext(waiting))["tokens"]
        _ = [line async for line in RowStream(Engine(), body, None, lambda change: None, tokens).lines()]
        after = json.loads(await anext(waiting))["tokens"]
        free.set()
        assert [line async for line in waiting]
        return [before, after, tokens.value]

    free = asyncio.Event()
    assert asyncio.run(run()) == [0, 1, 2]


def test_each_prompt_has_its_own_images() -> None:
    image_module = pytest.importorskip("PIL.Image")
    images = [image_module.new("RGB", (2, 2), color) for color in ("red", "blue")]
    engine = Engine()
    prompts = [[5, 9, 9, 9, 6, 9, 9, 9], [5, 9, 9, 9], [5, 6]]
    lines = told(
        engine,
        prompts=prompts,
        images=[encode(image) for image in images],
        images_of=[[0, 1], [1], []],
        rows=[row(number, number) for number in range(3)],
    )
    assert [lines[number]["ids"] for number in range(3)] == [[4]] * 3
    asked = sorted(engine.asked, key=lambda prompt: prompt["prompt_token_ids"][1:], reverse=True)
    asked.sort(key=lambda prompt: -len(prompt["prompt_token_ids"]))
    assert [prompt["prompt_token_ids"] for prompt in asked] == [[5, 9, 6, 9], [5, 9], [5, 6]]
    seen = [[image.getpixel((0, 0)) for image in prompt["multi_modal_data"]["image"]] for prompt in asked[:2]]
    assert seen == [[(255, 0, 0), (0, 0, 255)], [(0, 0, 255)]] and "multi_modal_data" not in asked[2]


def test_images_that_vllm_sees_otherwise_are_an_error_of_their_row_alone() -> None:
    image_module = pytest.importorskip("PIL.Image")
    picture = encode(image_module.new("RGB", (2, 2)))
    prompts = [[5, 9, 9], [5, 9, 9, 9], [5, 9, 9, 9]]
    lines = told(
        Engine(),
        prompts=prompts,
        images=[picture, "no image"],
        images_of=[[0], [0], [1]],
        rows=[row(number, number) for number in range(3)],
    )
    assert "4 tokens instead of 3" in lines[0]["error"] and lines[1]["ids"] == [4]
    assert "cannot be read" in lines[2]["error"]
