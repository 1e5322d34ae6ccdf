"""Models of the vLLM benchmarks, built once and cached in `.models`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from materials import NEVER, import_demo_task, make_model, make_words, set_ending
from transformers import Qwen3ForCausalLM
from workloads import BASE, WIDE_VOCABULARY, ModelShape

ROOT = Path(__file__).resolve().parent / ".models"

OVERLAP_SHAPE = replace(WIDE_VOCABULARY, vocab_size=512, tied=False)
LARGE_SHAPE = replace(BASE, vocab_size=32_000, num_layers=11, tied=True)


def demo_base(seed: int, *, warm_up_steps: int = 800) -> Path:
    """The demo's base model with 2 attention heads of 32 channels in place of 4 of 16, and the same size.

    32 channels are the least for vLLM's attention on a CPU.
    """

    def make(task: Any) -> tuple[Any, Any]:
        tokenizer = task.make_tokenizer()
        config = task.make_model(tokenizer, seed).config
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 2, 32
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        task.warm_up(model, tokenizer, task.make_splits(seed).warm_up, num_steps=warm_up_steps, seed=seed)
        return model, tokenizer

    return _cached(f"vllm-demo-{seed}-{warm_up_steps}", lambda: make(import_demo_task()))


def random_base(name: str, shape: ModelShape) -> Path:
    """A model with random weights; one with an untied head never ends a completion."""

    def make() -> tuple[Any, Any]:
        tokenizer = make_words(shape.vocab_size)
        model = make_model(shape, tokenizer)
        if not shape.tied:
            set_ending(model, int(tokenizer.eos_token_id), NEVER)  # pyright: ignore[reportArgumentType]
        return model, tokenizer

    return _cached(f"vllm-{name}-{shape.num_parameters}", make)


def _cached(name: str, make: Callable[[], tuple[Any, Any]]) -> Path:
    folder = ROOT / name
    if not (folder / "config.json").exists():
        print(f"making {name} ...", file=sys.stderr, flush=True)
        model, tokenizer = make()
        draft = folder.with_name(folder.name + ".part")
        shutil.rmtree(draft, ignore_errors=True)
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        draft.rename(folder)
    return folder
