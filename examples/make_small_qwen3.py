"""Make a small Qwen3-architecture model with random weights and the tokenizer beside it; nothing is downloaded.

    python examples/make_small_qwen3.py TOKENIZER_FOLDER OUTPUT_FOLDER

With Qwen3's 151,669 tokens and the default width most of the 10 million parameters are the embedding, which the output
head shares.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, set_seed


def make_model(tokenizer, *, hidden_size: int, num_layers: int, max_length: int) -> Qwen3ForCausalLM:
    """A float32 Qwen3 model whose vocabulary is the tokenizer's, rounded up to a multiple of 64."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Read the command line, make the model, save both."""
    parser = argparse.ArgumentParser(description="Make a small random Qwen3 model.")
    parser.add_argument("tokenizer", help="folder with the tokenizer")
    parser.add_argument("output", help="folder to write model and tokenizer to")
    parser.add_argument("--hidden_size", type=int, default=64, help="width of the model, a multiple of 8")
    parser.add_argument("--num_layers", type=int, default=4, help="transformer blocks")
    parser.add_argument(
        "--max_length", type=int, default=2048, help="longest prompt and completion together, in tokens"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    set_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    model = make_model(
        tokenizer,
        hidden_size=arguments.hidden_size,
        num_layers=arguments.num_layers,
        max_length=arguments.max_length,
    )
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: {model.num_parameters() / 1e6:.1f} million parameters, {len(tokenizer):,} tokens")


if __name__ == "__main__":
    main()
