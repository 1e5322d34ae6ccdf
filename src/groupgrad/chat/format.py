"""How a tokenizer's chat template writes conversations with tools, and how its turns are read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupgrad.chat.channel_syntax import ChannelSyntax
from groupgrad.chat.parse import ResponseParser, checked_turn, hooked_turn, turn_message
from groupgrad.chat.probe import SCHEMAS, USER, Shown, call_message, find_syntax, look
from groupgrad.chat.reasoning import ChannelReasoning, TaggedReasoning, find_reasoning
from groupgrad.chat.records import Call, Region, Syntax, Turn
from groupgrad.chat.render import Template
from groupgrad.chat.replies import ReplyWriter
from groupgrad.chat.values import parameter_schemas
from groupgrad.types import Messages

logger = logging.getLogger(__name__)

MAX_CALLS = 64
"""Calls that are read in one turn. A model that writes nothing but tags would get a reply for each."""


@dataclass(slots=True)
class _Found:
    """What probing a template gave."""

    template: Template
    shown: Shown
    syntax: Syntax | None
    reasoning: TaggedReasoning | ChannelReasoning
    replies: ReplyWriter
    own_parser: bool
    """The tokenizer's response template reads the template's own calls."""


class ChatFormat:
    """Renders prompts and tool replies, and reads calls, as one tokenizer's chat template has them.

    What the template does is found out by rendering made-up conversations; neither its text nor the model's name
    plays a part.
    """

    def __init__(self, found: _Found, response_parser: ResponseParser | None = None):
        self._found, self._hook = found, response_parser
        self._template = found.template
        self._tokenizer = found.template.tokenizer
        self.end_ids: tuple[int, ...] = _end_ids(found)
        """Ids that end an assistant turn in this template, with calls or without."""
        self.name: str = self._describe()
        """The call syntax, for people."""
        self.shows_tools: bool = _shows_tools(found.template)
        """The template puts the tools' schemas into the prompt; if not, the prompts have to describe them."""
        self.rewrites_history: tuple[str, str] | None = found.replies.rewritten()
        """Excerpts of two renderings of one turn that differ by what follows it; None if there are none. It does no
        harm here, as a sampled turn is never rendered again."""
        eos = getattr(self._tokenizer, "eos_token_id", None)
        pad = getattr(self._tokenizer, "pad_token_id", None)
        self._trailing = {*self.end_ids, *(number for number in (eos, pad) if number is not None)}
        self._tidies = bool(getattr(self._tokenizer, "clean_up_tokenization_spaces", False))
        self._special_ids = set(self._tokenizer.all_special_ids)
        self._special_texts = sorted(self._tokenizer.all_special_tokens, key=len, reverse=True)

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        *,
        schemas: list[dict[str, Any]],
        chat_template_kwargs: dict[str, Any] | None = None,
        response_parser: Callable[..., Any] | None = None,
        readable: Callable[[Messages], Messages] | None = None,
    ) -> ChatFormat:
        """The format of a tokenizer's chat template, with these tools. `readable` brings messages into the form that
        the template takes (text or content blocks); None leaves them as they are.

        `response_parser(text, ids)` reads turns in place of everything else: it is given a turn's text (special tokens
        in it, the end mark off) and its ids, and returns an assistant message as a dict with `content`, perhaps
        `reasoning_content`, and `tool_calls`, a list of `{"name": ..., "arguments": {...}}` with or without a
        `function` object around them. What it raises becomes a turn without calls and a `problem`.

        Without it, turns are read by the tokenizer's `response_template` if it has one that reads the template's own
        calls, else by the syntax that probing finds. ValueError if the template has no calls, writes them in an
        unknown syntax, or cannot render replies; the message shows the renderings.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "the tokenizer has no chat template, so conversations with tools cannot be rendered; set "
                "tokenizer.chat_template or use an instruction-tuned model's tokenizer"
            )
        template = Template(tokenizer, chat_template_kwargs, readable)
        shown = look(template)
        message = call_message([shown.call], arguments_as_text=shown.arguments_as_text)
        reasoning: TaggedReasoning | ChannelReasoning = find_reasoning(template, message, shown.generation_prompt)
        syntax = find_syntax(shown, reasoning.closing) if shown.one else None
        if isinstance(syntax, ChannelSyntax):
            reasoning = ChannelReasoning(syntax)
        own_parser = response_parser is None and _own_parser_works(template, shown)
        if response_parser is None and syntax is None and not own_parser:
            raise ValueError(_unknown_syntax(shown))
        # Rendering the user's own tools may fail where the made-up ones did not: better now than in training.
        template.text([USER], schemas, prompt=True)
        replies = ReplyWriter(template, shown, syntax, schemas)
        found = _Found(template, shown, syntax, reasoning, replies, own_parser)
        made = cls(found, response_parser)
        if schemas and not made.shows_tools:
            logger.warning("the chat template does not show tools to the model; describe them in the prompts")
        if replies.as_user:
            logger.warning("the chat template has no tool messages; tool replies are rendered as messages of the user")
        return made

    def prompt_ids(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation with these tools, generation prompt included."""
        return self._template.ids(self.prompt_text(messages, schemas))

    def prompt_text(self, messages: list[dict[str, Any]], schemas: list[dict[str, Any]]) -> str:
        """The text of a conversation with these tools, generation prompt included."""
        return self._template.text(messages, schemas, prompt=True)

    def reply_ids(
        self,
        turn_ids: list[int],
        message: dict[str, Any],
        replies: list[dict[str, Any]],
        schemas: list[dict[str, Any]],
        encode: Callable[[str], list[int]] | None = None,
    ) -> list[int]:
        """Token ids between a sampled turn and the next one: the rest of the turn's end, `replies` (one per call, in
        order, at least one), the generation prompt. They go behind `turn_ids` as they are.

        Only the end of `turn_ids` and the replies matter; names and ids that a template could not take are replaced
        by harmless ones. `encode` makes token ids of a text with the replies; None is the tokenizer.
        """
        if not replies:
            raise ValueError("there are no replies, so there is nothing to put behind the turn")
        return self._found.replies.ids(turn_ids, replies, encode or self._template.ids)

    def parse(self, turn_ids: list[int], schemas: list[dict[str, Any]]) -> Turn:
        """What a sampled turn says and calls; never raises for what a model wrote.

        A turn without calls and reasoning block has for content exactly what decoding without special tokens gives.
        A reasoning block goes to `reasoning_content`; well-formed calls leave the content, broken ones stay in it.
        """
        ids = list(turn_ids)
        while ids and ids[-1] in self._trailing:
            ids.pop()
        # Tidied spaces would change the texts in a call's arguments.
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        is_plain = not self._tidies and not any(number in self._special_ids for number in ids)
        plain = text if is_plain else self._tokenizer.decode(ids, skip_special_tokens=True)
        if self._hook is not None:
            return hooked_turn(self._hook, text, turn_ids, plain)
        parts = self._found.reasoning.split(text)
        syntax = self._found.syntax
        regions = _limited(syntax.read(parts.rest, parameter_schemas(schemas))) if syntax else []
        if self._found.own_parser:
            turn = self._own_turn(text, schemas)
            # It drops broken calls without a word or gives up at them; our own reading tells the model what is wrong.
            if syntax is None or (turn.problem is None and len(turn.calls) == sum(len(r.calls) for r in regions)):
                says_nothing_new = not turn.calls and "reasoning_content" not in turn.message
                return Turn(turn_message(plain, None, []), [], turn.problem) if says_nothing_new else turn
        if not regions and parts.reasoning is None and not isinstance(syntax, ChannelSyntax):
            return Turn(turn_message(plain, None, []), [])
        calls = [call for region in regions for call in region.calls]
        return Turn(turn_message(self._content(parts.rest, regions), parts.reasoning, calls), calls)

    def _content(self, text: str, regions: list[Region]) -> str:
        pieces: list[str] = []
        at = 0
        for region in regions:
            if region.is_well_formed:
                piece = self._without_specials(text[at : region.start])
                pieces.append(piece.strip() if at else piece.rstrip())
                at = region.end
        last = self._without_specials(text[at:])
        pieces.append(last.strip() if at else last)
        return "\n".join(piece for piece in pieces if piece)

    def _without_specials(self, text: str) -> str:
        for special in self._special_texts:
            text = text.replace(special, "")
        return text

    def _own_turn(self, text: str, schemas: list[dict[str, Any]]) -> Turn:
        """The turn by the tokenizer's own parser; one with a problem where it gives up."""
        try:
            parsed = self._tokenizer.parse_response(text, prefix=self._found.shown.generation_prompt, tools=schemas)
            return checked_turn(parsed)
        except Exception as error:  # parsers of the library raise what their parts raise
            return Turn(turn_message("", None, []), [], f"the tokenizer's response template failed: {error}")

    def _describe(self) -> str:
        if self._hook is not None:
            return "the response_parser given"
        if self._found.own_parser:
            return "the tokenizer's response template"
        assert self._found.syntax is not None
        return self._found.syntax.name


def _limited(regions: list[Region]) -> list[Region]:
    """The regions with at most `MAX_CALLS` calls, and one more that says so if there are others."""
    rest = Call("", problem=f"there are more than {MAX_CALLS} calls in one turn; the others were not read")
    kept: list[Region] = []
    left = MAX_CALLS
    for region in regions:
        if left == 0:
            return [*kept, Region(region.start, region.start, [rest])]
        if len(region.calls) > left:
            return [*kept, Region(region.start, region.end, [*region.calls[:left], rest])]
        kept.append(region)
        left -= len(region.calls)
    return kept


def _shows_tools(template: Template) -> bool:
    prompt = template.attempt([USER], SCHEMAS, prompt=True)
    return prompt is not None and SCHEMAS[0]["function"]["name"] in prompt


def _end_ids(found: _Found) -> tuple[int, ...]:
    """The marks that end a turn with a call and a turn without."""
    ends: list[int] = []
    if found.replies.end_mark is not None:
        ends.append(found.replies.end_mark.id)
    template, answer = found.template, {"role": "assistant", "content": "Probe7Answer"}
    last = template.last_mark(found.shown.text_end, 0)
    if last is None:
        more = template.attempt([USER, answer, {"role": "user", "content": "Probe7Next"}])
        if more is not None and "Probe7Answer" in more and "Probe7Next" in more:
            at = more.index("Probe7Answer")
            last = template.first_mark(more, at, more.index("Probe7Next", at))
    if last is not None and last.id not in ends:
        ends.append(last.id)
    return tuple(ends)


def _own_parser_works(template: Template, shown: Shown) -> bool:
    tokenizer = template.tokenizer
    if getattr(tokenizer, "response_template", None) is None or not shown.one:
        return False
    try:
        parsed = tokenizer.parse_response(shown.one, prefix=shown.generation_prompt, tools=SCHEMAS)
        calls = checked_turn(parsed).calls
    except Exception as error:  # as above
        logger.warning("the tokenizer's response template is not used: it fails on its own calls (%s)", error)
        return False
    works = [(call.name, call.arguments) for call in calls] == [(shown.call.name, shown.call.arguments)]
    if not works:
        logger.warning("the tokenizer's response template is not used: it does not read its template's own calls")
    return works


def _unknown_syntax(shown: Shown) -> str:
    if not shown.one:
        return (
            "the chat template shows no tool calls: an assistant message with tool_calls is rendered without them. "
            "Give the tokenizer a chat template with tools (tokenizer.chat_template = ...), or pass response_parser= "
            "to read calls that your prompts ask for in a form of their own"
        )
    return (
        f"the chat template writes tool calls in an unknown syntax. A call of {shown.call.name} with the arguments "
        f"{shown.call.arguments} is rendered as\n  {shown.one!r}\nPass response_parser=, a function of a turn's text "
        "and token ids that returns the assistant message with its tool_calls"
    )
