"""An address whose answers are known beforehand, and requests to it as plain HTTP."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from groupgrad.integrations.agents.wire import Answer, Question

CALLS = [
    {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": number})}}
    for number in range(2)
]


def answer(content: str, *, calls: int = 0, reason: str = "stop", **fields: Any) -> Answer:
    """An answer of three tokens with so many calls; `reasoning` is what the model thought, `stop_text` its end."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if "reasoning" in fields:
        message["reasoning_content"] = fields.pop("reasoning")
    if calls:
        message["tool_calls"] = CALLS[:calls]
    return Answer(message, content, reason, 5, ["x", "y", "z"], None, **fields)


class FixedAnswers:
    """Gives every question the same answer; None: it leaves all questions waiting. `asked` has them."""

    def __init__(self, answer: Answer | None):
        self.asked: list[Question] = []
        self._answer = answer

    def ask(self, question: Question) -> Future[Answer]:
        self.asked.append(question)
        future: Future[Answer] = Future()
        if self._answer is not None:
            future.set_result(self._answer)
        return future


def send(url: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and text of what a POST of this JSON, or a GET, is answered. `x_api_key` is the header `x-api-key`."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", parts.path, content, names)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()
