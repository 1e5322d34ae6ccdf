"""Prompts of rows, and the checks of data sets."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset, IterableDataset

from groupgrad.data.prompts import PromptMaker, check_dataset, drop_empty_fields

USER = [{"role": "user", "content": "ab"}]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def check(rows: Any, tokenizer: Any, max_context: int | None = None) -> None:
    dataset = Dataset.from_list(rows) if isinstance(rows, list) else rows
    check_dataset(dataset, "train_dataset", PromptMaker(tokenizer, None, max_context))


def test_texts_are_tokenised_as_they_are_and_conversations_go_through_the_template(tokenizer):
    row = {"prompt": "1+1=", "answer": "2"}
    prompt = PromptMaker(tokenizer)(row, 3)
    assert prompt.ids == ids_of(tokenizer, "1+1=")
    assert prompt.row is row
    assert prompt.group == 3
    assert not prompt.is_conversational
    prompt = PromptMaker(tokenizer)({"prompt": USER}, 0)
    assert prompt.ids == ids_of(tokenizer, "<user>ab\n<assistant>")
    assert prompt.is_conversational


def test_fields_that_a_columnar_store_filled_with_none_are_dropped(tokenizer):
    messages = [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "z"}]
    assert drop_empty_fields(messages) == [{"role": "user", "content": "a"}, messages[1]]
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m.name }}:{% endif %}{{ m.content }}{% endfor %}"
    )
    assert PromptMaker(tokenizer).token_ids(messages) == ids_of(tokenizer, "az:b")


def test_a_prompt_without_tokens_or_without_room_for_a_completion_is_an_error(tokenizer):
    maker = PromptMaker(tokenizer, None, max_context=4)
    assert len(maker({"prompt": "abc"}, 0).ids) == 3
    with pytest.raises(ValueError, match=r"4 tokens, but the model has 4 positions.*'abcd'"):
        maker({"prompt": "abcd"}, 0)
    with pytest.raises(ValueError, match="gives no token"):
        maker({"prompt": ""}, 0)


def test_good_data_sets_pass(tokenizer):
    check([{"prompt": "ab"}, {"prompt": "c"}], tokenizer, 16)
    check([{"prompt": USER}], tokenizer, 64)
    check(IterableDataset.from_generator(lambda: iter([{"prompt": "ab"}])), tokenizer)
    for nothing in ({"images": []}, {"image": None}):
        check([{"prompt": "a", **nothing}], tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": "x"}}
    messages = [
        {"role": "user", "content": "a", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    check([{"prompt": messages}], tokenizer)


def test_prompts_that_are_too_long_are_counted_and_the_longest_shown(tokenizer):
    rows = [{"prompt": "a"}, {"prompt": "b" * 8}, {"prompt": "c" * 11}, {"prompt": "d" * 7}]
    with pytest.raises(ValueError) as caught:
        check(rows, tokenizer, 8)
    message = str(caught.value)
    assert message.startswith("2 prompts of train_dataset are too long")
    assert "a prompt has 11 tokens" in message
    assert repr("c" * 11) in message


def test_conversations_are_measured_with_their_template(tokenizer):
    """`<user>ab\\n<assistant>` has 20 characters."""
    check([{"prompt": USER}], tokenizer, 21)
    with pytest.raises(ValueError, match=r"1 prompts .* 20 tokens"):
        check([{"prompt": USER}], tokenizer, 20)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": ""}], "row 0 of train_dataset: its prompt is the empty text.*write a prompt"),
        ([{"prompt": "a"}, {"prompt": ""}], "row 1 of train_dataset"),
        ([{"prompt": []}], "empty list of messages.*add a user message"),
        ([{"prompt": [{"role": "user", "text": "a"}]}], "a message is a dict with 'role' and 'content'"),
        ([{"prompt": [{"content": "a"}]}], "a message is a dict with 'role' and 'content'"),
        ([{"prompt": [{"role": "user", "content": None}]}], "a message is a dict with 'role' and 'content'"),
        ([{"prompt": ["a", "b"]}], "has the message 'a'"),
        ([{"prompt": 7}], "its prompt is 7.*a text or a list of messages"),
        ([{"prompt": None}, {"prompt": "a"}], "its prompt is None"),
        ([{"question": "a", "answer": "b"}], r"columns \['answer', 'question'\], but no 'prompt'"),
    ],
)
def test_bad_prompts_are_rejected(rows: list[dict[str, Any]], message: str, tokenizer):
    with pytest.raises(ValueError, match=message):
        check(rows, tokenizer)


def test_other_data_sets_are_rejected(tokenizer):
    for empty in (Dataset.from_dict({"prompt": []}), IterableDataset.from_generator(lambda: iter([]))):
        with pytest.raises(ValueError, match=r"no rows.*at least one row"):
            check(empty, tokenizer)
    for thing in (({"prompt": "a"},), "path/to/data", {"train": 1}):
        with pytest.raises(TypeError, match=type(thing).__name__):
            check(thing, tokenizer)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}])
    for kind in ("pandas", "arrow"):
        for dataset in (rows.with_format(kind), rows.to_iterable_dataset().with_format(kind)):
            with pytest.raises(
                TypeError, match=r"has a format whose rows are no dicts; give dataset.with_format\(None"
            ):
                check(dataset, tokenizer)
    with pytest.raises(ValueError, match=r"its prompt is array.*a list of messages"):
        check(rows.with_format("numpy"), tokenizer)


def test_image_columns_are_rejected_in_any_row(tokenizer):
    for column, value, first in (("image", "picture", True), ("images", ["picture"], False)):
        rows = [{"prompt": "a", column: value}, {"prompt": "b", column: None}]
        message = (
            f"row {int(not first)} of train_dataset: there is an image in '{column}', but the model reads text alone"
        )
        with pytest.raises(ValueError, match=message):
            check(rows if first else rows[::-1], tokenizer)


def test_a_conversation_needs_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    check([{"prompt": "a"}], tokenizer)
    with pytest.raises(ValueError, match=r"no chat template.*chat_template or use text prompts"):
        check([{"prompt": USER}], tokenizer)
