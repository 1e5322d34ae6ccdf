"""Answers requests at an address from one model, many at a time."""

from __future__ import annotations

import itertools
import logging
import socket
from dataclasses import replace
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.integrations.agents.answers import read_sample
from groupgrad.integrations.agents.rollouts import ProgramRollouts
from groupgrad.integrations.agents.server import Address, Traffic, make_app
from groupgrad.integrations.agents.session import Asking, Questions
from groupgrad.integrations.agents.wire import BadRequest, Question
from groupgrad.rollout.driver import AT_ONCE_S, Abandoned, Driver, sample_turn, wait_for
from groupgrad.rollout.requests import turn_seed

logger = logging.getLogger(__name__)


class ServedModel:
    """Samples what is asked at `address`, on the socket `listening`, with the engine of `rollouts`, until `close`.

    Requests of one temperature and top-p are sampled side by side and may arrive at any time; others wait until those
    under way have ended. A temperature of 0 is the most likely token. A request without a seed gets one of its own.
    Nothing is kept of a request. One that is not answered within `timeout_s` seconds gets an error and, like one whose
    client goes away, is sampled no further.
    """

    def __init__(self, rollouts: ProgramRollouts, key: str, listening: socket.socket, timeout_s: float = 600.0):
        self._rollouts, self._numbers = rollouts, itertools.count()
        self._questions, self._traffic = Questions(), Traffic()
        self._next: Asking | None = None
        self._sampling: tuple[float, Driver[None] | None] = (0.0, None)
        """Seconds of sampling by drivers that have ended, and the one that runs."""
        find = {key: self._questions}.get
        app = make_app(find, timeout_s=timeout_s, traffic=self._traffic, metrics=self._metrics_text)
        # Pages of any origin may ask from a browser, since what they ask needs the key.
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        self.address = Address(app, listening)

    def run(self) -> None:
        """Answers requests on this thread until `close`."""
        self._next = self._questions.next_asking().result()
        while self._next is not None:
            options = self._options(self._next.question)
            with self._rollouts.engine.session(options) as session:
                driver: Driver[None] = Driver(session, [])
                driver.rollouts.append(self._take(driver, self._next, options))
                self._sampling = (self._sampling[0], driver)
                driver.run()
                self._sampling = (self._sampling[0] + driver.engine_s, None)

    def close(self) -> None:
        """Ends `run` once what is under way has ended, and the address. May be called from any thread."""
        self._questions.end()
        self.address.close()

    async def _take(self, driver: Driver[None], asking: Asking, options: SamplingOptions) -> None:
        """Begins the answers to this question and to those that come, as long as they have the same options."""
        following: Asking | None = asking
        while following is not None and self._options(following.question) == options:
            driver.spawn(self._answer(following))
            following = (await wait_for([self._questions.next_asking()], quick_s=AT_ONCE_S)).results[0]
        self._next = following

    async def _answer(self, asking: Asking) -> None:
        question, formats, number = asking.question, self._rollouts.formats, next(self._numbers)
        if asking.answer.cancelled():  # it has waited too long
            return
        try:
            context = formats.prompt_ids(question)
            limit = self._limit(question, len(context))
            seed = turn_seed(self._rollouts.seed, number + 1) if question.seed is None else turn_seed(question.seed, 1)
            _, sample = await sample_turn(Request(context, seed, limit, stops=question.stop), asking.answer)
        except Abandoned:
            return
        except BadRequest as error:
            asking.refuse(error)
            return
        asking.reply(read_sample(formats, question, sample, len(context), f"{number:012x}").answer)

    def _options(self, question: Question) -> SamplingOptions:
        """The sampling options of a request."""
        wanted: dict[str, Any] = dict(question.wanted)
        if wanted.get("temperature") == 0.0:
            wanted = {"temperature": 1.0, "top_k": 1}
        return replace(self._rollouts.sampling, **wanted)

    def _limit(self, question: Question, num_read: int) -> int:
        """Tokens that a request may sample; BadRequest if the context has no room for one."""
        limit = question.max_tokens or self._rollouts.sampling.max_new_tokens
        max_context = self._rollouts.prompt_maker.max_context
        if max_context is None:
            return limit
        if num_read >= max_context:
            raise BadRequest(
                f"the conversation has {num_read} tokens, and the model has {max_context} positions",
                code="context_length_exceeded",
            )
        return min(limit, max_context - num_read)

    def _metrics_text(self) -> str:
        """Counts of requests and tokens so far, in Prometheus' text format."""
        traffic, (past_s, driver) = self._traffic, self._sampling
        seconds = past_s + (0.0 if driver is None else driver.engine_s)
        rows = [
            ("requests_answered_total", "Requests that were answered.", traffic.answered),
            ("requests_refused_total", "Requests that got an error.", traffic.refused),
            ("requests_under_way", "Requests that wait or are being sampled.", traffic.under_way),
            ("tokens_read_total", "Tokens of prompts of answered requests.", traffic.tokens_read),
            ("tokens_written_total", "Tokens of answers.", traffic.tokens_written),
            ("sampling_seconds_total", "Time that the engine has sampled.", seconds),
        ]
        return "".join(
            f"# HELP groupgrad_{name} {text}\n"
            f"# TYPE groupgrad_{name} {'counter' if name.endswith('_total') else 'gauge'}\n"
            f"groupgrad_{name} {value}\n"
            for name, text, value in rows
        )
