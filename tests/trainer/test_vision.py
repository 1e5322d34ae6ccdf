"""Training on images, from data-set rows to an optimizer step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import pytest
import tiny_vlms
import torch
from datasets import Dataset
from noted_calls import note_calls
from PIL import Image
from transformers import GenerationConfig

from groupgrad.data.prompts import PromptMaker
from groupgrad.multimodal import vlm_prompts as vision_data
from groupgrad.multimodal.vlm_prompts import VisionPromptMaker

RED, BLUE, GREEN = (
    tiny_vlms.make_image("red"),
    tiny_vlms.make_image("blue", (48, 24)),
    tiny_vlms.make_image("green", (24, 48), "white"),
)


def asked(text: str, *images: Image.Image, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "images": list(images), **columns}


def rows() -> Dataset:
    """One image, two, none, and the first question about another image."""
    return Dataset.from_list([asked("a", RED), asked("b", RED, BLUE), asked("c"), asked("a", GREEN)])


@pytest.fixture
def make_seeing(make_trainer):
    """`make_seeing(name, **config fields)`: a trainer of a small vision-language model with its processor."""

    def make(name: str = "qwen2_vl", *, trainer: dict[str, Any] | None = None, **settings: Any):
        built = tiny_vlms.build(name)
        built.model.generation_config = GenerationConfig(eos_token_id=[1, *range(30, 50)], pad_token_id=0)
        arguments = {
            "model": built.model,
            "train_dataset": rows(),
            "per_device_train_batch_size": 16,
            "trainer": {"processing_class": built.processor, **(trainer or {})},
        }
        return make_trainer(**{**arguments, **settings})

    return make


@pytest.mark.quick("gemma3", "qwen2_5_vl", "qwen3_5")
@pytest.mark.parametrize("name", [*tiny_vlms.NAMES, tiny_vlms.HYBRID])
def test_a_vision_language_model_trains(name: str, make_seeing):
    """Sampling and training agree on every token, the reference is the model at first, and what looks at pictures is
    trained with what reads; two evaluations agree."""
    trainer = make_seeing(name, beta=0.1, max_steps=2, trainer={"eval_dataset": rows()}, per_device_eval_batch_size=8)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    assert isinstance(trainer.prompt_maker, VisionPromptMaker)
    assert (trainer.execution.engine_choice.name, trainer.execution.layout_report.layout) == ("native", "shared")
    first, second = trainer.state.log_history[:2]
    assert max(entry["sampling/logp_mismatch"] for entry in (first, second)) <= 1e-5
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert second["kl"] > 1e-5
    moved = {key for key, value in trainer.model.state_dict().items() if not torch.equal(value, before[key])}
    assert any("vision" in key or "visual" in key for key in moved)
    assert any("language_model" in key or "text_model" in key for key in moved)
    if name == "qwen2_vl":
        first, again = trainer.evaluate(), trainer.evaluate()
        assert first["eval_reward"] == again["eval_reward"]
        assert first["eval_completions/mean_length"] > 0


def test_paths_stay_below_image_root(make_seeing, tmp_path: Path):
    """Paths are relative to the folder; neither `..` nor a link leads out of it, whatever brings the path."""
    inside, outside = tmp_path / "images", tmp_path / "secret.png"
    inside.mkdir()
    RED.save(outside)
    RED.save(inside / "red.png")
    (inside / "link.png").symlink_to(outside)

    def data(path: str, **features: Any) -> Dataset:
        rows = [{"prompt": [{"role": "user", "content": text}], "image": path} for text in "abcd"]
        return Dataset.from_list(rows).cast_column("image", datasets.Image()) if features else Dataset.from_list(rows)

    trainer = make_seeing(train_dataset=data("red.png"), image_root=str(inside), max_steps=1)
    prompt = trainer.prompt_maker({"prompt": [{"role": "user", "content": "a"}], "image": "red.png"}, 0)
    assert prompt.media.images[0].size == RED.size
    for path in ("../secret.png", "link.png", str(outside), f"file://{outside}"):
        with pytest.raises(ValueError, match=r"leads to .*secret.png', out of image_root="):
            make_seeing(train_dataset=data(path), image_root=str(inside))
    with pytest.raises(ValueError, match=r"row 0 of train_dataset: .*out of image_root="):
        make_seeing(train_dataset=data(str(outside), cast=True), image_root=str(inside))


def test_images_are_decoded_and_processed_once_for_a_group_and_generation_batch(make_seeing, monkeypatch):
    """Two generation batches of four groups, three of them with images, four images in all, for two steps each."""
    trainer = make_seeing(steps_per_generation=2, per_device_train_batch_size=8, max_steps=4, max_completion_length=3)
    num_images = lambda self, text, images=(), **__: len(images)  # noqa: E731
    processed = note_calls(monkeypatch, VisionPromptMaker, "encode", num_images)
    decoded = note_calls(monkeypatch, vision_data, "open_image")
    trainer.train()
    assert sorted(count for count in processed if count) == [1, 1, 1, 1, 2, 2]
    assert len(decoded) == 8


def test_reward_functions_see_the_images(make_seeing):
    """The trainer may remove the other columns that no function names."""
    seen: list[dict[str, Any]] = []

    def reward(prompts: Any, completions: Any, images: Any, answer: Any, **kwargs: Any) -> list[float]:
        seen.extend({"prompt": p, "images": i, "answer": a} for p, i, a in zip(prompts, images, answer))
        return [0.0] * len(prompts)

    data = Dataset.from_list([asked("a", RED, answer="x", other=1), asked("b", answer="y", other=2)])
    settings = {"train_dataset": data, "per_device_train_batch_size": 8, "remove_unused_columns": True}
    trainer = make_seeing(reward_funcs=reward, max_steps=1, **settings)
    trainer.train()
    assert trainer.train_dataset.column_names == ["prompt", "images", "answer"]
    with_image = [row for row in seen if row["answer"] == "x"]
    assert (len(seen), len(with_image)) == (8, 4)
    for row in with_image:
        assert [image.getpixel((0, 0)) for image in row["images"]] == [(255, 0, 0)]
        assert [block["type"] for block in row["prompt"][0]["content"]] == ["image", "text"]
        assert row["prompt"][0]["content"][0]["image"].size == (32, 32)
    assert all(row["images"] == [] and row["prompt"][0]["content"] == "b" for row in seen if row["answer"] == "y")


def test_stored_completions_have_a_marker_for_each_image(make_seeing, tmp_path: Path):
    make_seeing(log_completions=True, num_completions_to_print=0, max_steps=1, shuffle_dataset=False).train()
    table = pq.read_table(next((tmp_path / "run" / "completions").glob("*.parquet"))).to_pylist()
    prompts = {str(row["prompt"]) for row in table}
    assert sorted(text.count("'image': '[IMAGE]'") + text.count('"image": "[IMAGE]"') for text in prompts) == [0, 1, 2]
    assert len(table) == 16
    rows = pq.read_table(tmp_path / "run" / "rollouts").to_pylist()
    assert {len(row["images"]) for row in rows} == {0, 1, 2}
    stored = {path.stem for path in (tmp_path / "run" / "rollout_images").iterdir()}
    assert stored == {name for row in rows for name in row["images"]}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "idefics3"])
def test_a_run_resumed_within_a_generation_batch_goes_on_bit_for_bit(name: str, make_seeing, tools, tmp_path: Path):
    """Also where weights are saved under other names than the model's, as those of Qwen2.5-VL are."""
    settings = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "max_steps": 3, "max_completion_length": 3}
    whole = make_seeing(name, save_strategy="steps", save_steps=2, **settings)
    whole.train()
    resumed = make_seeing(name, output_dir=str(tmp_path / "resumed"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(tools.weights(resumed.model), tools.weights(whole.model))


def test_a_saved_model_is_loaded_with_its_processor(make_seeing, make_trainer, tmp_path: Path):
    """The model is loaded from its folder, in the class that its config names."""
    built = tiny_vlms.build("gemma3")
    folder = tmp_path / "model"
    built.model.save_pretrained(folder)
    built.processor.save_pretrained(folder)
    trainer = make_trainer(model=str(folder), train_dataset=rows(), trainer={"processing_class": None}, max_steps=1)
    assert type(trainer.model).__name__ == "Gemma3ForConditionalGeneration"
    assert type(trainer.processing_class).__name__ == "Gemma3Processor"
    trainer.train()
    assert trainer.state.log_history[0]["sampling/logp_mismatch"] <= 1e-5
    trainer.save_model(str(tmp_path / "saved"))
    again = make_trainer(
        model=str(tmp_path / "saved"), train_dataset=rows(), trainer={"processing_class": None}, max_steps=1
    )
    assert again.prompt_maker(rows()[0], 0).ids == trainer.prompt_maker(rows()[0], 0).ids


def test_a_tokenizer_alone_trains_on_text(make_seeing, caplog):
    built = tiny_vlms.build("qwen2_vl")
    built.processor.tokenizer.chat_template = built.processor.chat_template
    tokenizer = {"processing_class": built.processor.tokenizer}
    text = Dataset.from_list([asked("a"), asked("b")])
    with caplog.at_level(logging.WARNING, logger="groupgrad"):
        trainer = make_seeing(
            trainer=tokenizer, train_dataset=text, max_steps=1, per_device_train_batch_size=8, num_generations=4
        )
    assert caplog.text.count("it trains on text alone") == 1
    assert type(trainer.prompt_maker) is PromptMaker
    trainer.train()
    assert trainer.state.log_history[0]["sampling/logp_mismatch"] <= 1e-5
    with pytest.raises(
        ValueError, match=r"row 0 of train_dataset: there is an image in 'images', but processing_class is a .*"
    ):
        make_seeing(trainer=tokenizer)


def test_a_processor_without_a_template_is_refused_before_anything_is_sampled(make_seeing):
    processor = tiny_vlms.build("qwen2_vl").processor
    processor.chat_template = None
    with pytest.raises(
        ValueError, match=r"row 0 of train_dataset.*no chat template; set processing_class.chat_template"
    ):
        make_seeing(trainer={"processing_class": processor})


def test_a_rollout_function_is_shown_the_images_and_may_have_them_sampled(make_seeing):
    shown: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        shown.extend(prompts)
        made = [trainer.prompt_maker({"prompt": prompt}, 0) for prompt in prompts]
        return {
            "prompt_ids": [prompt.ids for prompt in made],
            "completion_ids": [[40 + i % 3, 1] for i in range(len(prompts))],
            "logprobs": None,
        }

    trainer = make_seeing(trainer={"rollout_func": function}, max_steps=1, shuffle_dataset=False)
    trainer.train()
    images = [[block["image"].size for block in p[0]["content"] if block["type"] == "image"] for p in shown[:8:4]]
    assert images == [[(32, 32)], [(32, 32), (48, 24)]]
    assert trainer.state.log_history[0]["num_tokens"] > 0


def look(place: str) -> Image.Image:
    """Show a place.

    Args:
        place: Which one.
    """
    return BLUE


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3"])
def test_what_tools_show_is_trained_on_as_it_was_sampled(name: str, make_seeing):
    """Every turn calls the tool until it may no more; its images are seen in later turns, by sampler and trainer."""

    def parser(text: str, ids: list[int]) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": text,
            "tool_calls": [{"name": "look", "arguments": {"place": "x"}}],
        }

    trainer = make_seeing(
        name,
        trainer={"tools": [look], "response_parser": parser},
        max_tool_calling_iterations=2,
        max_completion_length=150,
        max_steps=1,
        beta=0.1,
        num_generations=2,
        per_device_train_batch_size=8,
    )
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["tools/call_frequency"] == 2
    assert entry["rollouts/error"] == 0
    assert entry["sampling/logp_mismatch"] <= 1e-5
    assert entry["kl"] == pytest.approx(0, abs=1e-5)
