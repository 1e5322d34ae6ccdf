"""Server side of one `generate` call: samples its rows and streams each as a line of JSON when it ends."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupgrad.integrations.vllm.media import check_prompt, vllm_prompt
from groupgrad.integrations.vllm.vllm_params import sampled_logprobs, sampling_params, version_counts

HEARTBEAT_S = 1.0
"""Seconds between heartbeat lines while tokens are sampled and no row ends."""


@dataclass(slots=True)
class ServerLoad:
    """Counters of the work of a whole server."""

    num_tokens: int = 0
    """Tokens sampled for rows since the server started."""


class RowStream:
    """The rows of one `generate` call; each is sampled independently, from its own seed, from construction on.

    `body` has `sampling`, `prompts` (lists of ids) and `rows`, each with `row` (its name in the answer), `prompt`
    (index into `prompts`), `seed`, `max_tokens`, and with images `images`, a key of the body's `images`, which holds
    lists of them. `weight_version` is that of the weights at the start: only rows that start with the same
    weights share keys and values. `weights` has the present `version` and `adapter`. `load` counts over all calls,
    since a row may have to wait for those of another rank.
    ValueError if vLLM refuses the options; LookupError or TypeError for a body without these fields.
    """

    def __init__(self, engine: Any, body: dict[str, Any], weight_version: str, weights: Any, load: ServerLoad):
        from vllm.sampling_params import RequestOutputKind

        self._engine, self._weights, self._load = engine, weights, load
        self._weight_version = weight_version
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        rows = []
        for row in body["rows"]:
            row_fields = {"seed": row["seed"], "max_tokens": row["max_tokens"]}
            params = sampling_params(body["sampling"], row_fields, output_kind=RequestOutputKind.DELTA)
            images = body["images"][row["images"]] if "images" in row else ()
            rows.append((row["row"], body["prompts"][row["prompt"]], images, params))
        self._tasks = [asyncio.create_task(self._sample(*row)) for row in rows]

    async def lines(self) -> AsyncIterator[bytes]:
        """One line of JSON for each ended row: `ids`, `logprobs`, `finish_reason` and `weight_versions`, or an `error`.

        `weight_versions` are pairs of a version and the number of consecutive tokens that its weights have sampled.
        Empty objects in between say that the server has sampled tokens; where nothing is sampled, nothing is said.
        """
        num_left, num_tokens = len(self._tasks), self._load.num_tokens
        while num_left:
            try:
                line = await asyncio.wait_for(self._lines.get(), HEARTBEAT_S)
                num_left -= 1
            except asyncio.TimeoutError:
                if self._load.num_tokens == num_tokens:
                    continue
                line, num_tokens = {}, self._load.num_tokens
            yield json.dumps(line).encode() + b"\n"

    def abort(self) -> None:
        """Stops sampling the rows that have not ended."""
        for task in self._tasks:
            task.cancel()

    async def _sample(self, row: int, prompt: list[int], images: Sequence[Any], params: Any) -> None:
        line: dict[str, Any] = {"row": row}
        ids: list[int] = []
        logprobs: list[float] = []
        spans: Any = ()
        try:
            outputs = self._engine.generate(
                {**vllm_prompt(prompt, images, self._engine), "cache_salt": self._weight_version},
                params,
                f"groupgrad-{uuid.uuid4().hex}",  # vLLM keys its answers by request id, so ids must be unique
                lora_request=self._weights.adapter,
            )
            async for output in outputs:
                if images:
                    check_prompt(prompt, output.prompt_token_ids)
                part = output.outputs[0]
                ids.extend(part.token_ids)
                logprobs.extend(sampled_logprobs(part.token_ids, part.logprobs if part.token_ids else []))
                self._load.num_tokens += len(part.token_ids)
                line["finish_reason"] = part.finish_reason
                # vLLM's own record, at the end of a row; a row without tokens has none.
                spans = getattr(part, "weight_versions", None) or ()
            line |= {"ids": ids, "logprobs": logprobs, "weight_versions": version_counts(spans, len(ids))}
        except Exception as error:  # reported to the trainer, as the failure of this row alone
            line["error"] = f"{type(error).__name__}: {error}"
        self._lines.put_nowait(line)
