"""Compares the memory that `groupgrad plan` predicts with what training takes: `python bench/plan_accuracy.py`.

Each configuration trains two steps on a CPU in a process of its own; the second samples beside the optimizer's states.
What is measured is the most resident memory during training, less that of the process before the model is made. The
allocator of glibc is told to give memory back at once (`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_`); otherwise
freed blocks stay resident and count.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from plumbing import PeakMemory

CASES: dict[str, dict[str, Any]] = {
    "8 layers": {},
    "checkpointing": {"checkpointing": True, "layers": 12},
    "LoRA": {"adapter": "lora", "hidden": 768},
    "wide vocabulary": {"vocab": 65536, "completion": 96},
    "long completions": {"completion": 512, "group": 4, "layers": 6},
    "KL to a reference": {"reference": True, "hidden": 768},
    "bf16": {"half": True, "layers": 6},
    "bf16 weights": {"weight_bytes": 2, "layers": 4, "completion": 48},
    "many short rows": {"completion": 32, "group": 32, "prompt": 16},
    "sampling 96 rows": {"completion": 256, "accumulation": 12, "checkpointing": True},
    "deep and narrow": {"layers": 20, "hidden": 256},
    "Adafactor": {"optimizer": "adafactor", "hidden": 768},
    "Adafactor, wide vocabulary": {"optimizer": "adafactor", "vocab": 32768, "completion": 96},
    "Qwen3.5": {"family": "qwen3_5"},
    "Qwen3.5, LoRA, long rows": {"family": "qwen3_5", "adapter": "lora", "completion": 512, "group": 4},
    "Nemotron-H": {"family": "nemotron_h"},
    "LFM2": {"family": "lfm2", "hidden": 768},
    "Qwen2.5-VL, text alone": {"family": "qwen2_5_vl", "hidden": 768},
    "fsdp2": {"sharding": "fsdp2", "hidden": 768},
    "zero2": {"sharding": "zero2", "hidden": 768, "layers": 4, "completion": 32},
    "zero3": {"sharding": "zero3", "hidden": 768, "layers": 4, "completion": 32},
}
"""Name -> what differs from `BASE`."""

BASE: dict[str, Any] = {
    "layers": 8,
    "hidden": 512,
    "vocab": 8192,
    "prompt": 32,
    "completion": 128,
    "group": 8,
    "accumulation": 1,
    "adapter": "full",
    "checkpointing": False,
    "reference": False,
    "half": False,
    "weight_bytes": 4,
    "optimizer": "adamw",
    "family": "qwen3",
    "sharding": "ddp",
}

RANKS = 2
"""Processes of a case whose model is divided."""


def make_config(case: dict[str, Any]) -> Any:
    """The configuration of a case's model. Of a hybrid every fourth layer has attention."""
    import transformers

    hidden, layers = case["hidden"], case["layers"]
    sizes: dict[str, Any] = {
        "vocab_size": case["vocab"],
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }

    def kinds(recurrent: str, attention: str = "full_attention") -> list[str]:
        return [attention if place % 4 == 3 else recurrent for place in range(layers)]

    if case["family"] == "qwen3_5":
        name = "Qwen3_5TextConfig"
        sizes |= {"linear_num_value_heads": hidden // 64, "linear_num_key_heads": hidden // 128}
        sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "layer_types": kinds("linear_attention")}
    elif case["family"] == "nemotron_h":
        name = "NemotronHConfig"
        del sizes["num_hidden_layers"]
        sizes |= {"mamba_num_heads": hidden // 32, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2}
        sizes |= {"layer_types": kinds("mamba", "attention")}
    elif case["family"] == "lfm2":
        name = "Lfm2Config"
        del sizes["head_dim"]
        sizes |= {"layer_types": kinds("conv")}
    elif case["family"] == "qwen2_5_vl":
        del sizes["head_dim"]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
        vision = {"depth": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 256, "out_hidden_size": hidden}
        text = {**sizes, "rope_parameters": rope}
        return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    else:
        name = "Qwen3Config"
    return getattr(transformers, name)(**sizes)


def ranks_of(case: dict[str, Any]) -> int:
    """The number of processes of a case."""
    return 1 if case["sharding"] == "ddp" else RANKS


def predicted(case: dict[str, Any]) -> int:
    """Bytes that the plan predicts, less those of the process without a model."""
    from groupgrad.apps.plan.memory import CPU_PROCESS, RunSizes, predict
    from groupgrad.apps.plan.shapes import model_shape

    names = ("prompt", "completion", "group", "adapter", "checkpointing", "reference", "half", "weight_bytes")
    sizes = {name: case[name] for name in (*names, "optimizer", "sharding")}
    sizes["devices"] = ranks_of(case)
    sizes |= {"rows": case["group"] * case["accumulation"], "accumulates": case["accumulation"] > 1}
    shape = model_shape("case", make_config(case))
    return predict(shape, RunSizes(**sizes, micro_batch=case["group"], on_gpu=False)).peak - CPU_PROCESS


def sharded(case: dict[str, Any]) -> dict[str, Any]:
    """The settings that divide a model among processes, with DeepSpeed's own defaults."""
    if case["sharding"] == "fsdp2":
        return {"fsdp": True}
    if not case["sharding"].startswith("zero"):
        return {}
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {"deepspeed": {"zero_optimization": {"stage": int(case["sharding"][-1])}, **dict.fromkeys(names, "auto")}}


def start_deepspeed(case: dict[str, Any]) -> None:
    """Starts DeepSpeed, which on CPUs the training arguments do not."""
    if case["sharding"].startswith("zero"):
        import deepspeed  # pyright: ignore[reportMissingImports]

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
        deepspeed.init_distributed("gloo")


def measured(case: dict[str, Any]) -> int:
    """Bytes that training takes, in this process."""
    import torch
    from datasets import Dataset
    from materials import make_words
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from groupgrad import GRPOConfig, GRPOTrainer

    tokenizer = make_words(case["vocab"])
    places, count = range(case["prompt"]), 2 + 2 * case["accumulation"]
    prompts = [" ".join(f"w{2 + (7 * row + place) % 97}" for place in places) for row in range(count)]
    memory = PeakMemory()
    torch.manual_seed(0)
    start_deepspeed(case)
    dtype = torch.bfloat16 if case["weight_bytes"] == 2 else torch.float32
    held = memory.settle()
    kind = AutoModelForImageTextToText if case["family"].endswith("_vl") else AutoModelForCausalLM
    model = kind.from_config(make_config(case), dtype=dtype)
    peft_config = None
    if case["adapter"] != "full":
        from peft import LoraConfig

        peft_config = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            # Almost never the mean of a group, since a row without an advantage is not trained.
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 1009) for ids in completion_ids],
            args=GRPOConfig(
                folder,
                max_steps=2,
                per_device_train_batch_size=case["group"],
                gradient_accumulation_steps=case["accumulation"],
                num_generations=case["group"],
                max_completion_length=case["completion"],
                gradient_checkpointing=case["checkpointing"],
                beta=0.04 if case["reference"] else 0.0,
                bf16=case["half"],
                optim={"adamw": "adamw_torch_fused", "adafactor": "adafactor"}[case["optimizer"]],
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                rollouts_keep="0",
                dataloader_pin_memory=False,
                **sharded(case),
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            peft_config=peft_config,
        )
        memory.settle()
        memory.reset()
        trainer.train()
        return memory.peak() - held


def main() -> int:
    """Prints a table of all cases, or measures one; 1 if fewer than eight are within 10 %."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to measure")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measured({**BASE, **CASES[options.measure]})))
        return 0
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    within = 0
    print(f"{'':28}{'predicted':>12}{'measured':>12}{'difference':>12}")
    for name in options.only:
        case = {**BASE, **CASES[name]}
        if case["sharding"].startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            print(f"{name:28}not measured: DeepSpeed is not installed")
            continue
        command = [sys.executable, __file__, "--measure", name]
        if (ranks := ranks_of(case)) > 1:
            command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:28}failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        # Of several processes the one that took most.
        found = max(int(line) for line in done.stdout.splitlines() if line.isdecimal())
        expected = predicted(case)
        within += abs(expected / found - 1) <= 0.1
        print(
            f"{name:28}{expected / 2**20:8,.0f} MiB{found / 2**20:8,.0f} MiB{expected / found - 1:+12.1%}", flush=True
        )
    print(f"{within} of {len(options.only)} within 10 %")
    return 0 if within >= min(8, len(options.only)) else 1


if __name__ == "__main__":
    sys.exit(main())
