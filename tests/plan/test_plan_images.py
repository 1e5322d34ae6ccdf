"""`groupgrad plan` counts all weights of models that read images, or names the reason why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Gemma3Config, Qwen2AudioConfig

from groupgrad.apps.cli.main import main


def test_all_weights_are_counted(tmp_path: Path, capsys: Any) -> None:
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    config.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--device", "80GB"]) == 0
    shown = capsys.readouterr().out
    with torch.device("meta"):
        count = AutoModelForImageTextToText.from_config(config).num_parameters()
    assert f"{count:,} parameters in 2 layers" in shown
    assert "The weights outside the text decoder are counted; the activations and tokens of images are not." in shown


def test_models_that_hear_are_not_said_to_read_images(tmp_path: Path, capsys: Any) -> None:
    Qwen2AudioConfig().save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--device", "80GB"]) == 2
    assert "'qwen2_audio' have a text decoder beside parts for other things than images" in capsys.readouterr().err
