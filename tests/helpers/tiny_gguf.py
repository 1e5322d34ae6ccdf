"""A small Llama in a GGUF file, weights of 8 bits, with a tokenizer of bytes and a chat template."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

NAME = "tiny.Q8_0.gguf"
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 32, 64, 2, 4, 2


def write_gguf(folder: Path, name: str = NAME) -> Path:
    """Writes the file into `folder` and returns the folder, which has nothing else of a model."""
    words = [*_byte_characters(), *SPECIAL, "ab"]
    folder.mkdir(parents=True, exist_ok=True)
    file = gguf.GGUFWriter(folder / name, "llama")
    file.add_context_length(512)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(WIDTH // HEADS)
    file.add_rope_freq_base(10000.0)
    file.add_vocab_size(len(words))
    file.add_tokenizer_model("gpt2")
    file.add_token_list(words)
    file.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL])
    file.add_token_merges(["a b"])  # transformers reads no file without merges
    for add in (file.add_bos_token_id, file.add_unk_token_id):
        add(256)
    for add in (file.add_eos_token_id, file.add_pad_token_id):
        add(257)
    file.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    for part, shape in _shapes(len(words)).items():
        if len(shape) == 1:
            file.add_tensor(part, np.ones(shape, dtype=np.float32))
            continue
        weight = random.normal(0, 0.1, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        file.add_tensor(part, quantize(weight, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder


def _shapes(words: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (words, WIDTH), "output_norm.weight": (WIDTH,)}
    keys = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (keys, WIDTH),
            "attn_v": (keys, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return shapes


def _byte_characters() -> list[str]:
    """The characters by which tokenizers of GPT-2's kind write the 256 bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())
