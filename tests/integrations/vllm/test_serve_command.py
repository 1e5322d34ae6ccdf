"""Arguments that groupgrad adds to vLLM's command line."""

from __future__ import annotations

import pytest

from groupgrad.integrations.vllm.serve_command import whole_prompts


def test_prompts_are_whole_on_a_cpu():
    assert whole_prompts(["serve", "m"], is_cpu=True) == ["serve", "m", "--no-enable-chunked-prefill"]
    assert whole_prompts(["serve", "m"], is_cpu=False) == ["serve", "m"]


@pytest.mark.parametrize("word", ["enable-chunked-prefill", "no-enable-chunked-prefill", "enable_chunked_prefill"])
def test_what_the_user_says_stays(word: str):
    assert whole_prompts(["serve", "m", f"--{word}"], is_cpu=True) == ["serve", "m", f"--{word}"]
