"""Chat format of a tokenizer: rendering of prompts and tool replies, and parsing of assistant turns."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from groupgrad import compat
from groupgrad.chat.call_syntax import CallSpan, find_syntax
from groupgrad.chat.chat_template import ChatTemplate
from groupgrad.chat.probe import (
    ANSWER,
    CALL,
    SCHEMAS,
    USER,
    ProbeRenderings,
    call_message,
    find_reasoning_tags,
    render_probes,
)
from groupgrad.chat.replies import ToolReplies
from groupgrad.chat.values import ToolCall, Turn, call_from_value, make_turn, parameter_schemas
from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker
from groupgrad.types import Messages

logger = logging.getLogger(__name__)

ResponseParser = Callable[[str, list[int]], Mapping[str, Any]]
"""Maps a turn's text (special tokens included, end tokens removed) and its ids to an assistant message."""

MAX_CALLS = 64
"""Maximum number of calls parsed in one turn. A model that writes nothing but tags would get a reply for each."""


class ChatFormat:
    """Renders prompts and tool replies, and parses calls, in the format of one tokenizer's chat template.

    All of it is cut out of renderings of probe conversations, whatever the template's source and the model's name.

    Turns are parsed by `response_parser` if it is given, else by the call syntax of the first family (`FAMILIES`) that
    reads the calls which the template renders, else by the tokenizer's `response_template` if it reads them.
    `response_parser(text, ids)` takes a turn's text (special tokens included, end tokens removed) and its ids, and
    returns an assistant message as a dict with `content`, perhaps `reasoning_content`, and `tool_calls`, a list of
    `{"name": ..., "arguments": {...}}` with or without a `function` object around them. A turn on which it raises has
    no calls and a `problem`.

    `prepare_messages` brings messages into the form that the template takes (text or content blocks); None only drops
    empty fields. `ending` gives the template's options for the end of a prompt; None: a generation prompt.
    `keeps_special_tokens` leaves the special tokens of an answer in its content. ValueError if the template has no
    calls, writes them in an unknown syntax, or cannot render replies; the message shows the renderings.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        schemas: list[dict[str, Any]],
        chat_template_kwargs: dict[str, Any] | None = None,
        response_parser: ResponseParser | None = None,
        prepare_messages: Callable[[Messages], Messages] | None = None,
        ending: Callable[[Messages], dict[str, bool]] | None = None,
        keeps_special_tokens: bool = False,
    ):
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the tokenizer has no chat template, so conversations with tools cannot be rendered; set "
                "tokenizer.chat_template or use an instruction-tuned model's tokenizer"
            )
        self._tokenizer, self._response_parser, self._ending = tokenizer, response_parser, ending
        self._template = template = ChatTemplate(tokenizer, chat_template_kwargs, prepare_messages)
        self._probes = probes = render_probes(template)
        message = call_message([CALL], arguments_as_text=probes.arguments_as_text)
        self._reasoning_tags = find_reasoning_tags(template, message, probes.generation_prompt)
        self._syntax = find_syntax(probes)
        self.name: str
        """Description of the call syntax for logs and error messages."""
        if response_parser is not None:
            self.name = "the response_parser given"
        elif self._syntax is not None:
            self.name = self._syntax.name
        elif self._response_template_works():
            self.name = "the tokenizer's response template"
        else:
            raise ValueError(_unknown_syntax(probes))
        # A template may reject the user's tools although it takes those of the probes: fail here, not in training.
        template.render([USER], schemas, prompt=True)
        self._replies = ToolReplies(template, probes, self._syntax)
        self.end_ids: tuple[int, ...] = self._find_end_ids()
        """Ids that end an assistant turn in this template, with calls or without."""
        prompt_with_tools = template.try_render([USER], SCHEMAS, prompt=True) or ""
        self.shows_tools: bool = SCHEMAS[0]["function"]["name"] in prompt_with_tools
        """The template renders the tools' schemas into the prompt; if not, the prompts have to describe them."""
        padding = {getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "pad_token_id", None)}
        self._trailing_ids = {*self.end_ids, *padding}
        special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
        removed = [] if keeps_special_tokens else special
        self._keeps_special = keeps_special_tokens
        self._special_pattern = re.compile("|".join(map(re.escape, removed)) or r"(?!)")
        if schemas and not self.shows_tools:
            logger.warning("the chat template does not show tools to the model; describe them in the prompts")
        if self._replies.as_user:
            logger.warning("the chat template has no tool messages; tool replies are rendered as messages of the user")

    def prompt_ids(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation with these tools, generation prompt included."""
        return self._template.encode(self.prompt_text(messages, schemas))

    def prompt_text(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> str:
        """Text of a conversation with these tools, generation prompt included."""
        ending = None if self._ending is None else self._ending(messages)
        return self._template.render(messages, schemas, prompt=True, ending=ending)

    def reply_ids(
        self,
        turn_ids: list[int],
        replies: list[dict[str, Any]],
        encode: Callable[[str], list[int]] | None = None,
        then: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Token ids to append to a sampled turn: the missing part of its end, `replies`, and the generation prompt.

        `replies` are tool messages, one per call, in order, at least one; `then` are messages behind them. Only these
        and the last of `turn_ids` matter; names and call ids that a template could reject are replaced by placeholders.
        `encode` makes token ids of the text with the replies; None uses the tokenizer.
        """
        return self._replies.ids(turn_ids, replies, encode or self._template.encode, then)

    def parse(self, turn_ids: list[int], schemas: list[dict[str, Any]]) -> Turn:
        """Parses a sampled turn into its message and calls. Never raises for text of the model.

        The content of a turn without calls and reasoning block is exactly its ids decoded without special tokens, or
        with those that do not end it.
        A reasoning block goes to `reasoning_content`; well-formed calls are cut out of the content, malformed ones
        stay in it.
        """
        ids = list(turn_ids)
        while ids and ids[-1] in self._trailing_ids:
            ids.pop()
        # Clean-up of spaces would change the texts in a call's arguments.
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        plain = self._tokenizer.decode(ids, skip_special_tokens=not self._keeps_special)
        if self._response_parser is not None:
            try:
                return checked_turn(self._response_parser(text, list(turn_ids)))
            except Exception as error:  # a user's function may raise anything; a bad rollout is data
                return make_turn(plain, problem=f"response_parser failed: {type(error).__name__}: {error}")
        syntax = self._syntax
        if syntax is None:
            turn = self._parse_by_response_template(text, schemas)
            if turn.problem is not None:  # it rejects the whole turn for a malformed call, of which the model is told
                return make_turn(plain, calls=[ToolCall("", problem=turn.problem)])
            return turn if turn.calls or "reasoning_content" in turn.message else make_turn(plain)
        in_channels = syntax.split_reasoning(text)
        reasoning, rest = in_channels or self._reasoning_tags.split(text)
        spans = _first_calls(syntax.read(rest, parameter_schemas(schemas)))
        if not spans and reasoning is None and in_channels is None:
            return make_turn(plain)
        return make_turn(self._content(rest, spans), reasoning, [call for span in spans for call in span.calls])

    def _content(self, text: str, spans: list[CallSpan]) -> str:
        """The text without well-formed calls and special tokens."""
        pieces: list[str] = []
        at = 0
        for span in spans:
            if span.is_well_formed:
                piece = self._special_pattern.sub("", text[at : span.start])
                pieces.append(piece.strip() if at else piece.rstrip())
                at = span.end
        last = self._special_pattern.sub("", text[at:])
        pieces.append(last.strip() if at else last)
        return "\n".join(piece for piece in pieces if piece)

    def _parse_by_response_template(self, text: str, schemas: list[dict[str, Any]]) -> Turn:
        try:
            prefix = self._probes.generation_prompt
            return checked_turn(compat.parse_response(self._tokenizer, text, prefix=prefix, tools=schemas))
        except Exception as error:  # the library passes on whatever its content parsers raise
            return make_turn("", problem=f"the tokenizer's response template failed: {error}")

    def _response_template_works(self) -> bool:
        """True if the tokenizer has a response template that parses the probe call."""
        if getattr(self._tokenizer, "response_template", None) is None or not self._probes.one_call:
            return False
        turn = self._parse_by_response_template(self._probes.one_call, SCHEMAS)
        if [(call.name, call.arguments) for call in turn.calls] == [(CALL.name, CALL.arguments)]:
            return True
        reason = turn.problem or "it does not read its template's own calls"
        logger.warning("the tokenizer's response template is not used: %s", reason)
        return False

    def _find_end_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a turn with a call and a turn without."""
        template, answer = self._template, ANSWER["content"]
        text_ends = template.control_tokens(self._probes.text_end)[-1:]
        if not text_ends:
            followed = template.try_render([USER, ANSWER, {"role": "user", "content": "Probe7Next"}]) or ""
            behind_answer = followed.partition(answer)[2].partition("Probe7Next")[0]
            text_ends = template.control_tokens(behind_answer)[:1]
        ends = [self._replies.end_token, *text_ends]
        return tuple(dict.fromkeys(token.id for token in ends if token is not None))


def _first_calls(spans: list[CallSpan]) -> list[CallSpan]:
    """Spans with at most `MAX_CALLS` calls; a malformed call follows them if there are more."""
    num_calls = 0
    for index, span in enumerate(spans):
        num_calls += len(span.calls)
        if num_calls > MAX_CALLS:
            kept = span.calls[: len(span.calls) - (num_calls - MAX_CALLS)]
            rest = ToolCall("", problem=f"there are more than {MAX_CALLS} calls in one turn; the others were not read")
            return [*spans[:index], CallSpan(span.start, span.end, [*kept, rest])]
    return spans


def _unknown_syntax(probes: ProbeRenderings) -> str:
    if not probes.one_call:
        return (
            "the chat template shows no tool calls: it renders an assistant message without its tool_calls, or cannot "
            "render arguments that are no texts. "
            "Give the tokenizer a chat template with tools (tokenizer.chat_template = ...), or pass response_parser= "
            "to read calls that your prompts ask for in a form of their own"
        )
    return (
        f"the chat template writes tool calls in an unknown syntax. A call of {CALL.name} with the arguments "
        f"{CALL.arguments} is rendered as\n  {probes.one_call!r}\nPass response_parser=, a function of a turn's "
        "text and token ids that returns the assistant message with its tool_calls, or set tokenizer.response_template "
        "to a response template of transformers that reads such calls"
    )


def checked_turn(message: Any) -> Turn:
    """Converts a response parser's message to a turn; TypeError or ValueError if it is no message."""
    if not isinstance(message, Mapping):
        raise TypeError(f"it returned a {type(message).__name__}; it must return a message as a dict")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise TypeError(f"its content is a {type(content).__name__}; it must be a text")
    entries = message.get("tool_calls") or []
    calls = [call_from_value(entry) for entry in entries]
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key)), None)
    return make_turn(content or "", reasoning, calls)


class PlainFormat:
    """The format of conversations without tools: renders prompts and decodes answers; no turn has calls."""

    end_ids: tuple[int, ...] = ()

    def __init__(self, prompt_maker: PromptMaker, eos_ids: Collection[int] = ()):
        self._prompt_maker = prompt_maker
        self._texts = CompletionTexts(prompt_maker.tokenizer, eos_ids, prompt_maker.keeps_special_tokens)

    def prompt_text(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> str:
        """Text of a conversation, generation prompt included."""
        return self._prompt_maker.render(messages)

    def reply_ids(
        self, turn_ids: list[int], replies: list[dict[str, Any]], encode: Callable[[str], list[int]] | None = None
    ) -> list[int]:
        """Never called, as there are no calls to reply to."""
        raise AssertionError("there are no tools, so there are no replies")

    def parse(self, turn_ids: list[int], schemas: list[dict[str, Any]]) -> Turn:
        """Decodes the turn to a message of text."""
        (content,) = self._texts([turn_ids])
        return make_turn(content)
