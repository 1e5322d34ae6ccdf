"""Model card of a training run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupgrad.telemetry.run_card import write_run_card

peft = pytest.importorskip("peft")

ADAPTERS = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_is_tagged_by_its_type(adapter: str, tmp_path: Path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = Qwen3ForCausalLM(Qwen3Config(vocab_size=20, num_key_value_heads=1, head_dim=8, **sizes))
    model = peft.get_peft_model(base, ADAPTERS[adapter]())
    text = write_run_card(SimpleNamespace(output_dir=tmp_path), model)
    header = yaml.safe_load(text.split("---")[1])
    assert header["library_name"] == "peft"
    assert [tag for tag in header["tags"] if tag in ADAPTERS] == [adapter]
