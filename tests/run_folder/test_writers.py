"""The policy, a tool or the template is found as the writer of each token."""

from __future__ import annotations

from typing import Any

import pytest

from groupgrad.run_folder.token_texts import token_writers
from groupgrad.types import Prompt, Rollout

LETTERS = {"p": "policy", "t": "tool", "m": "template"}


def say(content: Any, role: str = "tool") -> dict[str, Any]:
    return {"role": role, "content": content}


CALL = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("texts", "sampled", "completion", "expected"),
    [
        pytest.param(["a", "b"], None, "ab", None, id="one turn"),
        pytest.param(["a", "b"], [True, True], [CALL], None, id="all sampled"),
        pytest.param(
            ["call", "<end>", "\n<tool>", "4", "2", "<end>", "\nso", "42"],
            [1, 1, 0, 0, 0, 0, 0, 1],
            [CALL, say("42"), CALL],
            "ppmttmmp",
            id="a reply",
        ),
        pytest.param(
            ["c", "<tool>1", "<end><tool>", "1", "<end>", "c", "<tool>", "1", "<end>", "x"],
            [1, 0, 0, 0, 0, 1, 0, 0, 0, 1],
            [CALL, say("1"), say("1"), CALL, say(" 1\n"), CALL],
            "ptmtmpmtmp",
            id="equal replies, one token with characters of both, blanks that the template strips",
        ),
        pytest.param(
            ["c", "<tool>", "<img>", "a cat", "<end>"],
            [1, 0, 0, 0, 0],
            [CALL, say([{"type": "image", "image": object()}, {"type": "text", "text": "a cat"}])],
            "pmmtm",
            id="a reply in parts, without a further turn",
        ),
        pytest.param(
            ["c", "<tool>", '"4\\n2"', "<end>"], [1, 0, 0, 0], [CALL, say("4\n2")], "pttt", id="changed by the template"
        ),
        pytest.param(["c", "<tool>", "<end>"], [1, 0, 0], [CALL, say("")], "pmm", id="an empty reply"),
        pytest.param(["c", "42", "d"], [1, 0, 1], "c42d", "ptp", id="a rollout_func"),
        pytest.param(["c", "", "", "d"], [1, 0, 0, 1], [CALL, say("x"), CALL], "pttp", id="tokens without texts"),
    ],
)
def test_writers(texts: list[str], sampled: list[int] | None, completion: Any, expected: str | None) -> None:
    owned = None if sampled is None else [bool(own) for own in sampled]
    rollout = Rollout(Prompt([1], {"prompt": "?"}, 0), 0, [0] * len(texts), "eos", completion, "", owned)
    found = token_writers(rollout, texts)
    assert found == (None if expected is None else [LETTERS[letter] for letter in expected])
