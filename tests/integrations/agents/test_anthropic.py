"""The package `anthropic` at the address, as it is (`make test-agents`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from base_fixtures import CHARACTERS
from fixed_answers import FixedAnswers, answer

from groupgrad.integrations.agents.server import Address, make_app

anthropic: Any = pytest.importorskip("anthropic", reason="anthropic is not installed: `make test-agents` installs it")

TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
}
ASKED = {"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def client_of() -> Iterator[Callable[..., Any]]:
    """`client_of(answers, key, timeout_s=None)`: a client of an address with these answers for the key `secret`."""
    addresses: list[Address] = []

    def make(answers: FixedAnswers, key: str = "secret", timeout_s: float | None = None) -> Any:
        addresses.append(Address(make_app({"secret": answers}.get, timeout_s=timeout_s)))
        return anthropic.Anthropic(base_url=addresses[-1].url.removesuffix("/v1"), api_key=key)

    yield make
    for address in addresses:
        address.close()


def call_each_time(read: str, ids: list[int]) -> dict[str, Any]:
    """Reads every turn as its text and a call."""
    return {"content": f"{read}.", "tool_calls": [{"name": "look", "arguments": {"at": len(ids)}}]}


def test_the_runner_of_tools_makes_one_row(play: Any) -> None:
    places: list[int] = []

    async def solve(row: dict[str, Any], session: Any) -> float:
        @anthropic.beta_async_tool
        async def look(at: int) -> str:
            """Looks.

            Args:
                at: Where.
            """
            places.append(at)
            return str(at)

        client = anthropic.AsyncAnthropic(base_url=session.env["ANTHROPIC_BASE_URL"], api_key=session.api_key)
        # Turns that end by a stop text are as good as finished ones, without which the runner runs no tool.
        options = {**ASKED, "stop_sequences": list(CHARACTERS), "tools": [look], "max_iterations": 3}
        async for message in client.beta.messages.tool_runner(**options):  # which first asks for a thread
            assert message.stop_reason == "tool_use" and message.content[-1].name == "look"
        return float(row["number"])

    _, found = play(solve, response_parser=call_each_time)
    assert [(len(rollout.turns), len(rollout.branches)) for rollout in found] == [(3, 0)] * 4
    assert len(places) >= 8


@pytest.mark.parametrize(
    "given",
    [answer("Yes."), answer(""), answer("I look.", calls=2, reason="tool_calls"), answer("é", stop_text="x")],
    ids=["text", "nothing", "calls", "stop text"],
)
def test_a_stream_gives_the_same_message(given: Any, client_of: Any) -> None:
    client = client_of(FixedAnswers(given))
    whole = client.messages.create(**ASKED, tools=[TOOL])
    with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts == given.message["content"]
    for block, other in zip(final.content, whole.content, strict=True):
        expected = other.to_dict()
        assert {name: block.to_dict()[name] for name in expected} == expected
    ending = ("stop_reason", "stop_sequence", "usage", "model", "role")
    assert [getattr(final, name) for name in ending] == [getattr(whole, name) for name in ending]


def test_a_late_request_is_not_sent_again(client_of: Any) -> None:
    waiting = FixedAnswers(None)
    with pytest.raises(anthropic.APIStatusError, match=r"not answered within its 0\.2 seconds") as late:
        client_of(waiting, timeout_s=0.2).messages.create(**ASKED)
    assert late.value.status_code == 503 and len(waiting.asked) == 1
