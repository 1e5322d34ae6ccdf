"""The text of each token of a rollout."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from groupgrad.run_folder.token_texts import TokenTexts


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
