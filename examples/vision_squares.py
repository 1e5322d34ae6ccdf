"""A model that learns to look: `python examples/vision_squares.py`, offline, minutes on two cores.

A picture shows one to four squares of one colour on a dark ground; the right answer to "what do you see?" is its number
and colour, `3 red`. The model is a Gemma 3 of about 150,000 parameters, its vision tower included, made on the spot.

1. Warm-up: demonstrations by people who mostly guess show what an answer looks like. One in four has really looked.
2. GRPO on the pictures; the reward is 1 for the right number and colour, 0.2 for the right colour alone.
3. Held-out pictures, before and after. One picture, its answers before and after, goes to `pictures.png`.

Exit status 1 means that the accuracy before or after is not what this example promises (`MAX_BEFORE`, `MIN_AFTER`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

# Threads that spin while they wait slow a run down when other processes use the same cores. OpenMP reads this when
# PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pandas as pd
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.utils import logging as transformers_logging

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.apps.demo.run import plot_rewards

MAX_BEFORE, MIN_AFTER = 0.45, 0.85
"""Held-out accuracy, sampled at temperature 1, that the model may have at most before, and must have after."""

COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 210, 50)}
MOST = 4
"""Squares in a picture."""
CELLS, CELL = 4, 6
"""A picture is a grid of CELLS x CELLS places of CELL x CELL pixels, each of which is one patch of the vision tower."""

PAD, EOS, USER, ASSISTANT = "<pad>", "<end>", "<user>", "<assistant>"
IMAGE = {"boi_token": "<image>", "eoi_token": "</image>", "image_token": "<patch>"}
QUESTION = "what do you see ?"
LOOKERS = 0.25
"""Share of the demonstrations by people who looked; the others name any number and colour."""

TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '> ' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <assistant>' }}{% endif %}"
)


@dataclass(slots=True, frozen=True)
class Scene:
    """Squares and colours of a picture."""

    color: str
    places: tuple[int, ...]
    """Cells of the squares, 0 to CELLS*CELLS-1."""
    seed: int
    """Seed of the ground's noise and the squares' shades."""

    @property
    def answer(self) -> str:
        """The right one."""
        return f"{len(self.places)} {self.color}"

    def picture(self) -> Image.Image:
        """The picture itself, with noise, so that no two are alike."""
        rng = Random(self.seed)
        side = CELLS * CELL
        image = Image.new("RGB", (side, side))
        image.putdata([(v := rng.randrange(40), v, v) for _ in range(side * side)])  # pyright: ignore
        for place in self.places:
            row, column = divmod(place, CELLS)
            shade = tuple(max(0, min(255, part + rng.randint(-30, 30))) for part in COLORS[self.color])
            image.paste(shade, (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL))
        return image

    def row(self) -> dict[str, Any]:
        """The scene as a data-set row: the picture is in the column `image`, the answer reaches the reward function."""
        return {
            "prompt": [{"role": "user", "content": QUESTION}],
            "image": self.picture(),
            "answer": self.answer,
        }


def make_scene(rng: Random) -> Scene:
    """Any colour, any number of squares, any places."""
    count = rng.randint(1, MOST)
    places = tuple(sorted(rng.sample(range(CELLS * CELLS), count)))
    return Scene(rng.choice(list(COLORS)), places, rng.randrange(2**31))


def demonstrate(scene: Scene, rng: Random) -> str:
    """A description of the picture."""
    if rng.random() < LOOKERS:
        return scene.answer
    return f"{rng.randint(1, MOST)} {rng.choice(list(COLORS))}"


def make_processor() -> Gemma3Processor:
    """A tokenizer with one token a word, and the preparation of pictures."""
    words = [PAD, EOS, "<unknown>", *IMAGE.values(), USER, ASSISTANT, *QUESTION.split(), *COLORS, *"1234"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token="<unknown>", extra_special_tokens=IMAGE
    )
    side = CELLS * CELL
    pictures = Gemma3ImageProcessorPil(size={"height": side, "width": side})
    return Gemma3Processor(pictures, tokenizer, chat_template=TEMPLATE, image_seq_length=CELLS * CELLS)


def make_model(processor: Gemma3Processor, seed: int) -> Gemma3ForConditionalGeneration:
    """An untrained Gemma 3 with a vision tower, float32."""
    torch.manual_seed(seed)
    tokenizer = processor.tokenizer
    number = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 128,
        "sliding_window": 64,
        "layer_types": ["full_attention", "full_attention"],
        "initializer_range": 0.1,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    sight = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": CELLS * CELL,
        "patch_size": CELL,
        "vision_use_head": False,
    }
    config = Gemma3Config(
        text_config=text,  # pyright: ignore[reportArgumentType]
        vision_config=sight,  # pyright: ignore[reportArgumentType]
        mm_tokens_per_image=CELLS * CELLS,
        boi_token_index=number(IMAGE["boi_token"]),
        eoi_token_index=number(IMAGE["eoi_token"]),
        image_token_index=number(IMAGE["image_token"]),
        initializer_range=0.1,
    )
    return Gemma3ForConditionalGeneration(config)


def warm_up(model: Any, processor: Any, *, num_steps: int, seed: int, batch_size: int = 64) -> None:
    """Train the model on demonstrations; only the answers are learned."""
    rng, eos = Random(seed), processor.tokenizer.eos_token
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    question: str = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}],
        add_generation_prompt=True,
    )
    model.train()
    for _ in tqdm(range(num_steps), desc="warm-up", unit="step", disable=None):
        scenes = [make_scene(rng) for _ in range(batch_size)]
        texts = [f"{question} {demonstrate(scene, rng)} {eos}" for scene in scenes]
        batch = processor(
            text=texts, images=[[scene.picture()] for scene in scenes], return_tensors="pt", add_special_tokens=False
        )
        labels = torch.full_like(batch["input_ids"], -100)
        labels[:, -3:] = batch["input_ids"][:, -3:]  # number, colour, end
        loss = model(**batch, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def sight_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number and colour, 0.2 for the right colour alone."""
    rewards = []
    for completion, expected in zip(completions, answer):
        words = completion[0]["content"].split()
        right_color = len(words) == 2 and words[1] == expected.split()[1]
        rewards.append(1.0 if words == expected.split() else 0.2 * right_color)
    return rewards


@dataclass(slots=True, frozen=True)
class Measured:
    """The policy on the held-out pictures, one sampled answer each."""

    accuracy: float
    answers: list[str]
    metrics: dict[str, float]


def measure(trainer: GRPOTrainer) -> Measured:
    """Ask the policy as it is."""
    metrics = trainer.evaluate()
    files = (Path(str(trainer.args.output_dir)) / "completions").glob("eval_*.parquet")
    table = pd.read_parquet(max(files, key=lambda path: path.stat().st_mtime_ns))
    answers = [completion[0]["content"] for completion in table["completion"]]
    return Measured(float((table["sight_reward"] == 1.0).mean()), answers, metrics)


def draw(scenes: Sequence[Scene], before: Measured, after: Measured, path: Path) -> None:
    """Some held-out pictures with the answers to them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(8, 5.2))
    for axis, scene, first, second in zip(axes.flat, scenes, before.answers, after.answers):
        axis.imshow(scene.picture())
        axis.set_title(f"before: {first}\nafter: {second}", fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=0, help="model, pictures and sampling follow from it (default 0)")
    parser.add_argument("--output_dir", default="runs/vision_squares", help="where files are written")
    parser.add_argument("--warm_up_steps", type=int, default=600, help="supervised steps")
    parser.add_argument("--grpo_steps", type=int, default=200, help="GRPO steps: 8 pictures, 16 answers each")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 0 if what it promises was met."""
    started = time.perf_counter()
    options = parse(arguments)
    transformers_logging.set_verbosity_error()
    processor = make_processor()
    model = make_model(processor, options.seed)
    print(f"A Gemma 3 with a vision tower, {sum(p.numel() for p in model.parameters()):,} parameters.")
    warm_up(model, processor, num_steps=options.warm_up_steps, seed=options.seed)
    rng = Random(options.seed + 1)
    held_out, scenes = ([make_scene(rng) for _ in range(count)] for count in (256, 512))
    config = GRPOConfig(
        output_dir=options.output_dir,
        seed=options.seed,
        max_steps=options.grpo_steps,
        per_device_train_batch_size=128,
        num_generations=16,
        per_device_eval_batch_size=256,
        num_generations_eval=1,
        max_completion_length=4,
        learning_rate=1e-3,
        logging_steps=5,
        log_completions=True,
        num_completions_to_print=0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=sight_reward,
        args=config,
        train_dataset=Dataset.from_list([scene.row() for scene in scenes]),
        eval_dataset=Dataset.from_list([scene.row() for scene in held_out]),
        processing_class=processor,
    )
    before = measure(trainer)
    print(f"Before GRPO: {before.accuracy:.1%} of the held-out pictures are named rightly.\n")
    trainer.train()
    history, after = [{**before.metrics, "step": 0}, *trainer.state.log_history], measure(trainer)
    folder = Path(options.output_dir)
    trainer.save_model()
    plot_rewards(history, folder / "rewards.png")
    draw(held_out, before, after, folder / "pictures.png")
    held = before.accuracy <= MAX_BEFORE and after.accuracy >= MIN_AFTER
    print(f"\nheld-out pictures, one sampled answer each: {before.accuracy:.1%} before, {after.accuracy:.1%} after")
    print(f"Files in {folder}/: model, processor, rewards.png, pictures.png; {time.perf_counter() - started:.0f} s")
    print(f"{'Met' if held else 'Missed'}: at most {MAX_BEFORE:.0%} before and at least {MIN_AFTER:.0%} after.")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
