"""Anthropic's messages at the address, as plain HTTP: they ask what OpenAI's form of the conversation asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fixed_answers import FixedAnswers, answer, send

from groupgrad.integrations.agents import messages_wire, wire
from groupgrad.integrations.agents.server import Address, make_app

PARAMETERS = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
TOOL = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}
HEAD = {"model": "m", "max_tokens": 6}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def result(call: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


def as_chat(content: list[dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message of Anthropic's form in OpenAI's."""
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in content
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": content[0]["text"], "tool_calls": calls}


# --- the forms of requests and answers ---

CALLING = [text("I look."), *({"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"at": n}} for n in (1, 2))]
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
CACHED = {**text("Always."), "cache_control": {"type": "ephemeral"}}
REPLIES = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"{n}\n{n}"} for n in (1, 2)]


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ({"messages": [user("a")]}, {"messages": [user("a")]}),
        (
            {"system": "Short.", "messages": [user([text("a"), text("b")])], "stop_sequences": ["x", "y"]},
            {"messages": [{"role": "system", "content": "Short."}, user("a\nb")], "stop": ["x", "y"]},
        ),
        (
            {"system": [text("Short."), CACHED], "messages": [user("a")], "temperature": 0.5, "top_p": 0.25},
            {
                "messages": [{"role": "system", "content": "Short.\nAlways."}, user("a")],
                "temperature": 0.5,
                "top_p": 0.25,
            },
        ),
        (
            {
                "messages": [
                    user("a"),
                    {"role": "assistant", "content": [THOUGHT, *CALLING]},
                    user([result(f"c{n}", [text(f"{n}"), text(f"{n}")]) for n in (1, 2)] + [text("and?")]),
                ],
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
            },
            {
                "messages": [user("a"), as_chat(CALLING) | {"reasoning_content": "hm"}, *REPLIES, user("and?")],
                "tools": [CHAT_TOOL],
                "tool_choice": "required",
            },
        ),
        (
            {
                "messages": [user("a"), {"role": "assistant", "content": CALLING}, user([result("c1", "1\n1")])],
                "tools": [TOOL],
                "tool_choice": {"type": "none"},
            },
            {"messages": [user("a"), as_chat(CALLING), REPLIES[0]]},
        ),
    ],
    ids=["text", "blocks", "options", "calls", "no tools"],
)
def test_a_question_is_that_of_openais_form(messages: dict[str, Any], chat: dict[str, Any]) -> None:
    asked = messages_wire.read_call({**HEAD, **messages}).question
    assert asked == wire.read_call({**HEAD, **chat}, is_chat=True).question


ANSWERS = {
    "text": answer("Yes."),
    "nothing": answer(""),
    "calls": answer("I look.", calls=2, reason="tool_calls"),
    "calls alone": answer("", calls=1, reason="tool_calls"),
    "thought": answer("é\u2028", reasoning="hm", reason="length"),
}
KINDS = {
    "text": ["text"],
    "nothing": ["text"],
    "calls": ["text", "tool_use", "tool_use"],
    "calls alone": ["tool_use"],
    "thought": ["thinking", "text"],
}


def assembled(stream: str) -> dict[str, Any]:
    """The message that server-sent events add up to."""
    whole: dict[str, Any] = {}
    pieces: dict[int, str] = {}
    for event in stream.split("\n\n")[:-1]:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] == "message_start":
            whole = value["message"]
        elif value["type"] == "content_block_start":
            assert value["index"] == len(whole["content"])
            whole["content"].append(value["content_block"])
        elif value["type"] == "content_block_delta":
            delta, block = value["delta"], whole["content"][value["index"]]
            if delta["type"] == "input_json_delta":
                pieces[value["index"]] = pieces.get(value["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif value["type"] == "message_delta":
            whole.update(value["delta"])
            whole["usage"] |= value["usage"]
    for index, piece in pieces.items():
        whole["content"][index]["input"] = json.loads(piece)
    assert value == {"type": "message_stop"}
    return whole


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stream_adds_up_to_the_answer(name: str) -> None:
    address = Address(make_app({"secret": FixedAnswers(ANSWERS[name])}.get))
    body = {**HEAD, "messages": [user("a")], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    try:
        status, whole = send(f"{address.url}/messages", body, x_api_key="secret")
        assert status == 200
        status, stream = send(f"{address.url}/messages", {**body, "stream": True}, authorization="Bearer secret")
        assert status == 200
    finally:
        address.close()
    found, expected = assembled(stream), json.loads(whole)
    assert found.pop("id") != expected.pop("id")
    assert found == expected
    assert [block["type"] for block in expected["content"]] == KINDS[name]
    assert expected["usage"] == {"input_tokens": 5, "output_tokens": 3}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer("a"), ("end_turn", None)),
        (answer("a", reason="length"), ("max_tokens", None)),
        (answer("a", stop_text="x"), ("stop_sequence", "x")),
        (answer("a", calls=1, reason="tool_calls"), ("tool_use", None)),
    ],
)
def test_why_an_answer_ended(given: wire.Answer, reason: tuple[str, str | None]) -> None:
    found = messages_wire.response(messages_wire.read_call({**HEAD, "messages": [user("a")]}), [given])
    assert (found["stop_reason"], found["stop_sequence"]) == reason


def test_thoughts_are_shown_to_those_that_ask_for_them() -> None:
    call = messages_wire.read_call({**HEAD, "messages": [user("a")]})
    assert [block["type"] for block in messages_wire.response(call, [ANSWERS["thought"]])["content"]] == ["text"]


def test_arguments_that_are_no_json_become_texts() -> None:
    given = answer("", calls=1, reason="tool_calls")
    given.message["tool_calls"] = [{"id": "c", "function": {"name": "look", "arguments": '{"at": NaN}'}}]
    call = messages_wire.read_call({**HEAD, "messages": [user("a")]})
    assert messages_wire.response(call, [given])["content"][0]["input"] == {"at": "NaN"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["messages", "chat/completions"])
def test_half_a_surrogate_pair_that_a_model_writes_arrives(path: str, stream: bool) -> None:
    given = answer("", calls=1, reason="tool_calls")
    call = {"name": "\ud83d", "arguments": json.dumps({"at": "\ud83d"})}
    given.message["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
    address = Address(make_app({"secret": FixedAnswers(given)}.get))
    body = {**HEAD, "messages": [user("a")], "stream": stream}
    status, found = send(f"{address.url}/{path}", body, authorization="Bearer secret")
    address.close()
    assert status == 200 and "\\ud83d" in found and found.endswith("\n\n" if stream else "}")


# --- what is refused ---


@pytest.fixture
def fixed() -> Iterator[tuple[str, FixedAnswers]]:
    """An address with the key `secret`, and what answers there."""
    answers = FixedAnswers(answer("Yes."))
    address = Address(make_app({"secret": answers}.get))
    yield address.url, answers
    address.close()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": [user([IMAGE])]}, "'image' cannot be read; this address takes text"),
        ({"messages": [user([result("c", [IMAGE])])]}, "'image' cannot be read"),
        ({"messages": [user([CALLING[1]])]}, "'tool_use' cannot be read"),
        ({"messages": [user([{"type": ["text"]}])]}, "cannot be read"),
        ({"messages": [user(5)]}, "cannot be read"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": "7"}]}, "the role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "7"}]}, "the role ['user']"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' has no name or no"),
        ({"tools": "look"}, "tools is no list"),
        ({"tool_choice": "auto"}, "tool_choice='auto' is no JSON object"),
        ({"tool_choice": {"type": "required"}}, "the type 'required' is unknown"),
        ({"top_k": 5}, "top_k=5 cannot be honoured"),
        ({"thread": {"type": "create"}}, "thread asks for what only Anthropic's servers do"),
        ({"mcp_servers": [{"url": "https://x"}]}, "mcp_servers asks for what only Anthropic's servers do"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "ask for the format in the prompt"),
        ({"max_tokens": 0}, "max_tokens=0 is no positive"),
        ({"stop_sequences": [""]}, "stop_sequences=[''] is no list of texts"),
        ({"temperature": "hot"}, "temperature='hot' cannot be sampled with"),
    ],
)
def test_what_messages_cannot_ask_for(change: dict[str, Any], said: str, fixed: Any) -> None:
    url, answers = fixed
    body = {**HEAD, "messages": [user("a")], **change}
    status, found = send(f"{url}/messages", body, x_api_key="secret")
    error = json.loads(found)
    assert status == 400 and error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert said in error["error"]["message"] and not answers.asked


def test_errors_have_their_codes() -> None:
    found = messages_wire.error_body(wire.BadRequest("too long", code="context_length_exceeded"))
    assert found["error"]["details"] == {"error_code": "context_length_exceeded"}
    found = messages_wire.error_body(wire.BadRequest("too late", status=503, code="timeout"))
    assert found["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("headers", [{}, {"x_api_key": "another"}, {"authorization": "Bearer another"}])
def test_a_key_that_is_unknown(headers: dict[str, str], fixed: Any) -> None:
    status, found = send(f"{fixed[0]}/messages", {**HEAD, "messages": [user("a")]}, **headers)
    assert status == 401 and json.loads(found)["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": "hot"}, "temperature='hot' cannot be sampled with; it is a number from 0 up to 100"),
        ({"temperature": -1}, "temperature=-1 cannot be sampled with"),
        ({"temperature": float("nan")}, "temperature=nan cannot be sampled with"),
        ({"top_p": 0}, "top_p=0 cannot be sampled with; it is a number above 0 and up to 1"),
        ({"stop": ["a", ""]}, "stop=['a', ''] is no list of texts"),
        ({"stop": 5}, "stop=5 is no list of texts"),
        ({"response_format": "json"}, "response_format='json' is no JSON object"),
        ({"top_k": 20}, "top_k=20 cannot be honoured"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls of a message is no list"),
    ],
)
def test_what_chats_cannot_ask_for(change: dict[str, Any], said: str, fixed: Any) -> None:
    url, answers = fixed
    body = {"messages": [user("a")], **change}
    status, found = send(f"{url}/chat/completions", body, authorization="Bearer secret")
    assert status == 400 and said in json.loads(found)["error"]["message"] and not answers.asked


def test_a_body_that_is_no_json(fixed: Any) -> None:
    for body in (b"{", b"[" * 100_000):
        status, found = send(f"{fixed[0]}/messages", body, x_api_key="secret")
        assert status == 400 and "no JSON" in json.loads(found)["error"]["message"]


# --- rows ---


def call_each_time(read: str, ids: list[int]) -> dict[str, Any]:
    """Reads every turn as its text and a call."""
    return {"content": f"{read}.", "tool_calls": [{"name": "look", "arguments": {"at": len(ids), "of": 0.5}}]}


def ask(session: Any, *messages: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The blocks of an answer."""
    url = session.env["ANTHROPIC_BASE_URL"] + "/v1/messages"
    body = {**HEAD, "messages": list(messages), **options}
    status, found = send(url, body, x_api_key=session.env["ANTHROPIC_API_KEY"])
    assert status == 200, found
    return json.loads(found)["content"]


def test_a_tool_over_two_turns_is_one_row_that_openais_form_continues(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), tools=[TOOL], system="7")
        answered = [user("a"), {"role": "assistant", "content": first}, user([result(first[1]["id"], "7"), text("b")])]
        second = ask(session, *answered, tools=[TOOL], system="7")
        replies = [{"role": "tool", "tool_call_id": blocks[1]["id"], "content": "7"} for blocks in (first, second)]
        session.openai().chat.completions.create(
            model="m",
            messages=[
                {"role": "system", "content": "7"},
                user("a"),
                as_chat(first),
                replies[0],
                user("b"),
                as_chat(second),
                replies[1],
            ],
            tools=[CHAT_TOOL],
            max_tokens=4,
        )
        return float(row["number"])

    trainer, found = play(solve, response_parser=call_each_time)
    assert [(len(rollout.turns), len(rollout.branches)) for rollout in found] == [(3, 0)] * 4
    assert all(rollout.finish_reason == "eos" for rollout in found)
    log = trainer.state.log_history[0]
    assert log["sampling/logp_mismatch"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("change", ["text", "arguments", "reply"])
def test_an_answer_that_is_rewritten_begins_a_branch(change: str, play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), tools=[TOOL])
        call = first[1]["id"]
        if change == "text":
            first[0]["text"] += "1"
        elif change == "arguments":
            first[1]["input"]["at"] += 1
        reply = user([result(call, "7")])
        second = ask(session, user("a"), {"role": "assistant", "content": first}, reply, tools=[TOOL])
        reply = user([result(call, "8" if change == "reply" else "7")])
        said = [{"role": "assistant", "content": blocks} for blocks in (first, second)]
        ask(session, user("a"), said[0], reply, said[1], user([result(second[1]["id"], "7")]), tools=[TOOL])
        return float(row["number"])

    _, found = play(solve, response_parser=call_each_time)
    assert [(len(rollout.turns), len(rollout.branches)) for rollout in found] == [(3, 1)] * 4


def test_a_row_goes_on_whether_thoughts_come_back_or_not(play: Any) -> None:
    def solve(row: dict[str, Any], session: Any) -> float:
        first = ask(session, user("a"), tools=[TOOL], thinking={"type": "adaptive"})
        assert [block["type"] for block in first] == ["thinking", "text", "tool_use"]
        said = {"role": "assistant", "content": first[row["number"] % 2 :]}
        ask(session, user("a"), said, user([result(first[2]["id"], "7")]), tools=[TOOL])
        return float(row["number"])

    def thinking(read: str, ids: list[int]) -> dict[str, Any]:
        return {**call_each_time(read, ids), "reasoning_content": "hm"}

    _, found = play(solve, response_parser=thinking, per_device_train_batch_size=8)
    assert {rollout.prompt.row["number"] % 2 for rollout in found} == {0, 1}
    assert [(len(rollout.turns), len(rollout.branches)) for rollout in found] == [(2, 0)] * 8


def test_a_stop_text_is_named(play: Any) -> None:
    stops = list("0123456789+=")
    heard: list[dict[str, Any]] = []

    def solve(row: dict[str, Any], session: Any) -> float:
        body = {"model": "m", "max_tokens": 40, "messages": [user("s")], "stop_sequences": stops}
        heard.append(json.loads(send(f"{session.base_url}/messages", body, x_api_key=session.api_key)[1]))
        return float(row["number"])

    play(solve)
    cut = [found for found in heard if found["stop_reason"] == "stop_sequence"]
    assert cut and all(found["stop_sequence"] in stops for found in cut)
    assert not any(set(found["content"][0]["text"]) & set(stops) for found in cut)
