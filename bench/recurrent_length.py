"""Measures whether the cost of recurrent layers is linear in the tokens of a row: `python bench/recurrent_length.py`.

A row of 16,384 tokens and one of 2,048 run in turn through a small model whose layers are all recurrent (gated delta
rule, Mamba-2, short convolutions), forward alone and forward with backward. Processor seconds are compared, because
other work on the machine hardly changes them; the system's part of them and seconds of the clock stand beside them. The
ratio of the medians is to be 8 within 15 %, so at most 9.2.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Lfm2Config, Mamba2Config, Qwen3_5TextConfig

from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

SHORT, LONG = 2048, 16_384
VOCABULARY = 256


def make_model(family: str, hidden_size: int) -> nn.Module:
    """A random model of two recurrent layers; its head is small, so that the layers take most of the time."""
    torch.manual_seed(0)
    if family == "qwen3_5":
        config = Qwen3_5TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            layer_types=["linear_attention"] * 2,
            linear_num_value_heads=hidden_size // 64,
            linear_num_key_heads=hidden_size // 64,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        )
    elif family == "lfm2":
        config = Lfm2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            layer_types=["conv"] * 2,
        )
    else:
        config = Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=hidden_size,
            num_hidden_layers=2,
            num_heads=hidden_size // 32,
            head_dim=64,
            state_size=64,
            n_groups=1,
        )
    return AutoModelForCausalLM.from_config(config)


def seconds(model: nn.Module, length: int, *, backward: bool) -> tuple[float, float, float]:
    """Seconds of processors, of these in the system, and of the clock, of a pass over one row of `length` tokens."""
    ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    batch = build_batch([[1]], [0], [ids])
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with torch.set_grad_enabled(backward):
        total = score_tokens(model, batch, ForwardOptions(layout="shared")).logprobs.sum()
    if backward:
        total.backward()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    return after.ru_utime - before.ru_utime + system, system, wall


def main() -> None:
    """Prints a line for each family and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--families", nargs="+", default=["qwen3_5", "mamba2", "lfm2"])
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for family in options.families:
        model = make_model(family, options.hidden_size)
        for backward in (False, True):
            taken: dict[int, list[tuple[float, float, float]]] = {SHORT: [], LONG: []}
            for _ in range(options.rounds + 1):
                for length, found in taken.items():
                    found.append(seconds(model, length, backward=backward))
            short, long = ([statistics.median(kind) for kind in zip(*found[1:])] for found in taken.values())
            texts = [f"{used:.2f} s ({system:.2f} in the system)" for used, system, _ in (short, long)]
            print(
                f"{family}, {'forward and backward' if backward else 'forward'}: {SHORT:,} tokens {texts[0]}, {LONG:,} "
                f"tokens {texts[1]}, ratio {long[0] / short[0]:.2f}, of the clock {short[2]:.2f} and {long[2]:.2f} s, "
                f"{long[2] / short[2]:.2f} (load {os.getloadavg()[0]:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
