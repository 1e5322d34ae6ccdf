"""Builds the source of rollouts from the trainer's arguments: tools, environments, or a rollout function."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset, IterableDataset

from groupgrad.chat import ChatFormat, PlainFormat
from groupgrad.concurrency.callables import is_async
from groupgrad.data.columns import prompt_rows
from groupgrad.data.prompts import PromptMaker, drop_empty_fields
from groupgrad.engines.base import Engine, SamplingOptions
from groupgrad.envs.environments import ENV_COLUMN, Environments
from groupgrad.envs.tools import Tool, make_tools
from groupgrad.rollout.agent import AgentOptions, AgentRollouts
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.requests import RolloutSource
from groupgrad.rollout.single_turn import SingleTurnRollouts


@dataclass(slots=True, frozen=True)
class RolloutComponents:
    """The checked parts that rollouts are made with; all empty for single-turn rollouts of the model alone."""

    function: Callable[..., Any] | None = None
    """The user's rollout function. It excludes the others."""
    tools: Sequence[Tool] = ()
    environments: Environments | None = None
    chat: ChatFormat | PlainFormat | None = None
    """Set if there are tools or environments."""

    @property
    def reward_names(self) -> list[str]:
        """Classes of environments that compute rewards of their own."""
        return [] if self.environments is None else self.environments.reward_names

    @property
    def columns_named(self) -> set[str]:
        """Data-set columns that rollouts are made of: those that `reset` names, and the one that names environments."""
        return set() if self.environments is None else {ENV_COLUMN, *self.environments.columns_named}

    def close(self) -> None:
        """Closes the environments. May be called any number of times."""
        if self.environments is not None:
            self.environments.close()

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
        """The source that produces rollouts for each generation batch. A rollout function is called with `trainer`."""
        if self.function is not None:
            return CustomRollouts(self.function, trainer, prompt_maker, sampling.eos_ids)
        if self.chat is None:
            return SingleTurnRollouts(prompt_maker, engine, sampling, seed=seed)
        eos_ids = dict.fromkeys((*sampling.eos_ids, *self.chat.end_ids))
        return AgentRollouts(
            prompt_maker,
            engine,
            replace(sampling, eos_ids=tuple(eos_ids)),
            self.chat,
            tools=self.tools,
            environments=self.environments,
            options=options,
            seed=seed,
        )

    def check_dataset(self, dataset: Dataset | IterableDataset, argument: str, max_context: int | None) -> None:
        """Rejects a data set with rows that agents cannot be trained on.

        ValueError for prompts that are not conversations, for rows that name an unknown environment, and if the longest
        prompt with the descriptions of the tools leaves no room for a completion. Only the first row of a stream is
        checked.
        """
        if self.chat is None:
            return
        first: dict[str, Any] = next(iter(dataset))
        prompt = first.get("prompt")
        if isinstance(prompt, str):
            raise ValueError(
                f"{argument} has text prompts ({prompt[:80]!r}), but tools and environments need conversations; make "
                'each prompt a list of messages: [{"role": "user", "content": ...}]'
            )
        if self.environments is not None:
            rows = [first]
            if isinstance(dataset, Dataset) and ENV_COLUMN in first:
                rows = [{ENV_COLUMN: name} for name in dataset.unique(ENV_COLUMN)]
            for row in rows:
                self.environments.spec_of(row)
        if prompt is not None and max_context is not None:
            prompts = [row["prompt"] for row in prompt_rows(dataset)]
            longest = max(prompts, key=lambda messages: sum(len(str(message)) for message in messages))
            self._check_length(longest, argument, max_context)

    def _check_length(self, prompt: list[dict[str, Any]], argument: str, max_context: int) -> None:
        """ValueError if a prompt with the tools (of the most verbose environment) fills the model's context."""
        assert self.chat is not None
        schemas = [tool.schema for tool in self.tools]
        if self.environments is not None:
            schemas = max(self.environments.schemas.values(), key=lambda of_environment: len(str(of_environment)))
        without, total = (len(self.chat.prompt_ids(drop_empty_fields(prompt), tools)) for tools in ([], schemas))
        if total >= max_context:
            raise ValueError(
                f"the longest prompt of {argument} has {total} tokens, {total - without} of which describe the "
                f"{len(schemas)} tools, but the model has {max_context} positions for prompt and completion together; "
                "describe the tools in fewer words, leave long rows out or use a model with a longer context"
            )


@dataclass(slots=True, frozen=True)
class ToolUseOptions:
    """Options for calling tools and reusing environments."""

    max_tool_calling_iterations: int | None = None
    """Most turns with calls in a rollout; None: any number."""
    reuse_environments: bool | None = None
    """An environment serves later rollouts too; None: only if it has no `close`."""


def build_rollout_components(
    prompt_maker: PromptMaker,
    tools: Any = None,
    environment_factory: Any = None,
    rollout_func: Any = None,
    response_parser: Any = None,
    use: ToolUseOptions = ToolUseOptions(),
) -> RolloutComponents:
    """Checks the trainer's arguments about rollouts and builds the components.

    ValueError or TypeError, before anything is sampled, for tools without hints or docstring, factories that fail, chat
    templates that cannot write tools down, and arguments that exclude each other.
    """
    call_settings = {
        "response_parser": response_parser,
        "max_tool_calling_iterations": use.max_tool_calling_iterations,
    }
    reuse = {"reuse_environments": use.reuse_environments}
    if rollout_func is not None:
        _warn_unused({**call_settings, **reuse}, "a rollout_func makes whole rollouts itself")
        return RolloutComponents(_check_function(rollout_func, tools=tools, environment_factory=environment_factory))
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise TypeError(f"tools is a {type(tools).__name__}; give a list of functions")
    if not tools and environment_factory is None:
        _warn_unused({**call_settings, **reuse}, "there are no tools to call")
        return RolloutComponents()
    shared_tools = make_tools(tools or [])
    schemas = [tool.schema for tool in shared_tools]
    environments = None
    if environment_factory is None:
        _warn_unused(reuse, "there is no environment_factory")
    else:
        environments = Environments(environment_factory, shared_tools, reuse=use.reuse_environments)
        schemas = [schema for of_environment in environments.schemas.values() for schema in of_environment]
    if not schemas:
        _warn_unused(call_settings, "the environments have no methods that are tools")
        return RolloutComponents(environments=environments, chat=PlainFormat(prompt_maker))
    with ExitStack() as on_error:
        if environments is not None:
            on_error.callback(environments.close)
        chat = ChatFormat(
            prompt_maker.tokenizer,
            schemas=schemas,
            chat_template_kwargs=prompt_maker.chat_template_kwargs,
            response_parser=response_parser,
            prepare_messages=prompt_maker.template_messages,
        )
        on_error.pop_all()
    return RolloutComponents(tools=shared_tools, environments=environments, chat=chat)


def _warn_unused(settings: dict[str, Any], reason: str) -> None:
    """Warns of each setting that is given although it has no effect."""
    for name, value in settings.items():
        if value is not None:
            warnings.warn(f"{name} has no effect: {reason}")


def _check_function(function: Any, **others: Any) -> Callable[..., Any]:
    """The rollout function. ValueError or TypeError if it cannot be used, or not together with `others`."""
    excluded = " and ".join(name for name, value in others.items() if value)
    if excluded:
        raise ValueError(
            f"rollout_func and {excluded} are given, but a rollout_func makes whole rollouts itself; leave {excluded} "
            "out and call the tools from rollout_func"
        )
    if not callable(function):
        raise TypeError(f"rollout_func is a {type(function).__name__}; give a function of (prompts, trainer)")
    if is_async(function):
        raise TypeError("rollout_func is async; give a plain function (it may run asyncio.run(...) itself)")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return function
    try:
        signature.bind([], None)
    except TypeError as error:
        raise TypeError(
            f"rollout_func takes {signature}, but it is called with the prompts and the trainer ({error}); give a "
            "function of (prompts, trainer)"
        ) from error
    return function
