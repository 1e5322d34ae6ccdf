"""Agents: rollouts of several turns, with tools and environments between them.

Each rollout is a coroutine (`_Agent.run`) over the shared engine (`driver.py`): reset, prompt, and then turns of the
model and replies of tools until it ends. A turn's tokens are kept as they were sampled; a reply's are what the chat
template puts between two turns. Nothing is decoded and tokenised again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from groupgrad.chat import Call, ChatFormat, PlainFormat
from groupgrad.concurrency.workers import Workers
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Engine, Request, Sample, SamplingOptions, open_session
from groupgrad.envs.environments import EnvHandle, Environments, add_observation
from groupgrad.envs.tools import Tool, ToolBox, ToolOptions, ToolReply
from groupgrad.metrics import Metric
from groupgrad.multimodal.tool_images import ReplyEncoder, opened_replies
from groupgrad.rollout.base import GenerationRequest, row_seed, turn_seed
from groupgrad.rollout.driver import Driver, Replies, ToolWait, Turn, TurnResult
from groupgrad.rollout.statistics import agent_metrics
from groupgrad.types import FinishReason, Media, Prompt, Rollout, ToolUse, Trace

logger = logging.getLogger(__name__)

NAN = float("nan")


@dataclass(slots=True, frozen=True)
class AgentOptions:
    """How agents are run."""

    max_tool_calling_iterations: int | None = None
    """Rounds of tool calls in a rollout; None: as many as its budget allows."""
    tools: ToolOptions = field(default_factory=ToolOptions)
    ahead: int = 0
    """Training rounds that may be sampled before an earlier one has been scored."""


class AgentRollouts:
    """Makes rollouts of several turns.

    `tools` are had by every rollout, an environment's by its own. The completion of a rollout is everything behind its
    prompt, and its budget, `sampling.max_new_tokens`, counts the tools' words too. A rollout whose environment fails
    at the beginning ends as `error`.
    """

    def __init__(
        self,
        prompt_maker: PromptMaker,
        engine: Engine,
        sampling: SamplingOptions,
        chat: ChatFormat | PlainFormat,
        *,
        tools: Sequence[Tool],
        environments: Environments | None,
        options: AgentOptions,
        seed: int,
    ):
        self.prompt_maker, self.engine, self.chat = prompt_maker, engine, chat
        self.sampling, self.options, self.seed = sampling, options, seed
        self._tools, self._environments = tuple(tools), environments
        self._workers = Workers(options.tools.num_threads)
        self._seats: dict[tuple[str, int], list[EnvHandle]] = {}
        """By phase and number of the round that they are of."""
        self._warned: set[str] = set()

    @property
    def is_exact(self) -> bool:
        """Whether the engine's numbers are training's."""
        return bool(getattr(self.engine, "exact", False))

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number; all of them run at once."""
        # Until now reward functions had the environments. Those of training rounds that may not have been scored yet
        # are still theirs; a round with the number of this one is sampled anew.
        for phase, number in list(self._seats):
            scored = request.phase == "train" and number < request.number - self.options.ahead
            if phase != "train" or scored or (phase, number) == (request.phase, request.number):
                self._release(phase, number)
        prompts: dict[Any, tuple[Prompt, Any]] = {}
        agents = [self._agent(request, row, prompts) for row in request.rows]
        with open_session(self.engine, self.sampling) as session:
            return Driver(session).run([agent.run() for agent in agents])

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Calls, failures, latencies, turns, waiting."""
        schemas = [tool.schema for tool in self._tools]
        if self._environments is not None:
            schemas += [schema for of_kind in self._environments.schemas.values() for schema in of_kind]
        return agent_metrics(rollouts, {schema["function"]["name"] for schema in schemas})

    def close(self) -> None:
        """Close every environment, and end the threads of tools. May be called any number of times."""
        for phase, number in list(self._seats):
            self._release(phase, number)
        if self._environments is not None:
            self._environments.close()
        self._workers.close()

    def warn_once(self, what: str, problem: str) -> None:
        """Tell the user of something that may happen in every turn."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s; said once: %s", what, problem)

    def _release(self, phase: str, number: int) -> None:
        assert self._environments is not None
        for handle in reversed(self._seats.pop((phase, number))):
            self._environments.release(handle)

    def _agent(self, request: GenerationRequest, row: int, prompts: dict[Any, tuple[Prompt, Any]]) -> _Agent:
        group = row // request.num_generations
        data, handle = request.rows_by_group[group], None
        if self._environments is not None:
            handle = self._environments.acquire(data)
            self._seats.setdefault((request.phase, request.number), []).append(handle)
        seed = row_seed(self.seed, request.phase, request.number, row)
        place = _Place(group, row, seed, request.step, prompts)
        return _Agent(self, self._workers, data, handle, handle.toolbox if handle else ToolBox(self._tools), place)


@dataclass(slots=True, frozen=True)
class _Place:
    """Where a rollout stands in its round."""

    group: int
    row: int
    seed: int
    step: int
    prompts: dict[Any, tuple[Prompt, Any]]
    """The round's prompts so far, by group, kind of environment, text and images, each with the messages that it was
    made of: rollouts of like beginnings share one."""


class _Failed(Exception):
    """A rollout cannot begin; the text says why."""


@contextmanager
def _as_failure(what: str) -> Iterator[None]:
    """What a template raises for words of a row or a tool is the rollout's failure, not the run's."""
    try:
        yield
    except Exception as error:
        raise _Failed(f"{what}: {type(error).__name__}: {error}") from error


class _Agent:
    """One rollout under way."""

    def __init__(
        self,
        maker: AgentRollouts,
        workers: Workers,
        data: dict[str, Any],
        handle: EnvHandle | None,
        toolbox: ToolBox,
        place: _Place,
    ):
        self._maker, self._workers, self._toolbox = maker, workers, toolbox
        self._data, self._seat, self._place = data, handle, place
        self._timeout_s = maker.options.tools.timeout_s
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._messages: list[dict[str, Any]] = []
        self._media: Media | None = None
        self._num_turns = 0
        self._uses: list[ToolUse] = []
        self._wait_s = self._hidden_s = 0.0
        self._problem = ""

    async def run(self) -> Rollout:
        """The finished rollout."""
        own_rewards: dict[str, float | None] = {}
        messages = _conversation(self._data)
        prompt, reason = Prompt([], {**self._data, "prompt": messages}, self._place.group), "error"
        try:
            prompt = await self._begin(messages)
            reason = await self._converse(prompt)
            own_rewards = await self._ask_for_reward()
        except _Failed as failure:
            self._problem = str(failure)
        return self._rollout(prompt, reason, own_rewards)

    # ------------------------------------------------------------------------------------ beginning and end

    async def _begin(self, messages: list[dict[str, Any]]) -> Prompt:
        """The prompt, with what the environment says at the beginning."""
        maker = self._maker.prompt_maker
        with _as_failure("the images of the prompt cannot be had"):
            placed: Any = maker.placed({**self._data, "prompt": messages})
        if self._seat is not None:
            outcome = await self._wait_for(self._seat.reset(self._data, self._workers, self._timeout_s))
            if outcome.problem:
                raise _Failed(outcome.problem)
            placed = add_observation(placed, outcome.value)
        images = [_image_key(image) for image in maker.pictures(placed)]
        handle = "" if self._seat is None else self._seat.spec.name
        key = (self._place.group, handle, str(maker.readable(placed)), *images)
        if key not in self._place.prompts:
            self._place.prompts[key] = (self._make_prompt(placed), placed)
        return self._place.prompts[key][0]

    def _make_prompt(self, placed: list[dict[str, Any]]) -> Prompt:
        maker = self._maker.prompt_maker
        with _as_failure("the images of the prompt cannot be had"):
            messages: Any = maker.shown({"prompt": placed})
        with _as_failure("the chat template cannot render the prompt"):
            text = self._maker.chat.prompt_text(maker.readable(messages), self._toolbox.schemas)
            encoded = maker.encode(text, maker.pictures(messages))
        if maker.max_context is not None and len(encoded.ids) >= maker.max_context:
            raise _Failed(maker.too_long_message(messages, len(encoded.ids)))
        return Prompt(encoded.ids, {**self._data, "prompt": messages}, self._place.group, encoded.media)

    async def _ask_for_reward(self) -> dict[str, float | None]:
        """The environment's own reward under its name; none if it gives none."""
        if self._seat is None or not self._seat.spec.has_reward:
            return {}
        outcome = await self._wait_for(self._seat.get_reward(self._workers, self._timeout_s))
        if outcome.problem:
            self._problem = outcome.problem
            logger.warning("row %d gets no reward of its environment: %s", self._place.row, outcome.problem)
        return {self._seat.spec.reward_name: outcome.value}

    def _rollout(self, prompt: Prompt, reason: FinishReason, own_rewards: dict[str, float | None]) -> Rollout:
        environment = {} if self._seat is None else {"environments": self._seat.instance}
        return Rollout(
            prompt=prompt,
            index=self._place.row,
            completion_ids=self._ids,
            finish_reason=reason,
            completion=self._messages,
            text=self._maker.prompt_maker.tokenizer.decode(self._ids, skip_special_tokens=True),
            sampled=self._sampled,
            sampling_logprobs=self._logprobs,
            sampling_entropy=self._entropies,
            policy_version=self._place.step,
            extra=environment,
            own_rewards=own_rewards,
            trace=Trace(self._num_turns, self._uses, self._wait_s, self._hidden_s, self._problem),
            media=None if self._media is prompt.media else self._media,
        )

    # ------------------------------------------------------------------------------------ turns

    async def _converse(self, prompt: Prompt) -> FinishReason:
        """Turns and replies until there is a reason to end."""
        chat, limit, schemas = self._maker.chat, self._maker.options.max_tool_calling_iterations, self._toolbox.schemas
        maker = self._maker.prompt_maker
        ticket: int | None = None
        for number_of_round in range(1 << 62):
            room, reason_if_full = self._room(prompt)
            turned = await self._turn(prompt, room, ticket, is_last=number_of_round == limit)
            turn = chat.parse(turned.sample.ids, schemas)
            if turn.problem is not None:
                self._problem = turn.problem
                self._maker.warn_once("a turn could not be read", turn.problem)
            self._messages.append(turn.message)
            if turned.sample.finish_reason == "length":
                return reason_if_full
            if not turn.calls:
                return "eos"
            if limit is not None and number_of_round >= limit:
                return "tool_limit"
            messages = [_message(reply, call) for reply, call in zip(await self._replies(turn.calls), turn.calls)]
            if maker.pictures(messages):
                messages = opened_replies(messages)
            encode = ReplyEncoder(maker, messages)
            with _as_failure("the chat template cannot render a tool's reply"):
                told = maker.readable(messages)
                reply_ids = chat.reply_ids(turned.sample.ids, turn.message, told, schemas, encode)
            if len(reply_ids) >= self._room(prompt)[0]:
                return "context" if reason_if_full == "context" else "tool_budget"
            self._messages += messages
            num_before = len(prompt.ids) + len(self._ids)
            self._media = encode.media_behind(self._media or prompt.media, num_before, len(reply_ids))
            self._add(reply_ids)
            ticket = turned.ticket
        raise AssertionError("a rollout ends by its budget")

    def _room(self, prompt: Prompt) -> tuple[int, FinishReason]:
        """Tokens that may still come, and what it means if they run out."""
        left = self._maker.sampling.max_new_tokens - len(self._ids)
        longest = self._maker.prompt_maker.max_context
        if longest is not None and longest - len(prompt.ids) - len(self._ids) < left:
            return longest - len(prompt.ids) - len(self._ids), "context"
        return left, "length"

    async def _turn(self, prompt: Prompt, room: int, ticket: int | None, *, is_last: bool) -> TurnResult:
        seed = turn_seed(self._place.seed, self._num_turns)
        may_go_on = bool(self._toolbox.schemas) and not is_last
        media = self._media or prompt.media
        context = prompt.ids + self._ids
        turned = await Turn(Request(context, seed, room, continues=ticket, keep=may_go_on, media=media))
        self._num_turns += 1
        self._add(turned.sample.ids, turned.sample)
        return turned

    def _add(self, ids: list[int], sample: Sample | None = None) -> None:
        """Tokens, sampled ones if they come with their sample."""
        unknown = [NAN] * len(ids)
        self._ids = self._ids + ids
        self._sampled += [sample is not None] * len(ids)
        self._logprobs += unknown if sample is None or sample.logprobs is None else sample.logprobs
        self._entropies += unknown if sample is None or sample.entropies is None else sample.entropies

    # ------------------------------------------------------------------------------------ tools

    async def _replies(self, calls: Sequence[Call]) -> list[ToolReply]:
        """The answers to a message's calls, in their order."""
        options = self._maker.options.tools
        started = [self._toolbox.call(call, self._workers, options) for call in calls]
        replies: list[ToolReply] = self._note(await Replies(started)).results
        self._uses += [ToolUse(reply.name, reply.failed, reply.timed_out, reply.seconds) for reply in replies]
        return replies

    async def _wait_for(self, future: Future[Any]) -> Any:
        return self._note(await Replies([future])).results[0]

    def _note(self, waited: ToolWait) -> ToolWait:
        self._wait_s += waited.seconds
        self._hidden_s += waited.hidden_s
        return waited


def _conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's messages; one of the user's for an environment to fill if it has none. ValueError for a text."""
    prompt = row.get("prompt") or [{"role": "user", "content": ""}]
    if isinstance(prompt, str):
        raise ValueError(
            f"a row has the text prompt {prompt[:80]!r}, but tools and environments need conversations; make each "
            'prompt a list of messages: [{"role": "user", "content": ...}]'
        )
    return [dict(message) for message in prompt]


def _image_key(image: Any) -> Any:
    """Equal for what is known to be the same image before it is opened."""
    if isinstance(image, Mapping):
        return image.get("bytes"), image.get("path")
    # An object lives as long as the messages that are kept beside the prompt.
    return image if isinstance(image, (str, bytes)) else id(image)


def _message(reply: ToolReply, call: Call) -> dict[str, Any]:
    message = {"role": "tool", "name": reply.name, "content": reply.content}
    return message if call.id is None else {**message, "tool_call_id": call.id}
