"""The text of each token of a rollout, and its writer: the policy, a tool or the template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupgrad.run_folder.token_texts import TokenTexts, token_writers
from groupgrad.types import Prompt, Rollout


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<unk>": 2, "▁a": 3}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (byte_tokenizer(), "a é€!", ["a", " ", "é€", "", "", "", "", "!"]),
        (spaced_tokenizer(), "one two one", [" one", " two", " one"]),
    ],
)
def test_texts_of_tokens_join_to_the_text(tokenizer, text, expected):
    ids = np.array(tokenizer.encode(text))
    assert TokenTexts(tokenizer)(ids) == expected


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
