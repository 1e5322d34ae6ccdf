"""Rollouts that programs make: each one talks to an address, and the engine answers what it asks.

A rollout is a coroutine over the shared engine (`rollout/driver.py`) that runs the program on another thread or event
loop and takes its requests. Each branch of its conversations is a coroutine of its own, so that a program may ask for
several completions at once, and so that a branch keeps its keys and values in the engine until the rollout ends.
"""

# The way of a request, from the program to rows of a batch:
#
#   make_app                    server.py: reads the request into a `Question` for the session of its key
#   AgentSession.ask            session.py: queues it for the rollout
#   _Program.run, _take         finds the branch that it continues (`Conversations.find`), or begins one
#   _serve_branch, _answer      samples in the engine; `read_sample` makes the answer
#   Conversations.answered      appends the sampled ids to the branch
#   _Program._rollout           once the program has returned: all branches end to end, its reward
#   Batch.by_branch             batch.py: makes each branch a row for the forward pass

from __future__ import annotations

import functools
import hashlib
import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from groupgrad.chat.chat_format import ResponseParser
from groupgrad.concurrency.workers import Outcome, Workers
from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker
from groupgrad.data.values import copy_containers
from groupgrad.engines.base import Engine, Request, SamplingOptions
from groupgrad.integrations.agents.answers import read_sample
from groupgrad.integrations.agents.conversations import Continuation, Conversations, Formats
from groupgrad.integrations.agents.server import Address, make_app
from groupgrad.integrations.agents.session import AgentSession, Asking
from groupgrad.integrations.agents.wire import BadRequest, Question
from groupgrad.metrics import Metric, mean_of
from groupgrad.rollout.driver import AT_ONCE_S, Abandoned, Driver, sample_turn, wait_for
from groupgrad.rollout.requests import GenerationRequest, RolloutSource, versions_of
from groupgrad.rollout.statistics import ending_metrics
from groupgrad.types import Branch, FinishReason, Prompt, Reward, Rollout, Trace

logger = logging.getLogger(__name__)

NUM_THREADS = 1024
"""Programs that are plain functions and run at once; async ones are coroutines, without a limit."""


@dataclass(slots=True, frozen=True)
class ProgramOptions:
    """Limits of programs."""

    timeout_s: float = 600.0
    """Seconds that a rollout may take."""
    sampling: Literal["refuse", "policy", "request"] = "refuse"
    """How a request for another temperature or top-p than the policy's is treated: it is refused, sampled as the
    policy samples, or sampled at its own temperature."""


class ProgramRollouts(RolloutSource):
    """Calls `agent(row, session)` for each rollout and makes a row of what its requests sampled.

    `sampling.max_new_tokens` is the budget of each branch: the tokens behind its context, those of later messages
    included. A rollout whose program raises, runs out of time or asks for nothing ends as `error`, unless a budget was
    used up: then as `length`. ValueError for `request` with an engine that has one temperature for all.
    """

    def __init__(
        self,
        agent: Callable[..., Any],
        prompt_maker: PromptMaker,
        engine: Engine,
        sampling: SamplingOptions,
        options: ProgramOptions,
        *,
        reward_name: str,
        response_parser: ResponseParser | None = None,
        seed: int,
    ):
        self.agent, self.prompt_maker, self.engine = agent, prompt_maker, engine
        self.options, self.reward_name, self.seed = options, reward_name, seed
        self.formats = Formats(prompt_maker, sampling.eos_ids, response_parser)
        self.sampling = sampling
        if options.sampling == "request" and not engine.takes_temperatures:
            raise ValueError(
                f"agent_sampling='request' does not work with {type(engine).__name__}, which samples all requests at "
                f"one temperature; use groupgrad's own engine, or agent_sampling='policy'"
            )
        self.texts = CompletionTexts(prompt_maker.tokenizer, sampling.eos_ids, prompt_maker.keeps_special_tokens)
        self.workers = Workers(NUM_THREADS)
        self.sessions: dict[str, AgentSession] = {}
        """The open sessions by their keys."""
        self._address: Address | None = None
        self._said: set[str] = set()

    @property
    def is_exact(self) -> bool:
        """True if the engine's log-probs are those that training would compute."""
        return self.engine.is_exact

    @property
    def address(self) -> Address:
        """The address that sessions talk to, opened on first use."""
        if self._address is None:
            self._address = Address(make_app(self.sessions.get))
        return self._address

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number; all of them run side by side."""
        sampling = replace(self.sampling, **request.sampling)
        programs = [_Program(self, request, row, sampling) for row in request.rows]
        with self.engine.session(sampling) as session:
            driver = Driver(session, [program.run() for program in programs])
            for program in programs:
                program.driver = driver
            try:
                return driver.run()
            finally:  # where it raises, no program may wait for an answer
                for program in programs:
                    program.close()

    def open_session(self) -> AgentSession:
        """A session with a key of its own, until `close_session`."""
        session = AgentSession(self.address, secrets.token_urlsafe(24), self.options.timeout_s)
        self.sessions[session.api_key] = session
        return session

    def close_session(self, session: AgentSession) -> None:
        """Ends the use of a session's key."""
        self.sessions.pop(session.api_key, None)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Requests and branches of a rollout, the numbers that its program logged, and why rollouts ended."""
        traces = [rollout.trace for rollout in rollouts if rollout.trace is not None]
        count, logged = len(rollouts), defaultdict[str, list[float]](list)
        for trace in traces:
            for name, value in trace.numbers.items():
                logged[name].append(value)
        return {
            **ending_metrics(rollouts, ("eos", "length", "context", "error")),
            "rollouts/turns": mean_of(sum(trace.num_turns for trace in traces), count),
            "rollouts/branches": mean_of(sum(len(rollout.branches) for rollout in rollouts), count),
            **{
                f"rewards/{self.reward_name}/{name}": mean_of(sum(values), len(values))
                for name, values in logged.items()
            },
            **self.engine.metrics(),
        }

    def close(self) -> None:
        """Ends the address and the threads of programs. May be called any number of times."""
        if self._address is not None:
            self._address.close()
            self._address = None
        self.workers.close()

    def temperature(self, question: Question, sampling: SamplingOptions) -> float | None:
        """The temperature at which a request is sampled; None for the policy's.

        BadRequest, or one warning, for a request that asks for a distribution that it does not get. Libraries ask for a
        call by default, and take a turn without one; so that is a warning.
        """
        temperature: float | None = None
        if question.forces_calls:
            self._say_once(
                "tool_choice", "a request's tool_choice asks for a call, which a policy is not forced to make"
            )
        for name, wanted in question.wanted.items():
            of_policy = getattr(sampling, name)
            if abs(wanted - of_policy) <= 1e-9:
                continue
            if name == "temperature" and self.options.sampling == "request":
                temperature = wanted
                continue
            asked = f"a request asks for {name}={wanted:g}, and the policy samples at {name}={of_policy:g}"
            if self.options.sampling != "policy":
                honoured = "" if name == "top_p" else ", or 'request' to have the temperature honoured"
                raise BadRequest(
                    f"{asked}, by which it is trained. Leave {name} out of the request, or set "
                    f"agent_sampling='policy' to have such requests sampled as the policy samples{honoured}"
                )
            self._say_once(name, f"{asked}, which is what it gets (agent_sampling='policy')")
        return temperature

    def _say_once(self, name: str, text: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning("%s; said once", text)


class _Program:
    """One rollout under way."""

    driver: Driver[Any]

    def __init__(self, rollouts: ProgramRollouts, request: GenerationRequest, row: int, sampling: SamplingOptions):
        self._rollouts, self._sampling = rollouts, sampling
        self._row, self._group, self._step = row, row // request.num_generations, request.step
        self._data = request.rows_by_group[self._group]
        self._seed = request.seed_of(row, rollouts.seed)
        self._session = rollouts.open_session()
        self._conversations = Conversations(rollouts.formats)
        self._waiters: dict[int, Future[tuple[Asking, Continuation] | None]] = {}
        """The next request of each idle branch, by the branch's `id`."""
        self._askings: set[Asking] = set()
        """Those that branches answer at the moment."""
        self._ends: list[Future[None]] = []
        """One for each branch, done once it has ended."""
        self._asked: Counter[bytes] = Counter()
        """The number of requests for each context, by its digest."""
        self._has_ended = False
        self._ended_by: FinishReason | None = None
        self._wait_s = self._hidden_s = 0.0

    async def run(self) -> Rollout:
        """The finished rollout."""
        session, row = self._session, copy_containers(dict(self._data))
        call, limit_s = functools.partial(self._rollouts.agent, row, session), self._rollouts.options.timeout_s
        running = self._rollouts.workers.call(call, {}, timeout_s=limit_s, name=f"the agent of row {self._row}")
        running.add_done_callback(lambda _: session.end())
        while True:
            # A program that has asked waits for the answer itself, unless it asks several things at the same time.
            wait = await wait_for([session.next_asking()], quick_s=AT_ONCE_S if self._ends else math.inf)
            if wait.results[0] is None:
                break
            self._take(wait.results[0])
        self._has_ended = True
        self.close()
        for waiter in list(self._waiters.values()):
            waiter.set_result(None)
        await wait_for(self._ends, quick_s=0.0)
        return self._rollout(running.result())

    def close(self) -> None:
        """Ends the session: what its program still asks is refused, and what it has asked is sampled no further."""
        self._session.end()
        self._rollouts.close_session(self._session)
        for asking in self._askings:
            asking.refuse(BadRequest("this session has ended", status=409))

    def _take(self, asking: Asking) -> None:
        """Hands a question to the branch that it makes longer, or to a new one."""
        try:
            temperature = self._rollouts.temperature(asking.question, self._sampling)
            continuation = self._conversations.find(asking.question, temperature)
        except BadRequest as error:
            asking.refuse(error)
            return
        if continuation.is_longer:
            self._waiters.pop(id(continuation.branch)).set_result((asking, continuation))
        else:
            self._ends.append(Future())
            self.driver.spawn(self._serve_branch(asking, continuation, self._ends[-1]))

    async def _serve_branch(self, asking: Asking, continuation: Continuation, end: Future[None]) -> None:
        """Answers the questions of a branch until the rollout ends."""
        ticket: int | None = None
        while True:
            self._askings.add(asking)
            try:
                ticket = await self._answer(asking, continuation, ticket)
            except BadRequest as error:
                continuation.branch.is_asked = False
                asking.refuse(error)
            except Abandoned:  # by a client that went away, or because the session has ended: it leaves no trace
                continuation.branch.is_asked, ticket = False, None
            self._askings.discard(asking)
            if self._has_ended:
                break
            self._waiters[id(continuation.branch)] = waiter = Future()
            wait = await wait_for([waiter])
            if wait.results[0] is None:
                break
            self._wait_s += wait.seconds
            self._hidden_s += wait.hidden_s
            asking, continuation = wait.results[0]
        end.set_result(None)

    async def _answer(self, asking: Asking, continuation: Continuation, ticket: int | None) -> int | None:
        """Samples the answer to a question; the ticket by which the branch's next question continues it."""
        question, context = asking.question, continuation.ids
        budget, reason = self._budget(continuation, len(context))
        limit = min(budget, question.max_tokens or budget)
        digest = hashlib.blake2b(repr(context).encode(), digest_size=16).digest()
        self._asked[digest] += 1
        seed = answer_seed(self._seed, digest, self._asked[digest])
        request = Request(
            context,
            seed,
            limit,
            continues=ticket if continuation.is_longer else None,
            keep=True,
            temperature=continuation.temperature,
            stops=question.stop,
        )
        ticket, sample = await sample_turn(request, asking.answer)
        if asking.answer.done():  # its client has gone, or the session has ended
            raise Abandoned
        answered = read_sample(self._rollouts.formats, question, sample, len(context), digest.hex()[:12])
        if sample.finish_reason != "eos" and not answered.is_cut and limit == budget:
            self._ended_by = reason if sample.finish_reason == "length" else sample.finish_reason
        self._conversations.answered(continuation, question, sample, answered.ids, answered.message, self._step)
        self._session.num_answered = self._conversations.num_answered
        asking.reply(answered.answer)
        # An engine that samples behind a stop text retains other tokens than the turn has.
        return ticket if len(answered.ids) == len(sample.ids) else None

    def _budget(self, continuation: Continuation, num_read: int) -> tuple[int, FinishReason]:
        """Tokens that may be sampled, and the reason for which a turn that uses them up ends; BadRequest if none."""
        used = len(continuation.branch.ids) + len(continuation.between)
        budget = self._sampling.max_new_tokens - used
        reason: FinishReason = "length"
        max_context = self._rollouts.prompt_maker.max_context
        if max_context is not None and max_context - num_read < budget:
            budget, reason = max_context - num_read, "context"
        if budget < 1:
            self._ended_by = reason
            said = (
                f"the conversation has used up its {self._sampling.max_new_tokens} tokens (max_completion_length)"
                if reason == "length"
                else f"the conversation has {num_read} tokens, and the model has {max_context} positions"
            )
            raise BadRequest(said, code="context_length_exceeded")
        return budget, reason

    def _rollout(self, outcome: Outcome) -> Rollout:
        """The row of all branches, and the reward that the program gave."""
        branches = [branch for branch in self._conversations.branches if branch.ids]
        problem, reason = self._ending(outcome, bool(branches))
        reward: Reward = None
        numbers: dict[str, float] = {}
        if reason != "error":
            order = [number for branch in branches for number in branch.requests]
            try:
                value = None if outcome.error is not None else outcome.value
                reward, numbers = self._session.rewards(value, order)
            except TypeError as error:
                problem, reason = str(error), "error"
        starts = [0, *accumulate(len(branch.ids) for branch in branches)]
        first, said = branches[0].messages if branches else [], self._conversations.last
        num_shared = next((i for i, (a, b) in enumerate(zip(first, said)) if a != b), min(len(first), len(said)))
        ids, versions = _joined(branches, "ids"), _joined(branches, "versions")
        temperatures = _joined(branches, "temperatures")
        # A program that completes plain text has no messages; its prompt is the data set's.
        row = {**self._data, "prompt": first or self._data.get("prompt", "")}
        (text,) = self._rollouts.texts([ids])
        return Rollout(
            prompt=Prompt(branches[0].context if branches else [], row, self._group),
            index=self._row,
            completion_ids=ids,
            finish_reason=reason,
            completion=text if isinstance(row["prompt"], str) else said[num_shared:],
            text=text,
            sampled=_joined(branches, "sampled"),
            sampling_logprobs=_joined(branches, "logprobs"),
            sampling_entropy=_joined(branches, "entropies"),
            temperatures=None if all(map(math.isnan, temperatures)) else temperatures,
            **versions_of(versions, self._step),
            environment_rewards={self._rollouts.reward_name: reward},
            branches=tuple(Branch(start, tuple(b.context)) for start, b in zip(starts[1:], branches[1:])),
            trace=Trace(self._conversations.num_answered, [], self._wait_s, self._hidden_s, problem, numbers),
        )

    def _ending(self, outcome: Outcome, has_tokens: bool) -> tuple[str, FinishReason]:
        """The error of the program, empty without one, and the reason why the rollout ended."""
        problem = "" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        if outcome.timed_out:
            problem = f"the agent had not returned after agent_timeout_s={self._rollouts.options.timeout_s:g} seconds"
        if has_tokens and self._ended_by is not None and not outcome.timed_out:
            return problem, self._ended_by
        if problem or not has_tokens:
            return problem or "the agent returned without a request that was answered", "error"
        return "", "eos"


def _joined(branches: Sequence[Any], name: str) -> list[Any]:
    return [value for branch in branches for value in getattr(branch, name)]


def answer_seed(seed: int, digest: bytes, number: int) -> int:
    """Seed of an answer's random stream, by what it continues: the order of parallel requests does not matter."""
    named = hashlib.blake2b(f"{seed}/{digest.hex()}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(named, "big") >> 1
