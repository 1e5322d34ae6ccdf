"""A reward by a language model that judges completions, asked over an OpenAI-compatible address."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from groupgrad import compat
from groupgrad.errors import RewardError
from groupgrad.rewards.text import completion_text, conversation_text

logger = logging.getLogger(__name__)

PROMPT = """Rate the answer to the question from 0 (useless) to 10 (perfect). Reply with the number alone.

Question:
{prompt}

Answer:
{completion}"""


def last_number(reply: str) -> float | None:
    """The last number of a reply, as a share of 10; None for a reply without one from 0 to 10.

    In "8/10" and "8 out of 10" it is 8.
    """
    numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?:/|out of)\s*10\b", "", reply))
    rating = float(numbers[-1]) if numbers else -1.0
    return rating / 10 if 0 <= rating <= 10 else None


@dataclass(eq=False)
class judge:
    """A reward function that asks a model how good each completion is.

    ```python
    reward = judge(model="gpt-5-mini", base_url="https://api.openai.com/v1", cache="judge.db")
    trainer = GRPOTrainer(model=..., reward_funcs=reward, ...)
    ```

    Requests run at the same time as other async rewards. Equal requests of a batch are sent once. Failed requests (no
    connection, time out, codes 408, 409, 429 and 5xx) are repeated with growing pauses, which a `Retry-After` of the
    server overrides. Metrics: `judge/requests`, `judge/cached`, `judge/unread`, `judge/failed`, `judge/tokens`;
    all are totals of this process.

    Raises:
        ImportError: the package `openai` is missing.
        RewardError: a request failed for good and `on_failure` is "error".
    """

    model: str
    """Name of the judging model."""
    base_url: str | None = None
    """Address of the server, such as `http://localhost:8000/v1`; None: that of the `openai` package."""
    prompt: str = PROMPT
    """Text of a request. `{prompt}`, `{completion}` and `{column}` of the data are filled in."""
    parse: Callable[[str], float | None] = last_number
    """Reads the reward from a reply; None if it has none, then the completion is not scored."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; the key itself is nowhere kept."""
    max_concurrency: int = 32
    """Requests at the same time."""
    timeout_s: float = 60.0
    """Time for one request."""
    max_retries: int = 5
    """Repetitions of a failed request."""
    on_failure: Literal["error"] | float | None = "error"
    """Reward of a completion whose request failed for good: "error" ends the run, None leaves it unscored."""
    cache: str | Path | None = None
    """SQLite file with the replies; the same request is then sent once, in later runs too. A file that cannot be used
    is a warning, and the run goes on without it."""
    request_options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further fields of each request."""

    def __post_init__(self) -> None:
        compat.require("openai", "rewards.judge")
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency={self.max_concurrency} lets no request through; set it to 1 or more")
        if self.on_failure not in ("error", None) and not isinstance(self.on_failure, (int, float)):
            raise ValueError(f"on_failure={self.on_failure!r} is not known; set it to 'error', None or a reward")
        if self.cache is not None:  # a reward function may change the folder that relative paths belong to
            self.cache = os.path.abspath(self.cache)
        self.__name__ = "judge"
        self._counts = {"requests": 0.0, "cached": 0.0, "unread": 0.0, "failed": 0.0, "tokens": 0.0}
        self._cache_failed = False

    async def __call__(
        self, prompts: list[Any], completions: list[Any], log_metric: Callable[..., None] | None = None, **columns: Any
    ) -> list[float | None]:
        """The reward of each completion."""
        from openai import AsyncOpenAI

        limit = asyncio.Semaphore(self.max_concurrency)
        async with AsyncOpenAI(
            api_key=os.environ.get(self.api_key_env, "none"),
            base_url=self.base_url,
            timeout=self.timeout_s,
            max_retries=self.max_retries,
        ) as client:
            rows = [
                {name: values[row] for name, values in columns.items() if isinstance(values, (list, tuple))}
                | {"prompt": conversation_text(prompts[row]), "completion": completion_text(completions[row])}
                for row in range(len(completions))
            ]
            texts = [self.prompt.format(**row) for row in rows]
            distinct = list(dict.fromkeys(texts))
            replies = dict(zip(distinct, await asyncio.gather(*(self._ask(client, limit, t) for t in distinct))))
        rewards = [self._reward(replies[text]) for text in texts]
        if log_metric is not None:
            for name, value in self._counts.items():
                log_metric(f"judge/{name}", value)
        return rewards

    def _reward(self, reply: str | None) -> float | None:
        if reply is None:
            return None if self.on_failure == "error" else self.on_failure
        reward = self.parse(reply)
        self._counts["unread"] += reward is None
        return reward

    async def _ask(self, client: Any, limit: asyncio.Semaphore, text: str) -> str | None:
        """The model's reply to a text; None if the request failed for good."""
        from openai import OpenAIError

        body = {"model": self.model, "messages": [{"role": "user", "content": text}], **self.request_options}
        key = hashlib.sha256(json.dumps([str(self.base_url), body], sort_keys=True).encode()).hexdigest()
        async with limit:
            if cached := self._query("SELECT reply FROM replies WHERE key = ?", key):
                self._counts["cached"] += 1
                return cached[0][0]
            self._counts["requests"] += 1
            try:
                answer = await client.chat.completions.create(**body)
                reply = answer.choices[0].message.content or ""
            except (OpenAIError, LookupError, TypeError, AttributeError) as error:  # or an answer without a reply
                self._counts["failed"] += 1
                if self.on_failure == "error":
                    raise RewardError(
                        f"judge: {self.model} at {client.base_url} failed after {self.max_retries} repetitions: "
                        f"{type(error).__name__}: {error}; see to the server, or set on_failure=None to leave such "
                        "completions unscored"
                    ) from error
                return None
        if answer.usage is not None:
            self._counts["tokens"] += answer.usage.prompt_tokens + answer.usage.completion_tokens
        self._query("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply)
        return reply

    def _query(self, statement: str, *values: str) -> list[Any]:
        """Runs a statement on the cache and returns its rows; empty without a cache.

        After a failure the cache is no longer used.
        """
        if self.cache is None or self._cache_failed:
            return []
        try:
            # A connection for each use, since ranks and runs share the file and threads may not share a connection.
            with closing(sqlite3.connect(str(self.cache), timeout=30.0)) as connection, connection:
                connection.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)")
                return connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            self._cache_failed = True
            logger.warning(
                "judge: the cache %s cannot be used (%s: %s); replies are no longer kept, and every request is sent",
                self.cache,
                type(error).__name__,
                error,
            )
            return []
