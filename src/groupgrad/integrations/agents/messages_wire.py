"""Requests and answers of the address in the form of Anthropic's API: messages.

A conversation becomes the same `Question` as in OpenAI's form, so a request continues what was answered in either.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from groupgrad.integrations.agents.wire import (
    MODEL,
    NO_CODE,
    Answer,
    BadRequest,
    Call,
    Question,
    read_content,
    read_limit,
    read_object,
    read_stop,
    read_tool_call,
    read_wanted,
    refuse_others,
)

_REFUSED: dict[str, tuple[Any, ...]] = {"top_k": (0,)}
_OF_SERVERS = {"thread": "thread_unsupported_request", "compaction": None, "container": None, "mcp_servers": None}
"""Fields of requests that only Anthropic's servers understand, with the code of their error, where it has one.

After `thread_unsupported_request` the package's runner of tools sends whole conversations."""
_BLOCKS = {"user": ("tool_result",), "assistant": ("tool_use", "thinking", "redacted_thinking"), "system": ()}
"""Kinds of content blocks besides texts, by the role of their message."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 409: "conflict_error", 413: "request_too_large", 503: "timeout_error"}
"""Kinds of errors by their status; all others are of the request."""


def read_call(body: Any) -> Call:
    """The request of a JSON body. BadRequest for what cannot be honoured."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body is not a JSON object")
    for name, code in _OF_SERVERS.items():
        if body.get(name) is not None:
            said = f"{name} asks for what only Anthropic's servers do; send the whole conversation without it"
            raise BadRequest(said, code=code or NO_CODE)
    refuse_others(body, _REFUSED)
    if (form := body.get("output_format") or read_object(body, "output_config").get("format")) is not None:
        raise BadRequest(f"the output format {form!r} cannot be honoured; ask for the format in the prompt")
    choice = read_object(body, "tool_choice").get("type", "auto")
    if choice not in ("auto", "any", "tool", "none"):
        raise BadRequest(f"a tool_choice of the type {choice!r} is unknown; it is 'auto', 'any', 'tool' or 'none'")
    tools = [] if choice == "none" else _tools(body.get("tools"))
    question = Question(
        messages=_messages(body),
        tools=tools,
        max_tokens=read_limit(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        forces_calls=bool(tools) and choice != "auto",
        wanted=read_wanted(body),
    )
    thinks = read_object(body, "thinking").get("type", "disabled") != "disabled"
    return Call(question, is_chat=True, stream=bool(body.get("stream")), shows_reasoning=thinks)


def _tools(tools: Any) -> list[dict[str, Any]]:
    """The tools as OpenAI's API has them, which is what chat templates know."""
    if not isinstance(tools or [], list):
        raise BadRequest("tools is no list")
    found = []
    for tool in tools or []:
        if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping) or not tool.get("name"):
            kind = tool.get("type") if isinstance(tool, Mapping) else None
            raise BadRequest(
                f"a tool of the type {kind!r} has no name or no input_schema, so the model cannot be told of it; give "
                f"both, and leave out tools that Anthropic's API brings or runs"
            )
        described = {"description": str(tool["description"])} if tool.get("description") else {}
        function = {"name": str(tool["name"]), **described, "parameters": dict(tool["input_schema"])}
        found.append({"type": "function", "function": function})
    return found


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages, system = body.get("messages"), read_content(body.get("system"))
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is no list of at least one message")
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        found += _read_message(message)
    return found


def _read_message(message: Any) -> list[dict[str, Any]]:
    """A message as those that chat templates read: results of tools are messages of their own, before the text."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in _BLOCKS:
        raise BadRequest(f"a message has the role {role!r}; it is 'user', 'assistant' or 'system'")
    content = message.get("content")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    blocks: dict[str, list[Any]] = {kind: [] for kind in _BLOCKS[role]}
    texts: list[Any] = []
    for block in given if isinstance(given, list) else [given]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        blocks.get(str(kind), texts).append(block)  # what is neither is refused with the texts
    text = read_content(texts)
    if role == "assistant":
        found: dict[str, Any] = {"role": role, "content": text}
        if reasoning := "\n".join(str(block.get("thinking") or "") for block in blocks["thinking"]):
            found["reasoning_content"] = reasoning
        if blocks["tool_use"]:
            found["tool_calls"] = [
                read_tool_call({"id": block.get("id"), "function": {**block, "arguments": block.get("input")}})
                for block in blocks["tool_use"]
            ]
        return [found]
    results = [
        {"role": "tool", "content": read_content(block.get("content")), "tool_call_id": str(block.get("tool_use_id"))}
        for block in blocks.get("tool_result", [])
    ]
    return results if results and not text else [*results, {"role": role, "content": text}]


def response(call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
    """The body that answers a call."""
    (answer,) = answers
    usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.tokens)}
    return {**_head(), "content": _blocks(call, answer), **_ending(answer), "usage": usage}


def events(call: Call, answers: Sequence[Answer]) -> Iterator[str]:
    """The same as server-sent events. A block comes in one piece, since calls can be read only at the turn's end."""
    whole = response(call, answers)
    usage = {**whole["usage"], "output_tokens": 0}
    start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", message=start)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            name = block["type"]  # "text" or "thinking", and so is the field
            empty, delta = {name: ""}, {"type": f"{name}_delta", name: block[name]}
        yield _event("content_block_start", index=index, content_block={**block, **empty})
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_ending(answers[0]), usage=whole["usage"])
    yield _event("message_stop")


def error_body(error: BadRequest) -> dict[str, Any]:
    """The error as Anthropic's API words it."""
    kind = _ERRORS.get(error.status, "invalid_request_error")
    details = {} if error.code == NO_CODE else {"details": {"error_code": error.code}}
    return {"type": "error", "error": {"type": kind, "message": str(error), **details}}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"


def _head() -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": MODEL}


def _ending(answer: Answer) -> dict[str, Any]:
    reason = _STOP_REASONS[answer.finish_reason]
    is_cut = reason == "end_turn" and answer.stop_text is not None
    return {"stop_reason": "stop_sequence" if is_cut else reason, "stop_sequence": answer.stop_text if is_cut else None}


def _blocks(call: Call, answer: Answer) -> list[dict[str, Any]]:
    """Text and calls; an empty text if there is neither, since programs read the first block."""
    message = answer.message
    calls, blocks = message.get("tool_calls", []), []
    if call.shows_reasoning and message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for one in calls:
        # A NaN, which models may write, is no JSON: here it becomes a text.
        arguments = json.loads(one["function"]["arguments"], parse_constant=str)
        blocks.append({"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": arguments})
    return blocks
