"""Finds the tokens that each request of a program continues, so that rows have the token ids that were sampled.

Each answered request is a node: a conversation, and the token ids that the model read and wrote for it. A request whose
messages begin with a node's continues its ids; only the messages behind it are rendered, as the text that the chat
template puts behind a turn. So nothing that was sampled is tokenised again. A request that continues the newest node of
a branch makes that branch longer; any other one (history dropped or rewritten, the same question again, a sub-agent)
begins a branch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat import ChatFormat, PlainFormat
from groupgrad.chat.chat_format import ResponseParser
from groupgrad.chat.chat_template import ChatTemplate
from groupgrad.chat.replies import TextTurns
from groupgrad.chat.values import Turn, parameter_schemas, typed_value
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Sample
from groupgrad.integrations.agents.wire import BadRequest, Question

NAN = float("nan")


@dataclass(slots=True, eq=False)
class GrowingBranch:
    """Tokens of a rollout that continue each other."""

    context: list[int]
    """Token ids before its first token."""
    messages: list[dict[str, Any]]
    """The messages that `context` renders; empty for plain text."""
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    """NaN for the policy's."""
    requests: list[int] = field(default_factory=list)
    """Numbers of the requests that its trained turns answer, in the order in which the rollout's were answered."""
    is_asked: bool = False
    """A request that makes it longer is under way."""

    def append(self, ids: Sequence[int], sample: Sample | None, step: int, temperature: float | None = None) -> None:
        """Appends sampled tokens with their sample, or tokens of messages, whose log-probs and entropies are NaN."""
        unknown = [NAN] * len(ids)
        versions = None if sample is None else sample.policy_versions
        self.ids += ids
        self.temperatures += unknown if temperature is None else [temperature] * len(ids)
        self.sampled += [sample is not None] * len(ids)
        self.logprobs += unknown if sample is None or sample.logprobs is None else sample.logprobs[: len(ids)]
        self.entropies += unknown if sample is None or sample.entropies is None else sample.entropies[: len(ids)]
        self.versions += [step] * len(ids) if versions is None else versions[: len(ids)]


@dataclass(slots=True, frozen=True, eq=False)
class _Node:
    """An answered request."""

    branch: GrowingBranch
    length: int
    """Tokens of the branch up to the end of the answer."""
    turn_ids: list[int]
    """The sampled ids of the answer."""


@dataclass(slots=True, eq=False)
class Continuation:
    """The branch and the token ids that a request continues."""

    branch: GrowingBranch
    between: list[int]
    """Token ids of the request's messages behind the branch's tokens; empty for a branch that it begins."""
    is_longer: bool
    """True if the branch exists already."""
    digest: bytes
    """Digest of the request's messages and tools."""
    temperature: float | None
    """At which the answer is sampled; None for the policy's."""

    @property
    def ids(self) -> list[int]:
        """All token ids that the model reads."""
        return [*self.branch.context, *self.branch.ids, *self.between]


class Formats:
    """Renders conversations with and without tools, and parses their turns. Shared by all sessions of a run."""

    def __init__(self, maker: PromptMaker, eos_ids: Sequence[int], response_parser: ResponseParser | None = None):
        self.maker, self._plain = maker, PlainFormat(maker, eos_ids)
        self._response_parser = response_parser
        template = ChatTemplate(maker.tokenizer, maker.chat_template_kwargs, maker.template_messages)
        self._text_turns = TextTurns(template)
        self._by_tools: dict[str, ChatFormat] = {}

    def with_tools(self, tools: list[dict[str, Any]]) -> ChatFormat:
        """The format of conversations with these tools; BadRequest if the template has none."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._by_tools:
            try:
                for parameters in parameter_schemas(tools).values():
                    for schema in parameters.values():
                        typed_value("", schema)  # raises here what it would raise for a sampled call
                self._by_tools[key] = ChatFormat(
                    self.maker.tokenizer,
                    schemas=tools,
                    chat_template_kwargs=self.maker.chat_template_kwargs,
                    response_parser=self._response_parser,
                    prepare_messages=self.maker.template_messages,
                    ending=self.maker.ending,
                    keeps_special_tokens=self.maker.keeps_special_tokens,
                )
            except Exception as error:  # a template may raise anything about a program's tools
                raise BadRequest(f"the model cannot be given these tools: {error}") from error
        return self._by_tools[key]

    def prompt_ids(self, question: Question) -> list[int]:
        """Token ids of a whole conversation or text, at least one; BadRequest if there are none, or wrong ones."""
        if question.text is not None:
            given, size = question.text, len(self.maker.tokenizer)
            try:
                ids = self.maker.token_ids(given) if isinstance(given, str) else given
            except Exception as error:  # a tokenizer may raise anything, for half of a surrogate pair a TypeError
                raise BadRequest(f"prompt cannot be tokenised: {error}") from error
            if not ids or not all(0 <= token < size for token in ids):
                raise BadRequest(f"prompt has no token, or one outside of 0 to {size - 1}")
            return list(ids)
        maker, messages = self.maker, question.messages
        try:
            if not question.tools:
                return maker.token_ids(messages)
            text = self.with_tools(question.tools).prompt_text(maker.template_messages(messages), question.tools)
            return maker.encode(text).ids
        except BadRequest:
            raise
        except Exception as error:  # a template may raise anything
            raise BadRequest(f"the chat template refuses this conversation: {error}") from error

    def between(self, turn_ids: list[int], messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids between a sampled turn and the next one. Raises what a template raises."""
        num_replies = next((i for i, message in enumerate(messages) if message["role"] != "tool"), len(messages))
        prepared, maker = self.maker.template_messages(messages), self.maker
        if num_replies and tools:
            replies, then = prepared[:num_replies], prepared[num_replies:]
            return self.with_tools(tools).reply_ids(turn_ids, replies, lambda text: maker.encode(text).ids, then)
        return self._text_turns.ids(turn_ids, prepared, lambda text: maker.encode(text).ids)

    def parse(self, ids: list[int], question: Question) -> Turn:
        """A sampled turn as a message with calls."""
        if question.tools:
            return self.with_tools(question.tools).parse(ids, question.tools)
        return self._plain.parse(ids, [])


class Conversations:
    """The branches and answered requests of one rollout."""

    def __init__(self, formats: Formats):
        self.formats = formats
        self.branches: list[GrowingBranch] = []
        self._nodes: dict[bytes, _Node] = {}
        self.num_answered = 0
        self.last: list[dict[str, Any]] = []
        """The conversation that was answered last, with the answer."""

    def find(self, question: Question, temperature: float | None = None) -> Continuation:
        """Finds or begins the branch of a request, and marks it as asked. BadRequest if it cannot be rendered."""
        digests = _digests(question)
        for length in range(len(question.messages) - 1, 0, -1):
            node = self._nodes.get(digests[length])
            if node is None:
                continue
            try:
                between = self.formats.between(node.turn_ids, question.messages[length:], question.tools)
            except Exception:  # what cannot be cut out of the template's renderings is rendered as a whole
                break
            branch = node.branch
            if node.length == len(branch.ids) and not branch.is_asked:
                branch.is_asked = True
                return Continuation(branch, between, True, digests[-1], temperature)
            context = [*branch.context, *branch.ids[: node.length], *between]
            return Continuation(self._begin(context, question), [], False, digests[-1], temperature)
        return Continuation(
            self._begin(self.formats.prompt_ids(question), question), [], False, digests[-1], temperature
        )

    def _begin(self, context: list[int], question: Question) -> GrowingBranch:
        """Begins a branch behind these token ids."""
        self.branches.append(GrowingBranch(context, question.messages, is_asked=True))
        return self.branches[-1]

    def answered(
        self,
        continuation: Continuation,
        question: Question,
        sample: Sample,
        ids: list[int],
        message: dict[str, Any],
        step: int,
    ) -> None:
        """Notes that a request was answered by the first tokens `ids` of a sample, and by this message.

        At a temperature of 0 the tokens are certain, so they have no gradient and are not trained.
        """
        branch, is_trained = continuation.branch, continuation.temperature != 0.0
        if is_trained:
            branch.requests.append(self.num_answered)
        self.num_answered += 1
        branch.append(continuation.between, None, step)
        if is_trained:
            branch.append(ids, sample, step, continuation.temperature)
        else:
            branch.append(ids, None, step)
        branch.is_asked = False
        if question.text is None:
            key = _digest(continuation.digest, message)
            self._nodes[key] = _Node(branch, len(branch.ids), ids)
            self.last = [*question.messages, message]


def _digests(question: Question) -> list[bytes]:
    """For each number of messages, from 0 on, a digest of the tools and that many first ones."""
    digests = [hashlib.blake2b(json.dumps(question.tools, sort_keys=True).encode(), digest_size=16).digest()]
    for message in question.messages:
        digests.append(_digest(digests[-1], message))
    return digests


def _digest(before: bytes, message: dict[str, Any]) -> bytes:
    """Equal for messages that say the same. Clients return answers without reasoning, and with ids of their own."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    said = (message["role"], message.get("content") or "", calls, message.get("tool_call_id"))
    return hashlib.blake2b(before + json.dumps(said, sort_keys=True).encode(), digest_size=16).digest()
