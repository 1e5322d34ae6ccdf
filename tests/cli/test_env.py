"""`groupgrad env` with a model."""

from __future__ import annotations

import pytest
import tiny_vlms
from scripted_agents import with_tools

from groupgrad.apps.cli import main as cli
from groupgrad.kernels import status
from groupgrad.kernels.compile import cache_folder


@pytest.fixture
def described(capsys):
    """`described(folder)`: what the command prints of a model."""

    def described(folder):
        assert cli.main(["env", "--model", str(folder)]) == 0
        return capsys.readouterr().out

    return described


def test_it_describes_how_a_model_would_run(model_dir, described):
    text = described(model_dir)
    for name in ("groupgrad", "python", "torch", "transformers", "accelerate", "peft", "platform", "devices", "tools"):
        assert f"\n{name} " in f"\n{text}"
    assert "not available: the chat template shows no tool calls" in text
    assert "sampled by" in text
    assert "native engine: it samples from the modules that train, and its log-probs agree" in text
    assert "shared layout, output head in tiles (within" in text
    assert "because" not in text
    assert ["CPU", "kernels", *status().split()] in [line.split() for line in text.splitlines()]
    assert ["kernel", "cache", str(cache_folder())] in [line.split() for line in text.splitlines()]


def test_it_describes_the_chat_templates_tool_calls(model_dir, make_tokenizer, described):
    with_tools(make_tokenizer()).save_pretrained(model_dir)
    (line,) = [line for line in described(model_dir).splitlines() if line.startswith("tools")]
    assert "calls as JSON" in line
    assert "turns end with '<eos>'" in line


def test_a_vlm_is_tried_on_an_image(tmp_path, described):
    built = tiny_vlms.build("gemma3")
    built.model.save_pretrained(tmp_path)
    built.processor.tokenizer.save_pretrained(tmp_path)
    assert "not tried: there is no processor with a chat template" in described(tmp_path)
    built.processor.save_pretrained(tmp_path)
    text = described(tmp_path)
    assert "seen; a small one is part of a prompt of 47 tokens" in text
    assert "shared layout, output head in tiles (within" in text


def test_it_names_unsupported_parts_of_a_model(build, tmp_path, described):
    build("xglm (own attention)").save_pretrained(tmp_path)
    lines = [line for line in described(tmp_path).splitlines() if "attention interface" in line]
    assert [line.split("  ")[0] for line in lines] == ["sampled by", "because"]
    assert "transformers engine: its attention does not go through" in lines[0]


def test_a_missing_model_is_an_error(tmp_path, capsys):
    assert cli.main(["env", "--model", str(tmp_path / "nothing")]) == 1
    assert "cannot be loaded" in capsys.readouterr().err
