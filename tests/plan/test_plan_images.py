"""`groupgrad plan` counts all weights of models that read images, or names the reason why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2VLConfig,
)

from groupgrad.apps.cli.main import main
from groupgrad.apps.plan.shapes import model_shape
from groupgrad.scoring.forward import ForwardOptions
from groupgrad.scoring.gradient_checkpointing import activation_bytes_per_token


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


@pytest.mark.parametrize("kind", [Qwen2VLConfig, Qwen2_5_VLConfig])
def test_a_text_decoder_without_a_language_model_of_its_own_is_measured_in_the_whole_model(kind: Any) -> None:
    text: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 512}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": 64, "embed_dim": 64, "out_hidden_size": 64}
    config = kind(text_config=text, vision_config={**vision, "intermediate_size": 64})
    shape = model_shape("sees", config, half=False)
    model = AutoModelForImageTextToText.from_config(config)
    saved = activation_bytes_per_token(model.train(), ForwardOptions())
    assert shape.all_layers_bytes + shape.other_bytes == pytest.approx(saved, rel=0.01)
    assert (shape.parameters, shape.layers, shape.kv_values) == (model.num_parameters(), 3, 3 * 2 * 2 * 16)


def test_models_that_hear_are_not_said_to_read_images(tmp_path: Path, capsys: Any) -> None:
    Qwen2AudioConfig().save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--device", "80GB"]) == 2
    assert "'qwen2_audio' have a text decoder beside parts for other things than images" in capsys.readouterr().err
