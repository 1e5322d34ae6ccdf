"""Agents: rollouts of several turns, with tools and environments between them.

Each rollout is a coroutine (`_Agent.run`) over the shared engine (`driver.py`): it resets its environment, makes its
prompt, and alternates turns of the model with replies of tools until there is a reason to end. The tokens of a turn are
kept as sampled; the tokens of a reply are those that the chat template puts between two turns. Nothing is decoded and
tokenised again.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from groupgrad.chat import ChatFormat, PlainFormat, ToolCall, Turn
from groupgrad.concurrency.workers import Workers
from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import MESSAGES_REMEDY, PromptMaker
from groupgrad.engines.base import Engine, Request, Sample, SamplingOptions
from groupgrad.envs.environments import EnvHandle, Environments, add_observation
from groupgrad.envs.tools import Tool, ToolBox, ToolOptions, ToolReply, chosen_tools
from groupgrad.metrics import Metric
from groupgrad.multimodal.vlm_prompts import ToolReplyEncoder, open_reply_images
from groupgrad.rollout.driver import Driver, sample_turn, wait_for
from groupgrad.rollout.requests import GenerationRequest, RolloutSource, turn_seed, versions_of
from groupgrad.rollout.single_turn import completion_budget
from groupgrad.rollout.statistics import agent_metrics
from groupgrad.types import FinishReason, Media, Prompt, Reward, Rollout, ToolUse, Trace

logger = logging.getLogger(__name__)

NAN = float("nan")

_DIFFERENCES = {
    "failed": "a call of the tool '%s' failed, and model and reward functions get the text %r as its result, where TRL "
    "gives {'error': ...}; said once (docs/from-trl.md)",
    "malformed": "a call of the tool '%s' is malformed, and the model is told so (%r) and goes on, where TRL ends the "
    "rollout; said once (docs/from-trl.md)",
}
"""What is said at the first call of each kind."""


@dataclass(slots=True, frozen=True)
class AgentOptions:
    """Limits of agents."""

    max_tool_calling_iterations: int | None = None
    """Turns of a rollout whose calls are answered; None: as many as its token budget allows."""
    tools: ToolOptions = field(default_factory=ToolOptions)
    ahead: int = 0
    """Generation batches that may be sampled before an earlier one has been scored."""
    state: str | None = None
    """Attribute of an environment that is read before each turn."""


class AgentRollouts(RolloutSource):
    """Produces rollouts of several turns.

    All rollouts share `tools`; each has an environment of its own. The completion of a rollout is everything after its
    prompt, and its budget, `sampling.max_new_tokens`, counts the tokens of tools too. A rollout whose environment fails
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
        self.texts = CompletionTexts(prompt_maker.tokenizer, sampling.eos_ids, prompt_maker.keeps_special_tokens)
        self.tools, self.environments = tuple(tools), environments
        by_environment = [[tool.schema for tool in tools]] if environments is None else environments.schemas.values()
        self._tool_names = {schema["function"]["name"] for schemas in by_environment for schema in schemas}
        self.workers = Workers(options.tools.num_threads)
        self._handles: dict[tuple[str, int], list[EnvHandle]] = {}
        """Acquired environments by phase and number of their generation batch."""
        self._said: set[str] = set()

    @property
    def is_exact(self) -> bool:
        """True if the engine's log-probs are those that training would compute."""
        return self.engine.is_exact

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number; all of them run side by side."""
        self._release_scored(request)
        shared_prompts: dict[Any, tuple[Prompt, Any]] = {}
        agents = [_Agent(self, request, row, self._acquire(request, row), shared_prompts) for row in request.rows]
        with self.engine.session(replace(self.sampling, **request.sampling)) as session:
            return Driver(session, [agent.run() for agent in agents]).run()

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Calls, failures, latencies, turns and waiting times, why rollouts ended, and how the engine sampled."""
        return agent_metrics(rollouts, self._tool_names, self._finish_reasons) | self.engine.metrics()

    @property
    def _finish_reasons(self) -> list[FinishReason]:
        """The reasons for which a rollout of these tools and limits may end."""
        reasons: list[FinishReason] = ["eos", "length", "error"]
        if self._tool_names:
            reasons.append("tool_budget")
            if self.options.max_tool_calling_iterations is not None:
                reasons.append("tool_limit")
        if self.prompt_maker.max_context is not None:
            reasons.append("context")
        return reasons

    def close(self) -> None:
        """Closes every environment and ends the threads of tools. May be called any number of times."""
        for batch in list(self._handles):
            self._release(batch)
        if self.environments is not None:
            self.environments.close()
        self.workers.close()

    def tell_differences(self, calls: Sequence[ToolCall], replies: Sequence[ToolReply]) -> None:
        """Says at the first failed and the first malformed call what reward functions get, which TRL has otherwise."""
        for call, reply in zip(calls, replies):
            if reply.failed:
                kind = "failed" if call.problem is None else "malformed"
                self.say_once(kind, _DIFFERENCES[kind], call.name, reply.content)

    def say_once(self, kind: str, text: str, *arguments: Any) -> None:
        """Warns of what may happen in every turn, once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(text, *arguments)

    def _acquire(self, request: GenerationRequest, row: int) -> EnvHandle | None:
        if self.environments is None:
            return None
        data = request.rows_by_group[row // request.num_generations]
        handle = self.environments.acquire(data)
        self._handles.setdefault((request.phase, request.number), []).append(handle)
        return handle

    def _release_scored(self, request: GenerationRequest) -> None:
        """Releases the environments that reward functions no longer use.

        Reward functions get the environments of a generation batch, so they stay acquired until it has been scored:
        evaluation batches until the next request, training batches until `ahead` further ones have begun. A batch with
        the number of this request is sampled again.
        """
        for phase, number in list(self._handles):
            is_scored = request.phase == "train" and number < request.number - self.options.ahead
            if phase != "train" or is_scored or (phase, number) == (request.phase, request.number):
                self._release((phase, number))

    def _release(self, batch: tuple[str, int]) -> None:
        assert self.environments is not None
        for handle in reversed(self._handles.pop(batch)):
            self.environments.release(handle)


class _RolloutFailed(Exception):
    """A rollout ends as `error`; the text is the reason."""


@contextmanager
def _fails_rollout(problem: str) -> Iterator[None]:
    """Turns any exception into `_RolloutFailed`: the text of one row or tool must not end the run."""
    try:
        yield
    except Exception as error:
        raise _RolloutFailed(f"{problem}: {type(error).__name__}: {error}") from error


class _Agent:
    """One rollout under way."""

    def __init__(
        self,
        rollouts: AgentRollouts,
        request: GenerationRequest,
        row: int,
        handle: EnvHandle | None,
        shared_prompts: dict[Any, tuple[Prompt, Any]],
    ):
        self._rollouts, self._prompt_maker, self._chat = rollouts, rollouts.prompt_maker, rollouts.chat
        self._workers, self._tool_options = rollouts.workers, rollouts.options.tools
        self._row, self._group, self._step = row, row // request.num_generations, request.step
        self._seed = request.seed_of(row, rollouts.seed)
        self._max_new_tokens = request.sampling.get("max_new_tokens", rollouts.sampling.max_new_tokens)
        self._data = request.rows_by_group[self._group]
        self._handle = handle
        self._toolbox = ToolBox(chosen_tools(rollouts.tools, self._data)) if handle is None else handle.toolbox
        self._shared_prompts = shared_prompts
        """The generation batch's prompts by group, text and images, each with the messages that it was made from."""
        self._ids: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._entropies: list[float] = []
        self._versions: list[int] = []
        self._messages: list[dict[str, Any]] = []
        self._results: dict[int, Any] = {}
        self._media: Media | None = None
        self._num_turns = 0
        self._states: list[str] = []
        self._tool_uses: list[ToolUse] = []
        self._wait_s = self._hidden_s = 0.0
        self._problem = ""

    async def run(self) -> Rollout:
        """The finished rollout."""
        messages = _conversation(self._data)
        prompt = Prompt([], {**self._data, "prompt": messages}, self._group)
        reason: FinishReason = "error"
        environment_rewards: dict[str, Reward] = {}
        try:
            prompt = await self._begin(messages)
            reason = await self._converse(prompt)
            environment_rewards = await self._environment_rewards()
        except _RolloutFailed as failure:
            self._problem = str(failure)
        return Rollout(
            prompt=prompt,
            index=self._row,
            completion_ids=self._ids,
            finish_reason=reason,
            completion=self._messages,
            text=self._rollouts.texts([self._ids])[0],
            sampled=self._sampled,
            sampling_logprobs=self._logprobs,
            sampling_entropy=self._entropies,
            **versions_of(self._versions, self._step),
            extra={} if self._handle is None else {"environments": self._handle.instance},
            tool_results=self._results,
            environment_rewards=environment_rewards,
            states=self._states if self._handle is not None and self._rollouts.options.state is not None else None,
            trace=Trace(self._num_turns, self._tool_uses, self._wait_s, self._hidden_s, self._problem),
            media=None if self._media is prompt.media else self._media,
        )

    async def _begin(self, messages: list[dict[str, Any]]) -> Prompt:
        """Resets the environment and makes the prompt, with the observation that `reset` returned."""
        with _fails_rollout("the images of the prompt cannot be had"):
            placed: Any = self._prompt_maker.prompt_with_images({**self._data, "prompt": messages}, opened=False)
        if self._handle is not None:
            reset = self._handle.reset(self._data, self._workers, self._tool_options.timeout_s)
            (outcome,) = await self._wait_for([reset])
            if outcome.error is not None:
                raise _RolloutFailed(str(outcome.error))
            placed = add_observation(placed, outcome.value)
        images = [_image_key(image) for image in self._prompt_maker.conversation_images(placed)]
        key = (self._group, str(self._prompt_maker.template_messages(placed)), *images)
        if key not in self._shared_prompts:
            self._shared_prompts[key] = (self._make_prompt(placed), placed)
        return self._shared_prompts[key][0]

    def _make_prompt(self, placed: list[dict[str, Any]]) -> Prompt:
        maker = self._prompt_maker
        with _fails_rollout("the images of the prompt cannot be had"):
            messages: Any = maker.prompt_with_images({"prompt": placed}, opened=True)
        with _fails_rollout("the chat template cannot render the prompt"):
            text = self._chat.prompt_text(maker.template_messages(messages), self._toolbox.schemas)
            encoded = maker.encode(text, maker.conversation_images(messages))
        if maker.max_context is not None and len(encoded.ids) >= maker.max_context:
            raise _RolloutFailed(maker.too_long_message(messages, len(encoded.ids)))
        return Prompt(encoded.ids, {**self._data, "prompt": messages}, self._group, encoded.media)

    async def _converse(self, prompt: Prompt) -> FinishReason:
        """Alternates turns of the model and replies of tools until there is a reason to end."""
        max_iterations, schemas = self._rollouts.options.max_tool_calling_iterations, self._toolbox.schemas
        max_context = self._prompt_maker.max_context
        budget, reason_if_full = completion_budget(prompt, self._max_new_tokens, max_context)
        ticket: int | None = None
        for iteration in itertools.count():
            is_last = max_iterations is not None and iteration >= max_iterations
            may_continue = bool(schemas) and not is_last
            ticket, sample = await self._sample_turn(prompt, budget - len(self._ids), ticket, keep=may_continue)
            turn = self._chat.parse(sample.ids, schemas)
            if turn.problem is not None:
                self._problem = turn.problem
                self._rollouts.say_once("unreadable", "a turn could not be read; said once: %s", turn.problem)
            self._messages.append(turn.message)
            if sample.finish_reason == "length":
                return reason_if_full
            if not turn.calls or not schemas:
                return "eos"
            if is_last:
                return "tool_limit"
            if not await self._append_replies(prompt, turn, sample.ids, budget):
                return "context" if reason_if_full == "context" else "tool_budget"
        raise AssertionError("a rollout ends by its budget")

    async def _sample_turn(
        self, prompt: Prompt, max_new_tokens: int, ticket: int | None, *, keep: bool
    ) -> tuple[int, Sample]:
        """Samples a turn and appends its tokens. With `keep` the engine retains their keys and values."""
        if self._handle is not None and (state := self._rollouts.options.state) is not None:
            reading = self._handle.state(state, self._workers, self._tool_options.timeout_s)
            (outcome,) = await self._wait_for([reading])
            if outcome.error is not None:
                raise _RolloutFailed(str(outcome.error))
            self._states.append(outcome.value)
        seed = turn_seed(self._seed, self._num_turns)
        media = self._media or prompt.media
        request = Request(prompt.ids + self._ids, seed, max_new_tokens, continues=ticket, keep=keep, media=media)
        ticket, sample = await sample_turn(request)
        self._num_turns += 1
        self._append(sample.ids, sample)
        return ticket, sample

    async def _append_replies(self, prompt: Prompt, turn: Turn, turn_ids: list[int], budget: int) -> bool:
        """Answers a turn's calls and appends the replies. False, with nothing appended, if they do not fit."""
        maker = self._prompt_maker
        calls = [self._toolbox.call(call, self._workers, self._tool_options) for call in turn.calls]
        answered: list[ToolReply] = await self._wait_for(calls)
        repeat = self._toolbox.repeat_here
        replies = [repeat(call, reply, self._tool_options) for call, reply in zip(turn.calls, answered)]
        self._rollouts.tell_differences(turn.calls, replies)
        self._tool_uses += [ToolUse(reply.name, reply.failed, reply.timed_out, reply.seconds) for reply in replies]
        messages = [_message(reply, call) for reply, call in zip(replies, turn.calls)]
        if maker.conversation_images(messages):
            messages = open_reply_images(messages, maker.image_root)
        encoder = ToolReplyEncoder(maker, messages)
        with _fails_rollout("the chat template cannot render a tool's reply"):
            reply_ids = self._chat.reply_ids(turn_ids, maker.template_messages(messages), encoder)
        if len(reply_ids) >= budget - len(self._ids):
            return False
        for reply, message in zip(replies, messages):
            if isinstance(message["content"], str) and not reply.failed and reply.result != message["content"]:
                self._results[len(self._messages)] = reply.result
            self._messages.append(message)
        num_before = len(prompt.ids) + len(self._ids)
        self._media = encoder.media_with_reply(self._media or prompt.media, num_before, len(reply_ids))
        self._append(reply_ids)
        return True

    def _append(self, ids: list[int], sample: Sample | None = None) -> None:
        """Appends sampled tokens with their sample, or the tokens of a reply, whose log-probs and entropies are NaN."""
        unknown = [NAN] * len(ids)
        last = (self._versions or [self._step])[-1:]
        self._versions += last * len(ids) if sample is None else sample.policy_versions or [self._step] * len(ids)
        self._ids += ids
        self._sampled += [sample is not None] * len(ids)
        self._logprobs += unknown if sample is None or sample.logprobs is None else sample.logprobs
        self._entropies += unknown if sample is None or sample.entropies is None else sample.entropies

    async def _environment_rewards(self) -> dict[str, Reward]:
        """The environment's own reward by the name of its class; empty if it computes none."""
        if self._handle is None or not self._handle.spec.has_reward:
            return {}
        reward = self._handle.get_reward(self._workers, self._tool_options.timeout_s, self._num_turns)
        (outcome,) = await self._wait_for([reward], quick_s=0.0)
        if outcome.error is not None:
            self._problem = str(outcome.error)
            logger.warning("row %d gets no reward of its environment: %s", self._row, self._problem)
        return {self._handle.spec.reward_name: outcome.value}

    async def _wait_for(self, futures: Sequence[Future[Any]], *, quick_s: float = math.inf) -> list[Any]:
        wait = await wait_for(futures, quick_s=quick_s)
        self._wait_s += wait.seconds
        self._hidden_s += wait.hidden_s
        return wait.results


def _conversation(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's messages; without a prompt, an empty user message for an environment to fill. ValueError for a text."""
    prompt = row.get("prompt") or [{"role": "user", "content": ""}]
    if isinstance(prompt, str):
        raise ValueError(
            f"a row has the text prompt {prompt[:80]!r}, but tools and environments need conversations; "
            f"{MESSAGES_REMEDY}"
        )
    return [dict(message) for message in prompt]


def _image_key(image: Any) -> Any:
    """A key that is equal only for images known to be the same before they are opened."""
    if isinstance(image, Mapping):
        return image.get("bytes"), image.get("path")
    # The messages stored beside the prompt keep the object alive, so its id stays unique.
    return image if isinstance(image, (str, bytes)) else id(image)


def _message(reply: ToolReply, call: ToolCall) -> dict[str, Any]:
    message = {"role": "tool", "name": reply.name, "content": reply.content}
    return message if call.id is None else {**message, "tool_call_id": call.id}
