"""A model that may sample three tokens, a, b and the end: its evaluation against the enumeration of all completions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from groupgrad.apps.eval.results import Evaluation
from groupgrad.evaluation.prompt_numbers import Measure, numbers_of_prompts


def token_ids(tokenizer: Any) -> list[int]:
    """The ids of a, b and the end."""
    return [tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "<eos>")]


def starts_with_a(completions: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
    """1 for a completion that begins with an a; its first character is the answer that votes."""
    log_extra("answer_parsed", [text[:1] or None for text in completions])
    return [float(text.startswith("a")) for text in completions]


def check_against_enumeration(found: Evaluation, model: Any, tokenizer: Any, prompts: Sequence[str]) -> None:
    """Completions of at most two tokens, scored by `starts_with_a`: each of the 7 has a probability, and so has pass@k.

    With n samples of a prompt the estimate of pass@1 has the standard error sqrt(p (1 - p) / n).
    """
    ids, size = token_ids(tokenizer), len(found.prompts[0].completions)
    assert {text for prompt in found.prompts for text in prompt.completions} == {"", "a", "b", "aa", "ab", "ba", "bb"}
    numbers = numbers_of_prompts(found.prompts, Measure((1, 3, 20)))

    def after(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
        return torch.softmax(logits[ids], 0).tolist()

    for place, text in enumerate(prompts):
        prompt_ids = tokenizer(text).input_ids
        p = after(prompt_ids)[0]  # the first token is an a
        spread = math.sqrt(p * (1 - p) / size)
        assert numbers["pass@1"][place] == pytest.approx(p, abs=5 * spread)
        for k in (3, 20):  # whose derivative by p is k (1 - p)^(k - 1)
            slope = k * (1 - p) ** (k - 1)
            expected = 1 - (1 - p) ** k
            assert numbers[f"pass@{k}"][place] == pytest.approx(expected, abs=5 * spread * slope + 1e-3)
        for first, second in itertools.product((0, 1), repeat=2):
            text = "ab"[first] + "ab"[second]
            exact = after(prompt_ids)[first] * after([*prompt_ids, ids[first]])[second]
            share = found.prompts[place].completions.count(text) / size
            assert share == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / size)), text
