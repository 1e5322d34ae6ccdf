"""Environments of verifiers: their tasks as a data set, and an agent that plays and scores them through the address.

It needs the package `verifiers` from 0.4 on. Each rollout is an episode of the environment. The programs that play it
(verifiers calls them harnesses) ask verifiers' own server, which passes their requests to the address.
"""

from __future__ import annotations

import asyncio
import copy
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from groupgrad.integrations.agents.session import AgentSession


class Loaded(NamedTuple):
    """The arguments that an environment gives: `GRPOTrainer(agent=..., train_dataset=...)`."""

    dataset: Any
    """A `datasets.Dataset` with a row for each task: its data as JSON, in the column `task`."""
    agent: EnvironmentAgent


class EnvironmentAgent:
    """Plays the task of a row against a session's address, and returns its reward.

    The reward is the weighted one of the agent that is trained; several have their mean. What reward functions and
    metrics gave is logged under their names.
    """

    def __init__(self, environment: Any, name: str, sampling_args: Mapping[str, Any]):
        self.environment, self.__name__, self._sampling_args = environment, name, dict(sampling_args)
        self._services: WeakKeyDictionary[asyncio.AbstractEventLoop, _Service] = WeakKeyDictionary()

    async def __call__(self, row: Mapping[str, Any], session: AgentSession) -> float:
        """The reward of a row's task. RuntimeError for an episode that failed or was not scored in time."""
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        # verifiers reads keys from environment variables, and rollouts of one process need different ones. It sets the
        # header in which a request's API has the key; the address then finds the session by the other.
        keys = {"authorization": f"Bearer {session.api_key}", "x-api-key": session.api_key}
        client = EvalClientConfig(base_url=session.base_url, api_key_var="", headers=keys)
        context = ModelContext(session.model, client, SamplingConfig(**self._sampling_args))

        def check(trace: Any) -> None:
            if not trace.agent.trainable and trace.agent.config.client == client:
                raise ValueError(
                    f"its agent {trace.agent.name!r} is not trained, so the policy cannot play it; "
                    f"give it a model of its own: {trace.agent.name}={{'model': ..., 'client': ...}}"
                )

        service = self._services.setdefault(asyncio.get_running_loop(), _Service(self.environment))
        async with service as environment:
            episode = await environment.run_episode(self._task(row), context, on_trace=check)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if problem := _problem(environment, episode, trained):
            raise RuntimeError(f"the environment {self.__name__!r} failed: {problem}")
        numbers = defaultdict[str, list[float]](list)
        for trace in trained:
            scores = {name: reward.score for name, reward in trace.rewards.items()}
            for name, value in {**trace.metrics, **scores}.items():
                if value is not None:  # a metric that was not computed in time
                    numbers[name].append(value)
        for name, values in numbers.items():
            session.log_metric(name, fmean(values))
        return fmean(trace.reward for trace in trained)

    def _task(self, row: Mapping[str, Any]) -> Any:
        taskset = self.environment.taskset
        kind = type(taskset).task_type()
        return kind(kind.data_type().model_validate_json(row["task"]), taskset.config.task)


class _Service:
    """The servers of an environment, such as those of tools, which its rollouts on an event loop share.

    They run while a rollout is under way, and end between batches, since verifiers' own server keeps a client for each
    key that it has seen.
    """

    def __init__(self, environment: Any):
        self._environment = environment
        self._num_rollouts = 0
        self._up: asyncio.Task[tuple[Any, Any]] | None = None

    async def __aenter__(self) -> Any:
        self._num_rollouts += 1
        if self._up is None:
            self._up = asyncio.create_task(self._start())
        try:  # servers that do not start, which may take minutes to find out, fail all who wait for them
            environment, _ = await asyncio.shield(self._up)
        except BaseException:
            await self.__aexit__()
            raise
        return environment

    async def __aexit__(self, *_: object) -> None:
        self._num_rollouts -= 1
        if self._num_rollouts or self._up is None:
            return
        up, self._up = self._up, None
        if not up.cancel() and not up.cancelled() and up.exception() is None:
            await up.result()[1].__aexit__(None, None, None)

    async def _start(self) -> tuple[Any, Any]:
        environment = copy.copy(self._environment)  # it has what it shares as attributes, and may end while one starts
        serving = environment.serving()
        await serving.__aenter__()
        return environment, serving


def _problem(environment: Any, episode: Any, trained: list[Any]) -> str:
    """Why an episode has no reward; empty if it has one."""
    if not environment.complete(episode):
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        return f"{errors[-1].type}: {errors[-1].message}" if errors else "it gave no reason"
    if not trained:
        return "it trained no agent"
    late = [name for trace in trained for name, reward in trace.rewards.items() if reward is None]
    return f"its reward {late[0]!r} was not computed in time" if late else ""


def load(
    name: str,
    *,
    sampling_args: Mapping[str, Any] | None = None,
    select: Mapping[str, Any] | None = None,
    **config: Any,
) -> Loaded:
    """The environment of an installed task set.

    `config` has the fields of the environment's configuration, as verifiers names them: `taskset={"split": "train"}`,
    `agent={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}`, `id` for another environment than the task
    set's own. `select` chooses tasks (`limit`, `shuffle`, `include`, ...), and `sampling_args` go into each request,
    such as `max_tokens` of a turn.

    ImportError without verifiers or for a task set that is not installed. ValueError for a field that is not there, for
    `retries`, and for endless tasks without a `limit`.
    """
    try:
        from verifiers.v1 import AgentConfig, SelectConfig, load_environment, resolve_env_config
    except ImportError as error:
        raise ImportError(f"environments of verifiers need the package: pip install verifiers ({error})") from error
    from datasets import Dataset

    environment = load_environment(resolve_env_config({**config, "taskset": {**config.get("taskset", {}), "id": name}}))
    for part in (environment.config, *(value for _, value in environment.config if isinstance(value, AgentConfig))):
        if part.retries.max_retries or part.retries.rules:
            raise ValueError("retries would train on the tokens of failed attempts, with the reward of the last one")
    tasks = environment.taskset.select(SelectConfig(**select or {}))
    if not tasks.bounded:
        raise ValueError(f"{name} has endless tasks; select={{'limit': 1000}} takes the first ones")
    dataset = Dataset.from_list([{"task": task.data.model_dump_json()} for task in tasks])
    return Loaded(dataset, EnvironmentAgent(environment, name, sampling_args or {}))
