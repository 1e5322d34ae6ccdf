"""The script of the GSM8K example writes a small model and its tokenizer, and both load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

SCRIPT = Path(__file__).parents[2] / "examples" / "make_small_qwen3.py"


def load_script():
    spec = importlib.util.spec_from_file_location("make_small_qwen3", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_small_model_loads_with_its_tokenizer(tmp_path, monkeypatch, capsys):
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(70))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        tmp_path / "tokenizer"
    )
    argv = [
        str(SCRIPT),
        str(tmp_path / "tokenizer"),
        str(tmp_path / "model"),
        "--hidden_size",
        "16",
        "--num_layers",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    load_script().main()
    assert "72 tokens" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.model_type == "qwen3"
    # Rounded up to a multiple of 64; the head shares the embedding.
    assert model.get_input_embeddings().weight.shape == (128, 16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w3 w4")["input_ids"] == [5, 6]
