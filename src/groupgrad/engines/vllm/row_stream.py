"""Rows that a server samples, told line by line."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from groupgrad.engines.vllm.media import check_prompt, decode, vllm_prompt
from groupgrad.engines.vllm.vllm_params import sampled_logprobs, sampling_params

HEARTBEAT_S = 1.0
"""Seconds between lines that show life while no row ends."""


@dataclass(slots=True)
class TokenCount:
    """Tokens that a server has sampled since it was started, for whoever asked."""

    value: int = 0


class RowStream:
    """The rows of one call of `generate`, sampled from now on: each by itself, by its own seed.

    `body` has `weight_version`, `sampling`, `prompts` (lists of ids) and `rows`: each with `row` (its name in the answer),
    `prompt` (place in `prompts`), `seed` and `max_tokens`. With images it has `images`, PNG in base64, and
    `images_of`: for each prompt their places in `images`. `count` is told of each row that begins (1) and ends (-1).
    `tokens` is the server's, of all calls: a row may have to wait for another rank's.
    ValueError if vLLM refuses the options.
    """

    def __init__(
        self, engine: Any, body: dict[str, Any], adapter: Any, count: Callable[[int], None], tokens: TokenCount
    ):
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._weight_version, self._adapter = engine, body["weight_version"], adapter
        self._prompts: list[list[int]] = body["prompts"]
        self._images: list[str] = body.get("images", [])
        self._images_of: list[list[int]] = body.get("images_of") or [[] for _ in self._prompts]
        self._decoded: dict[int, asyncio.Future[Any]] = {}
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._tokens = tokens
        fields = [{"seed": row["seed"], "max_tokens": row["max_tokens"]} for row in body["rows"]]
        params = [sampling_params(body["sampling"], own, output_kind=RequestOutputKind.DELTA) for own in fields]
        self._tasks = [asyncio.create_task(self._sample(*pair)) for pair in zip(body["rows"], params)]
        for task in self._tasks:
            count(1)
            task.add_done_callback(lambda _task: count(-1))

    async def lines(self) -> AsyncIterator[bytes]:
        """One line of JSON for each row as it ends (`ids`, `logprobs`, `reason`, or an `error`), and between them
        lines with the number of `tokens` that the server has sampled so far."""
        left = len(self._tasks)
        while left:
            try:
                line = await asyncio.wait_for(self._lines.get(), HEARTBEAT_S)
                left -= 1
            except asyncio.TimeoutError:
                line = {"tokens": self._tokens.value}
            yield json.dumps(line).encode() + b"\n"

    def give_up(self) -> None:
        """Stop sampling the rows that have not ended."""
        for task in self._tasks:
            task.cancel()

    async def _sample(self, row: dict[str, Any], params: Any) -> None:
        line: dict[str, Any] = {"row": row["row"], "weight_version": self._weight_version}
        ids: list[int] = []
        logprobs: list[float] = []
        try:
            prompt = self._prompts[row["prompt"]]
            images = [await self._image(place) for place in self._images_of[row["prompt"]]]
            # vLLM's own answers carry the ids of requests: they must be new.
            outputs = self._engine.generate(
                vllm_prompt(prompt, images, self._engine),
                params,
                f"groupgrad-{uuid.uuid4().hex}",
                lora_request=self._adapter,
            )
            async for output in outputs:
                if images:
                    check_prompt(prompt, output.prompt_token_ids)
                part = output.outputs[0]
                ids.extend(part.token_ids)
                logprobs.extend(sampled_logprobs(part.token_ids, part.logprobs if part.token_ids else []))
                self._tokens.value += len(part.token_ids)
                line["reason"] = part.finish_reason
            line |= {"ids": ids, "logprobs": logprobs}
        except Exception as error:  # of one row: told to the trainer, which knows whose it is
            line["error"] = f"{type(error).__name__}: {error}"
        self._lines.put_nowait(line)

    async def _image(self, place: int) -> Any:
        """The image at that place, decoded once, beside what else the server does."""
        if place not in self._decoded:
            self._decoded[place] = asyncio.ensure_future(asyncio.to_thread(decode, self._images[place]))
        return await asyncio.shield(self._decoded[place])
