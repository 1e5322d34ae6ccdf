"""Arguments that groupgrad adds to vLLM's command line, and what has to be there for it."""

from __future__ import annotations

import pytest

from groupgrad.integrations.vllm import serve_command
from groupgrad.integrations.vllm.serve_command import check_plugin, whole_prompts


def test_prompts_are_whole_on_a_cpu():
    assert whole_prompts(["serve", "m"], is_cpu=True) == ["serve", "m", "--no-enable-chunked-prefill"]
    assert whole_prompts(["serve", "m"], is_cpu=False) == ["serve", "m"]


@pytest.mark.parametrize("word", ["enable-chunked-prefill", "no-enable-chunked-prefill", "enable_chunked_prefill"])
def test_what_the_user_says_stays(word: str):
    assert whole_prompts(["serve", "m", f"--{word}"], is_cpu=True) == ["serve", "m", f"--{word}"]


@pytest.mark.parametrize(
    ("allowed", "found", "words"),
    [
        ("other,groupgrad", ["groupgrad"], ""),
        ("other", ["groupgrad"], "VLLM_PLUGINS is 'other', so vLLM does not load .* add groupgrad"),
        (None, [], "groupgrad is not installed where vLLM looks for plugins"),
    ],
)
def test_a_server_that_could_not_receive_weights_is_not_started(
    allowed: str | None, found: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    monkeypatch.setattr(serve_command.importlib.metadata, "entry_points", lambda **wanted: found)
    if words:
        with pytest.raises(ValueError, match=words):
            check_plugin()
    else:
        check_plugin()
