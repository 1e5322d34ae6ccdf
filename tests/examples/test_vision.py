"""The example that looks at pictures: scenes, rewards and prompts are right, and a short run does what it says."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from transformers import AutoProcessor, Gemma3ForConditionalGeneration


@pytest.fixture(scope="module")
def example(from_examples):
    pytest.importorskip("matplotlib")
    return from_examples("vision_squares")


def test_a_picture_shows_what_its_answer_says(example) -> None:
    scene = example.Scene("green", (0, 5, 15), seed=3)
    assert scene.answer == "3 green"
    image = scene.picture()
    assert image.size == (24, 24)
    # The middle of each cell is bright in green where there is a square, and dark elsewhere.
    greens = [image.getpixel((6 * (i % 4) + 3, 6 * (i // 4) + 3))[1] for i in range(16)]
    assert [i for i, green in enumerate(greens) if green > 120] == [0, 5, 15]
    assert max(green for i, green in enumerate(greens) if i not in (0, 5, 15)) < 40


def test_one_demonstration_in_four_has_looked(example) -> None:
    rng = Random(0)
    scenes = [example.make_scene(rng) for _ in range(4000)]
    right = Counter(example.demonstrate(scene, rng) == scene.answer for scene in scenes)
    # Those who guess are right by chance once in sixteen times.
    assert right[True] / 4000 == pytest.approx(0.25 + 0.75 / 16, abs=0.02)


def test_rewards(example) -> None:
    said = [[{"role": "assistant", "content": text}] for text in ("3 red", "2 red", "3 blue", "red", "3 red red", "")]
    assert example.sight_reward(said, ["3 red"] * 6) == [1.0, 0.2, 0.0, 0.0, 0.0, 0.0]


def test_the_prompt_has_a_token_for_each_patch(example) -> None:
    processor = example.make_processor()
    scene = example.make_scene(Random(1))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": example.QUESTION}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    ids = processor(text=[text], images=[[scene.picture()]], add_special_tokens=False)["input_ids"][0]
    tokens = processor.tokenizer.convert_ids_to_tokens(ids)
    assert tokens.count("<patch>") == 16
    assert tokens[0] == "<user>" and tokens[-1] == "<assistant>"
    assert "<unknown>" not in tokens


@pytest.mark.slow
def test_a_short_run_writes_what_it_says(example, tmp_path, capsys) -> None:
    folder = tmp_path / "run"
    status = example.main(["--output_dir", str(folder), "--warm_up_steps", "4", "--grpo_steps", "2"])
    assert status == 1, "nothing can be learned in so few steps"
    said = capsys.readouterr().out
    assert "held-out pictures" in said and "Missed" in said
    assert {"rewards.png", "pictures.png", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    Gemma3ForConditionalGeneration.from_pretrained(folder)
    assert AutoProcessor.from_pretrained(folder).image_token == "<image>"
