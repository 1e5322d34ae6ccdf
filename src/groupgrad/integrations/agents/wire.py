"""Requests and answers of the address, in the form of OpenAI's API: chat completions and completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MODEL = "policy"
"""Name of the model that clients are told. Any name in a request is answered by the policy."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_p": (0, 0.0),
    "top_k": (0, -1),
}
"""Parameters that would change the distribution or the answer, and the values at which they do not."""

NO_CODE = "invalid_request_error"
"""Code of errors without one of their own."""
_COLDEST, _MAX_TEMPERATURE = 1e-5, 100.0


class BadRequest(ValueError):
    """A request that cannot be answered; the message says what to change."""

    def __init__(self, message: str, *, status: int = 400, code: str = NO_CODE):
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's API words it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(slots=True, frozen=True)
class Question:
    """One completion that a client asks for."""

    messages: list[dict[str, Any]]
    """The conversation, contents as texts; empty for a completion of plain text."""
    text: str | list[int] | None = None
    """Text or token ids to complete; None for a conversation."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    wanted: Mapping[str, float] = field(default_factory=dict)
    """`temperature` and `top_p`, where the request has them."""
    forces_calls: bool = False
    """The request's `tool_choice` asks for a call."""
    seed: int | None = None
    """For the random stream of the answer; in training the row's seed decides."""


@dataclass(slots=True, frozen=True)
class Answer:
    """One sampled turn, as the client gets it."""

    message: dict[str, Any]
    """In the form of the API: `role`, `content`, perhaps `tool_calls` with ids and arguments as texts."""
    text: str
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    num_prompt_tokens: int
    tokens: list[str]
    """The text of each sampled token."""
    logprobs: list[float] | None
    """Nats, of each sampled token."""
    stop_text: str | None = None
    """The text of `Question.stop` that ended the turn; None if none did."""


@dataclass(slots=True, frozen=True)
class Call:
    """A request: its question, the number of answers, and their form."""

    question: Question
    is_chat: bool
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    shows_reasoning: bool = False
    """In Anthropic's form: the answer has the reasoning, too. In OpenAI's it always has."""

    @property
    def questions(self) -> list[Question]:
        """One for each answer; seeds, if the request has one, count up from it."""
        question = self.question
        if question.seed is None:
            return [question] * self.n
        return [replace(question, seed=question.seed + number) for number in range(self.n)]


def read_call(body: Any, *, is_chat: bool) -> Call:
    """The request of a JSON body. BadRequest for what cannot be honoured."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body is not a JSON object")
    refuse_others(body, _REFUSED)
    kind = read_object(body, "response_format").get("type", "text")
    if kind != "text":
        raise BadRequest(f"response_format {kind!r} cannot be honoured; ask for the format in the prompt")
    n, seed = body.get("n") or 1, body.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest(f"seed={seed!r} is no whole number")
    if not isinstance(n, int) or not 1 <= n <= 128:
        raise BadRequest(f"n={n!r} is no whole number from 1 to 128")
    question = Question(
        messages=_messages(body) if is_chat else [],
        text=None if is_chat else _text(body.get("prompt")),
        tools=_tools(body) if is_chat else [],
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=read_stop(body, "stop"),
        forces_calls=is_chat and bool(body.get("tools")) and body.get("tool_choice") not in (None, "auto", "none"),
        wanted=read_wanted(body),
        seed=seed,
    )
    options = read_object(body, "stream_options")
    return Call(
        question,
        is_chat,
        n,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        logprobs=body.get("logprobs") not in (None, False, 0),
    )


def refuse_others(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """BadRequest for a parameter that has another value than those at which it changes nothing."""
    for name, values in neutral.items():
        if body.get(name) is not None and body[name] not in values:
            raise BadRequest(
                f"{name}={body[name]!r} cannot be honoured: the tokens are trained with the log-probs of the policy's "
                f"own distribution. Leave it out"
            )


def read_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of this name, empty if there is none."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name}={value!r} is no JSON object")
    return value


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Tokens that an answer may have, by the first of these names that the body has."""
    for name in names:
        if (most := body.get(name)) is not None:
            if type(most) is not int or most < 1:
                raise BadRequest(f"{name}={most!r} is no positive whole number")
            return most
    return None


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The stop texts of this name."""
    given = body.get(name) or []
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(f"{name}={given!r} is no list of texts, each of at least one character")
    return tuple(texts)


def read_wanted(body: Mapping[str, Any]) -> dict[str, float]:
    """The temperature and top-p, where the body has them; a temperature by which logits may become infinite is 0."""
    wanted: dict[str, float] = {}
    for name, most in (("temperature", _MAX_TEMPERATURE), ("top_p", 1.0)):
        if (value := body.get(name)) is None:
            continue
        if not isinstance(value, (int, float)) or not 0 <= value <= most or (name == "top_p" and value == 0):
            least = "above 0 and" if name == "top_p" else "from 0"
            raise BadRequest(f"{name}={value!r} cannot be sampled with; it is a number {least} up to {most:g}")
        wanted[name] = float(value) if name == "top_p" or value >= _COLDEST else 0.0
    return wanted


def _text(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt)):
        return prompt
    raise BadRequest("prompt is neither one text nor one list of token ids")


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        return []
    if not isinstance(tools, list) or not all(
        isinstance(t, dict) and isinstance(t.get("function"), dict) for t in tools
    ):
        raise BadRequest("tools is no list of {'type': 'function', 'function': {...}}")
    return tools


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of at least one message")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """A message with what chat templates read: text, calls with arguments as objects, ids."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("a message is no object with a role")
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    found: dict[str, Any] = {"role": role, "content": read_content(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None and role == "tool":
            found[name] = str(message[name])
    if reasoning := message.get("reasoning_content"):
        found["reasoning_content"] = str(reasoning)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequest("tool_calls of a message is no list")
        found["tool_calls"] = [read_tool_call(call) for call in calls]
    return found


def read_content(content: Any) -> str:
    """The text of a message, of its blocks one a line; BadRequest for blocks that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise BadRequest(f"a content block of the kind {kind!r} cannot be read; this address takes text")
        parts.append(str(block.get("text") or block.get("refusal") or ""))
    return "\n".join(parts)


def read_tool_call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest("a tool call has no function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"arguments": arguments}
    named = {"name": str(function.get("name")), "arguments": arguments}
    identity = {} if call.get("id") is None else {"id": str(call["id"])}
    return {"type": "function", **identity, "function": named}


def message_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message in the API's form; its calls have ids."""
    found: dict[str, Any] = {"role": "assistant", "content": turn.get("content") or ""}
    if turn.get("reasoning_content"):
        found["reasoning_content"] = turn["reasoning_content"]
    if calls := turn.get("tool_calls"):
        found["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for call in calls
        ]
    return found


def response(call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body that answers a call."""
    kind = "chat.completion" if call.is_chat else "text_completion"
    choices = [_choice(call, answer, index) for index, answer in enumerate(answers)]
    return {**_head(kind), "choices": choices, "usage": _usage(answers)}


def events(call: Call, answers: Sequence[Answer]) -> Iterator[str]:
    """The same as server-sent events. A turn comes in one piece, since calls can be read only at its end."""
    head = _head("chat.completion.chunk" if call.is_chat else "text_completion")
    for index, answer in enumerate(answers):
        choice = _choice(call, answer, index)
        reason = choice.pop("finish_reason")
        if call.is_chat:
            delta = choice.pop("message")
            for place, one in enumerate(delta.get("tool_calls", [])):
                one["index"] = place
            choice["delta"] = delta
        yield _event({**head, "choices": [{**choice, "finish_reason": None}]})
        empty = {"index": index, "finish_reason": reason, **({"delta": {}} if call.is_chat else {"text": ""})}
        yield _event({**head, "choices": [empty]})
    if call.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _head(kind: str) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, written = answers[0].num_prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _choice(call: Call, answer: Answer, index: int) -> dict[str, Any]:
    logprobs = None
    if call.logprobs and answer.logprobs is not None and call.is_chat:
        pairs = zip(answer.tokens, answer.logprobs)
        content = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
        ]
        logprobs = {"content": content, "refusal": None}
    elif call.logprobs and answer.logprobs is not None:
        logprobs = {"tokens": answer.tokens, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": []}
    body = {"message": dict(answer.message)} if call.is_chat else {"text": answer.text}
    reason = answer.finish_reason if call.is_chat or answer.finish_reason != "tool_calls" else "stop"
    return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
