"""Prompts of rows with images, and the checks of data sets with images."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import tiny_vlms
import torch
from datasets import Dataset, IterableDataset

from groupgrad.data.images import ImageError
from groupgrad.data.prompts import PromptMaker, check_dataset
from groupgrad.multimodal.vlm_prompts import (
    VisionError,
    VisionPromptMaker,
    example_prompt,
    is_processor,
    messages_with_images,
    replace_ids,
    tokenizer_with_processor_template,
)

RED, BLUE, GREEN = tiny_vlms.make_image("red"), tiny_vlms.make_image("blue", (48, 24)), tiny_vlms.make_image("green")


def maker(processor: Any, max_context: int | None = None) -> VisionPromptMaker:
    return VisionPromptMaker(processor, processor.tokenizer, None, max_context)


@pytest.fixture(scope="module", params=tiny_vlms.NAMES)
def processor(request: pytest.FixtureRequest) -> Any:
    return tiny_vlms.build(request.param).processor


@pytest.fixture(scope="module")
def qwen() -> Any:
    return tiny_vlms.build("qwen2_vl").processor


def query(text: str = "hi", **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def kinds(messages: Any) -> list[Any]:
    content = messages[0]["content"]
    return content if isinstance(content, str) else [block["type"] for block in content]


# --------------------------------------------------------------------------------------------------- one prompt


def test_a_prompt_is_what_the_processor_makes_of_the_conversation(processor):
    row = query(images=[RED, BLUE], answer="x")
    prompt = maker(processor)(row, 3)
    said = [{"role": "user", "content": [{"type": "image", "image": image} for image in (RED, BLUE)]}]
    said[0]["content"].append({"type": "text", "text": "hi"})
    expected = processor.apply_chat_template(
        said, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    assert prompt.ids == expected["input_ids"][0].tolist()
    assert prompt.media is not None
    for name, value in prompt.media.tensors.items():
        torch.testing.assert_close(value, expected[name])
    assert prompt.media.images == (RED, BLUE)
    assert prompt.group == 3
    assert prompt.row == {**row, "prompt": said}
    # Token types mark the tokens of images.
    places = next(iter(prompt.media.token_tensors.values()))
    assert places.shape == (len(prompt.ids),)
    marked = {token for token, place in zip(prompt.ids, places.tolist()) if place}
    number = getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id
    assert marked == {number}
    assert prompt.ids.count(number) == int((places != 0).sum())


def test_a_prompt_without_images_has_none(processor):
    prompt = maker(processor)(query(image=None, images=[]), 0)
    assert prompt.media is None
    assert prompt.row["prompt"] == [{"role": "user", "content": "hi"}]
    assert prompt.ids == maker(processor).token_ids(prompt.row["prompt"])


def test_a_text_prompt_is_tokenised_as_it_is(qwen):
    prompt = maker(qwen)({"prompt": "ab"}, 0)
    assert prompt.ids == qwen.tokenizer("ab")["input_ids"]
    with pytest.raises(VisionError, match="images in 'image' and the text prompt 'ab', but images need conversations"):
        maker(qwen)({"prompt": "ab", "image": RED}, 0)


def test_the_same_pictures_are_the_same_media(qwen):
    first, second = (maker(qwen)(query(image=tiny_vlms.make_image("red")), group) for group in (0, 1))
    other = maker(qwen)(query(image=tiny_vlms.make_image("green")), 2)
    assert first.identity == second.identity
    assert first.ids == other.ids
    assert first.identity != other.identity


def test_images_go_to_the_front_of_the_first_user_message_or_fill_its_empty_blocks():
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}], "images": [RED, BLUE]}
    messages = messages_with_images(row)
    assert messages is not None
    assert messages[0] == {"role": "system", "content": "s"}
    assert messages[1]["content"] == [
        {"type": "image", "image": RED},
        {"type": "image", "image": BLUE},
        {"type": "text", "text": "a"},
    ]
    assert row["prompt"][1]["content"] == "a"
    blocks = [
        {"type": "text", "text": "a", "image": None},
        {"type": "image", "text": None, "image": None},
        {"type": "image", "image": GREEN},
        {"type": "image"},
    ]
    messages = messages_with_images({"prompt": [{"role": "user", "content": blocks}], "images": [RED, BLUE]})
    assert messages is not None
    assert [block.get("image") for block in messages[0]["content"]] == [None, RED, GREEN, BLUE]
    assert messages[0]["content"][0] == {"type": "text", "text": "a"}


def test_images_need_as_many_places_and_a_user_message():
    for places, images in ((1, [RED, BLUE]), (2, [RED]), (1, [])):
        row = {"prompt": tiny_vlms.question("a", places), "images": images}
        with pytest.raises(VisionError, match=f"has {len(images)} images in .*, but its messages have {places} places"):
            messages_with_images(row)
    row = {"prompt": [{"role": "system", "content": "a"}], "image": RED}
    with pytest.raises(VisionError, match="1 images in 'image', but no message of the user's to put them in"):
        messages_with_images(row)


def test_a_placeholder_in_a_text_is_no_image(processor):
    token = processor.image_token
    prompt, plain = (maker(processor)(query(text, image=RED), 0) for text in (f"a{token}", "a"))
    assert prompt.ids.count(processor.image_token_id) == plain.ids.count(processor.image_token_id)
    with pytest.raises(VisionError, match="which stands for an image and has none"):
        maker(processor)(query(f"a{token}"), 0)


def test_what_fails_is_reported_with_the_images(qwen):
    with pytest.raises(VisionError, match=r"Qwen2VLProcessor failed at a prompt with 1 images of 1000x2 pixels: Value"):
        maker(qwen)(query(image=tiny_vlms.make_image("red", (1000, 2))), 0)
    deaf = tiny_vlms.build("qwen2_vl").processor
    deaf.chat_template = "{% for m in messages %}{% for b in m.content %}{{ b.text }}{% endfor %}{% endfor %}"
    with pytest.raises(VisionError, match="1 images, but its rendered text has 0 times the placeholder"):
        maker(deaf)(query(image=RED), 0)


# ----------------------------------------------------------------------------------------------------- templates


def test_messages_take_the_form_that_the_template_renders(qwen):
    """A template for content blocks gets blocks, one for texts gets texts, and one for both gets messages unchanged."""
    text, blocks = {"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    templates = {
        "{% for m in messages %}{% for b in m.content %}{{ b.text }}{% endfor %}{% endfor %}": (blocks, blocks),
        "{% for m in messages %}{{ m.content }}{% endfor %}": (text, text),
        tiny_vlms.chat_template("<|image_pad|>"): (text, blocks),
    }
    for template, expected in templates.items():
        processor = tiny_vlms.build("qwen2_vl").processor
        processor.chat_template = template
        made = maker(processor)
        assert (made.template_messages([text])[0], made.template_messages([blocks])[0]) == expected
        assert made.token_ids([text]) == made.token_ids([blocks])


def test_the_processors_template_is_used_on_a_copy_of_the_tokenizer(qwen):
    plain = qwen.tokenizer
    assert plain.chat_template is None
    speaking = tokenizer_with_processor_template(qwen, plain)
    assert speaking.chat_template == qwen.chat_template
    assert plain.chat_template is None
    assert speaking.get_vocab() == plain.get_vocab()
    assert tokenizer_with_processor_template(plain, plain) is plain


def test_a_text_gets_one_beginning_of_sequence_token():
    """The tokenizer adds the token unless the template or the prompt has it, and none at the end."""
    from tokenizers.processors import TemplateProcessing

    processor = tiny_vlms.build("llava_next").processor
    begin = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    processor.tokenizer._tokenizer.post_processor = begin
    rows = [query(), query(image=RED)]
    assert [maker(processor)(row, 0).ids[:2].count(2) for row in rows] == [1, 1]
    ends = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    begun = [maker(processor)(row, 0) for row in rows]
    processor.tokenizer._tokenizer.post_processor = ends
    for prompt, row in zip(begun, rows):  # what it appends is left out
        other = maker(processor)(row, 0)
        assert other.ids == prompt.ids
        if prompt.media is not None:
            lengths = {len(values) for values in other.media.token_tensors.values()}
            assert lengths <= {len(prompt.ids)}
    processor.tokenizer._tokenizer.post_processor = begin
    processor.chat_template = "{{ bos_token }}" + processor.chat_template
    assert [maker(processor)(row, 0).ids[:2].count(2) for row in rows] == [1, 1]


def test_example_prompt(processor):
    prompt = example_prompt(processor)
    assert prompt is not None and prompt.media is not None
    assert len(prompt.media.images) == 1
    assert prompt.media.tensors["pixel_values"].float().std() > 0.1
    two = example_prompt(processor, images=[RED, BLUE])
    assert two is not None and two.media is not None
    assert two.media.images == (RED, BLUE)


def test_there_is_no_example_without_a_processor_or_its_template(qwen):
    assert example_prompt(qwen.tokenizer) is None
    assert not is_processor(qwen.tokenizer)
    silent = tiny_vlms.build("qwen2_vl").processor
    silent.chat_template = None
    assert example_prompt(silent) is None


def test_replaced_ids(processor):
    """More text around the same images is allowed, fewer image tokens are not."""
    prompt = maker(processor)(query(image=RED), 0)
    extra = processor.tokenizer("abc")["input_ids"]
    other = replace_ids(prompt, [*extra, *prompt.ids])
    assert other.media is not None
    assert prompt.media is not None
    for name, types in prompt.media.token_tensors.items():
        assert other.media.token_tensors[name].tolist() == [0] * len(extra) + types.tolist()
    places = next(iter(prompt.media.token_tensors.values())).tolist()
    fewer = [token for token, place in zip(prompt.ids, places) if not place]
    with pytest.raises(VisionError, match=f"there are 0 tokens of images among them.*are {sum(map(bool, places))} tok"):
        replace_ids(prompt, fewer)


# ----------------------------------------------------------------------------------------------------- data sets


def png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def check(rows: Any, processor: Any, max_context: int | None = None) -> None:
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    check_dataset(dataset, "train_dataset", maker(processor, max_context))


def test_good_rows_pass(qwen, tmp_path: Path):
    RED.save(tmp_path / "a.png")
    check([query(image=RED), query(image=None), query(image=BLUE)], qwen)
    check([query(images=[RED, BLUE]), query(images=[]), query(images=None), query(images=[RED])], qwen)
    check([query(image=str(tmp_path / "a.png")), query(image=None)], qwen)
    check([query(image=png(RED))], qwen)
    check([{"prompt": tiny_vlms.question("a", 2), "images": [RED, BLUE]}], qwen)
    block = {"type": "image", "image": RED}
    check([{"prompt": [{"role": "user", "content": [block, {"type": "text", "text": "a"}]}]}], qwen)
    check(Dataset.from_list([query(image=RED)]).to_iterable_dataset(), qwen)
    check(IterableDataset.from_generator(lambda: iter([query(image=RED)])), qwen)
    check([{"prompt": "text alone"}], qwen)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (
            [query(image=png(RED)), query(image=b"broken")],
            ImageError,
            "row 1 of train_dataset: an image in 'image' c",
        ),
        (
            [query(image=None), query(image="gone.png")],
            ImageError,
            "row 1 of train_dataset: .*FileNotFoundError.*gone.png",
        ),
        (
            [query(images=[png(RED)]), query(images=[png(RED), b"x"])],
            ImageError,
            "row 1 of train_dataset: image 1 in 'images' c",
        ),
        ([query(image="http://a/b.png")], ImageError, "row 0 of train_dataset: an image in 'image' is the address"),
        (
            [
                {"prompt": tiny_vlms.question("a", 1), "images": [RED]},
                {"prompt": tiny_vlms.question("a", 1), "images": []},
            ],
            VisionError,
            "row 1 of train_dataset: a row has 0 images in .*, but its messages have 1 places",
        ),
        ([{"prompt": "a", "image": RED}], VisionError, "row 0 of train_dataset: .*images need conversations; make the"),
        ([query(), query("see <|image_pad|>")], VisionError, "row 1 of train_dataset: its prompt has the text"),
    ],
)
def test_bad_rows_are_named(rows: list[dict[str, Any]], error: type[Exception], message: str, qwen):
    with pytest.raises(error, match=message):
        check(rows, qwen)


def test_a_file_that_is_cut_off_is_named_wherever_it_is_decoded(qwen, tmp_path: Path):
    """The first images are decoded before training; later, without a row number, the file is named."""
    (tmp_path / "cut.png").write_bytes(png(RED)[:60])
    (tmp_path / "whole.png").write_bytes(png(RED))
    row = query(image=str(tmp_path / "cut.png"))
    with pytest.raises(ImageError, match=r"row 2 of train_dataset: an image in 'image' .*cut\.png'\) cannot be read"):
        check([query(image=None), query(image=str(tmp_path / "whole.png")), row], qwen)
    with pytest.raises(ImageError, match=r"an image in 'image' \(the file '.*cut\.png'\) cannot be read"):
        maker(qwen)(row, 0)
    with pytest.raises(ImageError, match=r"an image in 'image' \(the file '.*cut\.png'\) cannot be read"):
        maker(qwen)(query(image={"path": row["image"], "bytes": None}), 0)


def test_every_row_is_checked_and_only_the_first_is_processed(qwen, monkeypatch):
    opened: list[Any] = []
    made = VisionPromptMaker.__call__

    def note(self: Any, row: dict[str, Any], group: int) -> Any:
        opened.append(row)
        return made(self, row, group)

    monkeypatch.setattr(VisionPromptMaker, "__call__", note)
    check([query(image=None), *(query(image=RED) for _ in range(5))], qwen)
    assert len(opened) == 1


def test_a_data_set_is_checked_once(qwen, monkeypatch):
    looked: list[Any] = []
    check_images = VisionPromptMaker.check_images
    monkeypatch.setattr(
        VisionPromptMaker,
        "check_images",
        lambda self, *args, **how: looked.append(args) or check_images(self, *args, **how),
    )
    made, rows = maker(qwen), Dataset.from_list([query(image=RED), query(image=None)])
    check_dataset(rows, "eval_dataset", made)
    count = len(looked)
    assert count >= 2
    check_dataset(rows, "eval_dataset", made)
    assert len(looked) == count
    # Another context or other rows are checked again.
    made.max_context = 400
    check_dataset(rows, "eval_dataset", made)
    assert len(looked) == 2 * count
    check_dataset(rows.select([1]), "eval_dataset", made)
    assert len(looked) > 2 * count


def test_prompts_whose_images_leave_no_room_are_counted(qwen):
    """A prompt has 50 tokens, 26 of them of images; the text alone would fit."""
    rows = [query(images=[RED, BLUE]), query(), query(images=[RED, BLUE])]
    assert len(maker(qwen)(rows[0], 0).ids) == 50
    check(rows, qwen, max_context=51)
    with pytest.raises(
        ValueError, match="2 prompts of train_dataset are too long; the longest: a prompt has 50 tokens"
    ):
        check(rows, qwen, max_context=50)


def test_tokens_of_images_are_known_by_their_sizes(processor):
    """The number may include the tokens around the placeholders."""
    if not hasattr(processor, "_get_num_multimodal_tokens"):
        pytest.skip("this processor computes none, so its prompts are measured")
    made = maker(processor)
    with_both, without = made(query(images=[RED, BLUE]), 0).ids, made(query(), 0).ids
    found = made.num_image_tokens([(RED.height, RED.width), (BLUE.height, BLUE.width)])
    number = getattr(processor.tokenizer, "image_token_id", None) or processor.image_token_id
    assert 0 < with_both.count(number) <= found <= len(with_both) - len(without)
    assert made.num_image_tokens([]) == 0


def test_image_tokens_are_measured_where_the_processor_does_not_compute_them():
    """An image of 32x32 has 34 tokens, so only the text of this prompt would fit."""
    silent = tiny_vlms.build("smolvlm").processor
    assert not hasattr(silent, "_get_num_multimodal_tokens")
    num_tokens = len(maker(silent)(query(images=[RED, GREEN]), 0).ids)
    rows = [query(images=[RED]), query(images=[RED, GREEN])]
    check(rows, silent, max_context=num_tokens + 1)
    with pytest.raises(ValueError, match=f"1 prompts of train_dataset are too long.* has {num_tokens} tokens"):
        check(rows, silent, max_context=num_tokens)


def test_images_for_a_text_only_model(tokenizer):
    for rows in ([query(image=RED)], [query(image=None), query(image=RED)], [{"prompt": tiny_vlms.question("a")}]):
        dataset = Dataset.from_list(rows)
        with pytest.raises(ValueError, match="but nobody can see"):
            check_dataset(dataset, "train_dataset", PromptMaker(tokenizer, no_images="nobody can see"))
    with pytest.raises(ValueError, match="there is an image in 'image', but nobody can see"):
        PromptMaker(tokenizer, no_images="nobody can see")(query(image=RED), 0)


def test_text_blocks_become_one_text_for_a_text_only_model(tokenizer):
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    prompt = PromptMaker(tokenizer)({"prompt": [{"role": "user", "content": blocks}]}, 0)
    assert prompt.ids == PromptMaker(tokenizer)(query("ab"), 0).ids
