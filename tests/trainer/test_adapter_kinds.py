"""Every kind of adapter that peft has trains exactly, or is refused before work starts.

`python bench/support_table.py` turns the results into the table of adapters in docs/models.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from small_runs import logprobs
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from groupgrad.models.weights import checkpoint_weights

QV: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
PROMPT: dict[str, Any] = {"num_virtual_tokens": 3}

MERGED: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, **QV},
    "ADAMSS": {"num_subspaces": 2, "subspace_rank": 1, **QV},
    "BEFT": QV,
    "BOFT": {"boft_block_size": 4, **QV},
    "C3A": {"block_size": 4, **QV},
    "DEFT": {"r": 4, **QV},
    "DELORA": {"r": 4, **QV},
    "FOURIERFT": {"n_frequency": 10, **QV},
    "FROD": QV,
    "GLORA": {"r": 4, **QV},
    "GRALORA": {"r": 4, **QV},
    "HIRA": {"r": 4, **QV},
    "HRA": {"r": 4, **QV},
    "IA3": {"feedforward_modules": [], **QV},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": {"r": 4, **QV},
    "LOKR": {"r": 4, **QV},
    "MISS": {"r": 4, **QV},
    "OFT": {"oft_block_size": 4, **QV},
    "OSF": QV,
    "PEANUT": {"r": 4, **QV},
    "PSOFT": {"r": 4, **QV},
    "RANDLORA": {"r": 4, **QV},
    "ROAD": {"group_size": 4, **QV},
    "SHIRA": {"r": 4, **QV},
    "SUPERTUNING": {"r": 4, **QV},
    "TINYLORA": QV,
    "TRAINABLE_TOKENS": {"token_indices": list(range(5, 30)), "target_modules": ["embed_tokens"]},
    "UNILORA": {"r": 4, "theta_d_length": 32, **QV},
    "VBLORA": {"r": 4, "vector_length": 4, "num_vectors": 8, **QV},
    "VERA": {"r": 4, **QV},
    "WAVEFT": {"n_frequency": 16, **QV},
}
"""Changes of weights, with settings for a small model."""

PROMPTS: dict[str, dict[str, Any]] = {
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1, "target_modules": "self_attn"},
    "CARTRIDGE": PROMPT,
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "P_TUNING": PROMPT,
}
"""Learned prompts, which no weight can stand for."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ADALORA": ({"total_step": 5, **QV}, "moves its ranks between layers"),
    "LILY": ({"r": 4, **QV}, "cannot be merged into the weights"),
    "MULTITASK_PROMPT_TUNING": ({"num_tasks": 1, **PROMPT}, "needs task_ids with each row"),
    "POLY": ({"r": 4, **QV}, "needs task_ids with each row"),
    "PVERA": ({"r": 4, **QV}, "adds noise in training, so it computes something else than its merged weights do"),
    "SHADOW": ({}, "cannot be merged into the weights"),
    "XLORA": ({}, "weighs other adapters by what stands in the text"),
}


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back CC and CXX: peft's BOFT leaves its choice in the environment where it cannot compile for CUDA."""
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setenv("CXX", "c++")


@pytest.fixture
def build(make_trainer, make_policy, tmp_path: Path) -> Callable[..., Any]:
    """`build(kind, **settings)`: a trainer with an adapter of that kind over the model in the folder `base`."""

    def make(kind: str, **settings: Any) -> Any:
        model = make_policy(attention_bias=kind == "BEFT", use_cache=kind != "XLORA")
        if kind == "ADAPTION_PROMPT":  # peft has it for few families
            sizes: dict[str, Any] = {
                name: getattr(model.config, name) for name in ("vocab_size", "eos_token_id", "initializer_range")
            }
            sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            model = LlamaForCausalLM(LlamaConfig(**sizes))
            model.generation_config.eos_token_id = make_policy().generation_config.eos_token_id
        model.save_pretrained(tmp_path / "base")
        if kind == "XLORA":
            peft.get_peft_model(make_policy(), peft.LoraConfig(r=2, **QV)).save_pretrained(str(tmp_path / "lora"))
            settings |= {"hidden_size": model.config.hidden_size, "adapters": {"a": str(tmp_path / "lora")}}
        config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](task_type="CAUSAL_LM", **settings)
        run = {"beta": 0.1, "max_steps": 3, "learning_rate": 0.02, "save_strategy": "no"}
        return make_trainer(model=str(tmp_path / "base"), trainer={"peft_config": config}, **run)

    return make


def test_every_kind_that_peft_has_is_here():
    """A kind of a later release is tried before the page may say anything about it."""
    assert {kind.name for kind in peft.PeftType} - {*MERGED, *PROMPTS, *REFUSED} == set()


@pytest.mark.quick("BEFT", "HIRA", "LILY", "PVERA", "SHADOW", "UNILORA")
@pytest.mark.parametrize("kind", [kind.name for kind in peft.PeftType])
def test_kind(kind: str, build, tmp_path: Path, record_property):
    """Samples have the log-probs of training, and the adapter is the same saved and reloaded, and merged."""
    if kind == "ADAMSS":
        pytest.importorskip("sklearn", reason="peft needs scikit-learn for it; with that the test passes")
    if kind in REFUSED:
        settings, reason = REFUSED[kind]
        with pytest.raises(ValueError, match=reason) as error:
            build(kind, **settings)
        reason = str(error.value).partition("), which ")[2]
        record_property("refused", re.split("[;:]", reason)[0])
        return
    trainer = build(kind, **(MERGED | PROMPTS)[kind])
    before = logprobs(trainer.model)
    trainer.train()
    trained = logprobs(trainer.model)
    assert not torch.allclose(trained, before, rtol=0, atol=1e-3)
    assert max(entry["sampling/logp_mismatch"] for entry in trainer.state.log_history[:-1]) < 1e-5

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    with trainer.reference.active() as reference:
        torch.testing.assert_close(logprobs(reference), logprobs(base()), rtol=0, atol=1e-5)
    trainer.save_model(str(tmp_path / "adapter"))
    reloaded: Any = peft.PeftModel.from_pretrained(base(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logprobs(reloaded), trained, rtol=0, atol=1e-5)
    if kind in MERGED:
        torch.testing.assert_close(logprobs(reloaded.merge_and_unload()), trained, rtol=0, atol=1e-5)
        merged: Any = base()
        merged.load_state_dict(dict(checkpoint_weights(trainer.model)))
        torch.testing.assert_close(logprobs(merged), trained, rtol=0, atol=1e-5)
        record_property("merged", "yes")
