"""Prevents the text of control tokens in untrusted input from being encoded as control tokens.

A tool's result, an observation or a column of data may contain the text of a control token, such as `<|im_end|>`.
Encoded as that token, it would end the turn and let the text speak as the user or the system. `mark` therefore replaces
such texts by single characters before the chat template renders; `encode` makes token ids of the rendered text, in
which only the template's own control tokens are left, and gives each mark the ordinary tokens of its text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

_START = "\ufdd0"
_DIGITS = "".join(map(chr, range(0xFDD1, 0xFDF0)))
_MARKS = re.compile(f"{_START}([{_DIGITS}]{{3}})")
"""A mark: `_START` and a number of three digits, in characters that Unicode reserves for use inside programs."""

_LONE = re.compile(rf"{_START}(?![{_DIGITS}]{{3}})")
"""A `_START` that does not begin a mark."""


class OutsideText:
    """Marks and encodes text from outside for one tokenizer.

    Special tokens are control tokens wherever they stand. Tokens that were only added, such as `<tool_response>`, are
    control tokens if the chat template writes them; `mark` covers those only `with_added`, since prompts mention tags
    such as `<think>` for the model to use. `template_arguments` are what the template is rendered with.
    """

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        template = "\n".join(_texts_of([getattr(tokenizer, "chat_template", None), template_arguments]))
        added = {str(token): token.special for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        special = {str(text) for text in tokenizer.all_special_tokens} | {text for text in added if added[text]}
        written = {text for text in added if text.strip() and text in template}
        self._special, self._control = _any_of(special), _any_of(special | written)
        self._control_ids = set(tokenizer.convert_tokens_to_ids(sorted(special | written)))
        self._control_ids.discard(getattr(tokenizer, "unk_token_id", None))  # it stands for unknown text, too
        # In an order that does not depend on the rows seen, so that a forged mark has the same ids in every run.
        heads = sorted({text[0] for text in special | written if text})
        self._heads = re.compile("|".join(map(re.escape, [*heads])) or r"(?!)")
        """The first characters of control tokens."""
        texts = dict.fromkeys([_START, *sorted(special | written), *heads])
        self._numbers = {text: number for number, text in enumerate(texts)}
        """The numbers of the marks, by the text that each stands for."""
        self._ordinary_ids: dict[str, list[int]] = {}
        self._written = re.compile("|".join(map(re.escape, sorted(written))) or r"(?!)")

    def mark(self, value: Any, *, with_added: bool) -> Any:
        """The text, or the copied message or list, with a mark for each control token in its texts."""
        if isinstance(value, str):
            marked = (self._control if with_added else self._special).sub(self._mark_of, value)
            return self._mark_normalized(marked, with_added=with_added) if self._normalizes else marked
        if isinstance(value, Mapping):
            return {
                self.mark(key, with_added=with_added): self.mark(item, with_added=with_added)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark(item, with_added=with_added) for item in value]
        return value

    @cached_property
    def _normalizes(self) -> bool:
        """True if a text may stand for a control token in another spelling, as in lower case."""
        tokens = getattr(self.tokenizer, "added_tokens_decoder", {})
        is_fast = getattr(self.tokenizer, "is_fast", False)
        return is_fast and any(tokens[number].normalized for number in self._control_ids if number in tokens)

    def _mark_normalized(self, text: str, *, with_added: bool) -> str:
        """The text with a mark for each spelling that the tokenizer reads as a control token."""
        tokens = self.tokenizer.added_tokens_decoder
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for number, (start, end) in reversed(list(zip(found["input_ids"], found["offset_mapping"]))):
            token = tokens.get(number)
            if number in self._control_ids and token is not None and token.normalized and (token.special or with_added):
                text = text[:start] + self._mark(text[start:end]) + text[end:]
        return text

    def render(self, render: Callable[[Any], str], messages: Any) -> str:
        """The text that `render` makes of marked messages, with marks where it would rebuild a control token.

        A template that removes a part of a message, such as a block of reasoning, could join what stands around it.
        Where the first characters of control tokens are marked too, nothing can be joined; if the rendered text then
        has other control tokens, the template has rebuilt one, and that text is the result. The template may then leave
        in what it would have removed.
        """
        text = render(messages)
        guarded = self.guarded(messages)
        if guarded == messages:
            return text
        try:
            safe = render(guarded)
        except Exception:  # a template may look for a character that is marked, and raise
            return text
        return text if self._control.findall(text) == self._control.findall(safe) else safe

    def guarded(self, value: Any) -> Any:
        """The marked text, message or list, with a mark for each first character of a control token outside of one."""
        if isinstance(value, str):
            return self._outside_control.sub(lambda m: m[0] if m.lastgroup == "whole" else self._mark(m[0]), value)
        if isinstance(value, Mapping):
            return {key: self.guarded(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guarded(item) for item in value]
        return value

    @cached_property
    def _outside_control(self) -> re.Pattern[str]:
        return re.compile(f"(?P<whole>{_MARKS.pattern}|{self._control.pattern})|{self._heads.pattern}")

    def is_split_between(self, first: str, second: str) -> bool:
        """True if joining two texts forms a control token across their boundary."""
        counts = [sum(1 for _ in self._control.finditer(text)) for text in (first + second, first, second)]
        return counts[0] > counts[1] + counts[2]

    def encode(self, text: str, *, add_special_tokens: bool, is_continued: bool = False) -> list[int]:
        """Token ids of a text, with the ordinary tokens of what its marks stand for.

        `add_special_tokens` adds those of the tokenizer: before the text once, although it may begin with their text,
        and behind it unless the text `is_continued`.
        """
        if _MARKS.search(text) is None:
            ids = list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        else:
            ids = self._encode_marked(text, add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return ids
        repeated, appended = self.superfluous(ids)
        return ids[repeated : len(ids) - appended if is_continued else None]

    def superfluous(self, ids: list[int]) -> tuple[int, int]:
        """Number of tokens at the start and the end of `ids` that the tokenizer added, and that a prompt must not have.

        Those at the start are there already if the text begins with their text. Those at the end would end the text
        before it is continued.
        """
        before, behind = self._added
        repeated = len(before) if before and ids[: 2 * len(before)] == 2 * before else 0
        appended = len(behind) if behind and ids[len(ids) - len(behind) :] == behind else 0
        return repeated, appended

    @cached_property
    def _added(self) -> tuple[list[int], list[int]]:
        """Token ids that the tokenizer adds before and behind a text."""
        plain, full = (list(self.tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
        for start in range(len(full) - len(plain) + 1 if plain else 0):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        return [], []

    def is_rendered(self, text: str) -> bool:
        """True if a text has control tokens that the chat template writes, as if it had been rendered already."""
        return self._written.search(text) is not None

    def _encode_marked(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = _LONE.sub(self._mark_of, text)
        ids = self.marking_tokenizer(self.with_one_mark(text), add_special_tokens=add_special_tokens, verbose=False)[
            "input_ids"
        ]
        return list(chain.from_iterable(self.expansions(text, ids)))

    def expansions(self, text: str, ids: Iterable[int]) -> list[list[int]]:
        """The ordinary tokens of each of the `ids` that `marking_tokenizer` made of the marked text."""
        marked = iter(_MARKS.findall(text))
        return [self._ids_of(next(marked)) if number == self._mark_id else [number] for number in ids]

    @cached_property
    def marking_tokenizer(self) -> Any:
        """A copy of the tokenizer with one more token, which stands for every mark."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.add_tokens([_added_token(_START)])
        return tokenizer

    def with_one_mark(self, text: str) -> str:
        """The marked text in the form that `marking_tokenizer` reads."""
        return _MARKS.sub(_START, text)

    @cached_property
    def _mark_id(self) -> int:
        return self.marking_tokenizer.convert_tokens_to_ids(_START)

    def _mark_of(self, match: re.Match[str]) -> str:
        return self._mark(match[0])

    def _mark(self, text: str) -> str:
        number, base = self._numbers.setdefault(text, len(self._numbers)), len(_DIGITS)
        return _START + _DIGITS[number // base**2] + _DIGITS[number // base % base] + _DIGITS[number % base]

    def _ids_of(self, digits: str) -> list[int]:
        """The ordinary tokens of the text that a mark, given by its digits, stands for.

        A mark with an unknown number was part of the outside text; its own characters are encoded then.
        """
        number = 0
        for digit in digits:
            number = number * len(_DIGITS) + _DIGITS.index(digit)
        texts = list(self._numbers)
        text = texts[number] if number < len(texts) else _START + digits
        if text not in self._ordinary_ids:
            self._ordinary_ids[text] = self._ordinary(text)
        return self._ordinary_ids[text]

    def _ordinary(self, text: str) -> list[int]:
        """Token ids of a control token's text, none of which is a control token.

        Tokenizers split special tokens when asked to, but not added ones, so those are cut behind their first
        character. A vocabulary may still hold the parts; then every character is encoded alone.
        """
        for pieces in ([text], [text[:1], text[1:]], list(text)):
            ids = [number for piece in pieces if piece for number in self._split(piece)]
            if not self._control_ids.intersection(ids):
                return ids
        return []

    def _split(self, piece: str) -> list[int]:
        """Token ids of a piece in the middle of a text, with special tokens split."""
        if _START in piece:
            return list(self.tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])
        # Behind a token, as some tokenizers put a space before the first word of a text.
        ids = self.marking_tokenizer(_START + piece, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(ids["input_ids"])[1:]


def has_marks(value: Any) -> bool:
    """True if a text, or any text in a message or list, has a mark."""
    if isinstance(value, str):
        return _MARKS.search(value) is not None
    if isinstance(value, Mapping):
        return any(has_marks(key) or has_marks(item) for key, item in value.items())
    return isinstance(value, (list, tuple)) and any(map(has_marks, value))


def _texts_of(value: Any) -> Iterator[str]:
    """All texts in nested values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_of(item)


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """A pattern that matches any of these texts, the longest first, or a `_START` that does not begin a mark."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join([*map(re.escape, longest_first), _LONE.pattern]))


def _added_token(text: str) -> Any:
    from tokenizers import AddedToken

    return AddedToken(text, normalized=False, special=False)
