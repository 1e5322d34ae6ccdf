"""Tools, environments and rollout functions: what the constructor's arguments for them stand for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset

from groupgrad.chat import ChatFormat, PlainFormat
from groupgrad.concurrency.callables import is_async
from groupgrad.data.prompts import PromptMaker, drop_empty_fields
from groupgrad.engines.base import Engine, SamplingOptions
from groupgrad.envs.environments import ENV_COLUMN, Environments
from groupgrad.envs.tools import Tool, make_tools
from groupgrad.rollout.agent import AgentOptions, AgentRollouts
from groupgrad.rollout.base import RolloutSource
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.single_turn import SingleTurnRollouts


@dataclass(slots=True, frozen=True)
class RolloutComponents:
    """Who makes the rollouts: a user's function, an agent with tools and environments, or else the model alone."""

    function: Callable[..., Any] | None = None
    tools: Sequence[Tool] = ()
    environments: Environments | None = None
    chat: ChatFormat | PlainFormat | None = None
    """Set if there are tools or environments."""

    @property
    def reward_names(self) -> list[str]:
        """Kinds of environments that give rewards of their own."""
        return [] if self.environments is None else self.environments.reward_names

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the tools that a rollout has, where all have the same; else of the kind of environment with most words."""
        if self.environments is None:
            return [tool.schema for tool in self.tools]
        return max(self.environments.schemas.values(), key=lambda schemas: len(str(schemas)))

    @contextmanager
    def closed_on_errors(self) -> Iterator[None]:
        """Environments are closed if anything is raised inside."""
        try:
            yield
        except BaseException:
            if self.environments is not None:
                self.environments.close()
            raise

    def source(
        self,
        engine: Engine,
        prompt_maker: PromptMaker,
        sampling: SamplingOptions,
        options: AgentOptions,
        *,
        seed: int,
        trainer: Any,
    ) -> RolloutSource:
        """The source that a generation batch asks for its rollouts; `trainer` is passed to a rollout function."""
        if self.function is not None:
            return CustomRollouts(self.function, trainer, prompt_maker, sampling.eos_ids)
        if self.chat is None:
            return SingleTurnRollouts(prompt_maker, engine, sampling, seed=seed)
        end_ids = dict.fromkeys((*sampling.eos_ids, *self.chat.end_ids))
        return AgentRollouts(
            prompt_maker,
            engine,
            replace(sampling, eos_ids=tuple(end_ids)),
            self.chat,
            tools=self.tools,
            environments=self.environments,
            options=options,
            seed=seed,
        )

    def check_dataset(self, dataset: Any, argument: str, max_context: int | None) -> None:
        """Refuse a data set that agents cannot be trained on: ValueError for prompts that are no conversations, for
        rows of unknown environments, and if the longest prompt with the tools' descriptions leaves no room for a
        completion. Of a stream only the first row is looked at."""
        if self.chat is None or not isinstance(dataset, (Dataset, IterableDataset)):
            return
        first = next(iter(dataset), None)
        prompt = None if first is None else first.get("prompt")
        if isinstance(prompt, str):
            raise ValueError(
                f"{argument} has text prompts ({prompt[:80]!r}), but tools and environments need conversations; make "
                'each prompt a list of messages: [{"role": "user", "content": ...}]'
            )
        if self.environments is not None and first is not None:
            kinds = [first] if isinstance(dataset, IterableDataset) else _kinds(dataset)
            for row in kinds:
                self.environments.release(self.environments.acquire(row))
        if prompt is not None and max_context is not None:
            prompts = [prompt] if isinstance(dataset, IterableDataset) else dataset["prompt"]
            longest = max(prompts, key=lambda messages: sum(len(str(message)) for message in messages))
            self._check_length(longest, argument, max_context)

    def _check_length(self, prompt: list[dict[str, Any]], argument: str, max_context: int) -> None:
        assert self.chat is not None
        schemas = self.schemas
        alone, whole = (len(self.chat.prompt_ids(drop_empty_fields(prompt), told)) for told in ([], schemas))
        if whole >= max_context:
            raise ValueError(
                f"the longest prompt of {argument} has {whole} tokens, {whole - alone} of which describe the "
                f"{len(schemas)} tools, but the model has {max_context} positions for prompt and completion together; "
                "describe the tools in fewer words, leave long rows out or use a model with a longer context"
            )


@dataclass(slots=True, frozen=True)
class AgentArguments:
    """The constructor's arguments that are about agents, as they were given."""

    tools: Any = None
    environment_factory: Any = None
    rollout_func: Any = None
    response_parser: Any = None
    max_tool_calling_iterations: int | None = None


def build_rollout_components(prompt_maker: PromptMaker, asked: AgentArguments) -> RolloutComponents:
    """The agency that the arguments ask for. ValueError or TypeError, before anything is sampled, for tools without
    hints or docstring, factories that fail, templates that cannot write tools down, and arguments that exclude each
    other."""
    tools, factory = asked.tools, asked.environment_factory
    if asked.rollout_func is not None:
        _warn_of_useless(asked, "a rollout_func makes whole rollouts itself")
        return RolloutComponents(_check_function(asked.rollout_func, tools=tools, environment_factory=factory))
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise TypeError(f"tools is a {type(tools).__name__}; give a list of functions")
    if not tools and factory is None:
        _warn_of_useless(asked, "there are no tools to call")
        return RolloutComponents()
    made = make_tools(tools or [])
    environments = None if factory is None else Environments(factory, made)
    schemas = [tool.schema for tool in made]
    if environments is not None:
        schemas = [schema for of_kind in environments.schemas.values() for schema in of_kind]
    if not schemas:
        _warn_of_useless(asked, "the environments have no methods that are tools")
        return RolloutComponents(environments=environments, chat=PlainFormat(prompt_maker))
    with RolloutComponents(environments=environments).closed_on_errors():
        chat = ChatFormat.of(
            prompt_maker.tokenizer,
            schemas=schemas,
            chat_template_kwargs=prompt_maker.chat_template_kwargs,
            response_parser=asked.response_parser,
            readable=prompt_maker.readable,
        )
    return RolloutComponents(tools=made, environments=environments, chat=chat)


def _warn_of_useless(asked: AgentArguments, reason: str) -> None:
    """Warn of what is given about calls of tools where there are none."""
    for name, value in (
        ("response_parser", asked.response_parser),
        ("max_tool_calling_iterations", asked.max_tool_calling_iterations),
    ):
        if value is not None:
            warnings.warn(f"{name} has no effect: {reason}")


def _check_function(function: Any, **others: Any) -> Callable[..., Any]:
    given = [name for name, value in others.items() if value]
    if given:
        raise ValueError(
            f"rollout_func and {' and '.join(given)} are given, but a rollout_func makes whole rollouts itself; leave "
            f"{' and '.join(given)} out and call the tools from rollout_func"
        )
    if not callable(function):
        raise TypeError(f"rollout_func is a {type(function).__name__}; give a function of (prompts, trainer)")
    if is_async(function):
        raise TypeError("rollout_func is async; give a plain function (it may run asyncio.run(...) itself)")
    return function


def _kinds(dataset: Dataset) -> list[dict[str, Any]]:
    """One row for each value of the column that names a row's environment."""
    if ENV_COLUMN not in dataset.column_names:
        return [{}]
    return [{ENV_COLUMN: value} for value in dataset.unique(ENV_COLUMN)]
