"""Builds the source of rollouts from the trainer's arguments: tools, environments, or a rollout function."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from inspect import signature
from typing import Any

from datasets import Dataset, IterableDataset

from groupgrad.chat import ChatFormat, PlainFormat
from groupgrad.concurrency.callables import is_async
from groupgrad.data.columns import is_transformed
from groupgrad.data.prompts import MESSAGES_REMEDY, PromptMaker
from groupgrad.engines.base import Engine, SamplingOptions
from groupgrad.envs.environments import ENV_COLUMN, Environments
from groupgrad.envs.tools import TOOLS_COLUMN, Tool, chosen_tools, make_tools
from groupgrad.rollout.agent import AgentOptions, AgentRollouts
from groupgrad.rollout.custom import CustomRollouts
from groupgrad.rollout.requests import RolloutSource
from groupgrad.rollout.single_turn import SingleTurnRollouts

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class RolloutComponents:
    """The checked parts that rollouts are made with; all empty for single-turn rollouts of the model alone."""

    function: Callable[..., Any] | None = None
    """The user's rollout function. It excludes the others."""
    tools: Sequence[Tool] = ()
    environments: Environments | None = None
    chat: ChatFormat | PlainFormat | None = None
    """Set if there are tools or environments."""
    program: Callable[..., Any] | None = None
    """The user's agent, a program that talks to an address. It excludes the others."""
    response_parser: Any = None
    """Reads the calls of a program's turns, where the syntax is not known."""

    @property
    def makes_prompts(self) -> bool:
        """Environments or a program begin conversations, so a row needs no prompt."""
        return self.environments is not None or self.program is not None

    @property
    def renders_prompts(self) -> bool:
        """Prompts go to the model as the data set has them."""
        return self.function is None and self.chat is None and self.program is None

    @property
    def reward_names(self) -> list[str]:
        """Classes of environments that compute rewards of their own, or the name of a program."""
        if self.program is not None:
            return [getattr(self.program, "__name__", type(self.program).__name__)]
        return [] if self.environments is None else self.environments.reward_names

    @property
    def columns_named(self) -> set[str]:
        """Data-set columns that rollouts are made of: those that name environments or tools, or that `reset` names."""
        of_tools = {TOOLS_COLUMN} if self.tools else set()
        return of_tools | (set() if self.environments is None else {ENV_COLUMN, *self.environments.columns_named})

    @property
    def reward_functions(self) -> list[Callable[..., Any]]:
        """The rewards of environments as functions, see `Environments.reward_functions`."""
        return [] if self.environments is None else self.environments.reward_functions

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
        program_options: dict[str, Any],
        seed: int,
        trainer: Any,
    ) -> RolloutSource:
        """The source that produces rollouts for each generation batch. A rollout function is called with `trainer`.

        ValueError if the options name a state, and there are no environments to have it.
        """
        if options.state is not None and self.environments is None:
            raise ValueError(
                f"advantage_settings names state={options.state!r}, an attribute of environments, but there is no "
                "environment_factory. Give one, or leave state out: turns then begin in equal states if the model has "
                "read the same"
            )
        if self.program is not None:
            from groupgrad.integrations.agents.rollouts import ProgramOptions, ProgramRollouts

            return ProgramRollouts(
                *(self.program, prompt_maker, engine, sampling, ProgramOptions(**program_options)),
                reward_name=self.reward_names[0],
                response_parser=self.response_parser,
                seed=seed,
            )
        if self.function is not None:
            return CustomRollouts(self.function, trainer, prompt_maker, sampling.eos_ids)
        if self.chat is None:
            return SingleTurnRollouts(prompt_maker, engine, sampling, seed=seed)
        eos_ids = dict.fromkeys((*sampling.eos_ids, *self.chat.end_ids))
        return AgentRollouts(
            prompt_maker,
            engine,
            replace(sampling, eos_ids=tuple(eos_ids)),
            PlainFormat(prompt_maker, eos_ids) if isinstance(self.chat, PlainFormat) else self.chat,
            tools=self.tools,
            environments=self.environments,
            options=options,
            seed=seed,
        )

    def check_dataset(self, dataset: Dataset | IterableDataset, argument: str) -> None:
        """Rejects a data set with rows that agents cannot be trained on.

        ValueError for prompts that are not conversations, and for rows that name an unknown environment or tool. Only
        the first row of a stream is checked.
        """
        first: dict[str, Any] = next(iter(dataset))
        if TOOLS_COLUMN in first and not self.tools and self.function is None and self.environments is None:
            logger.warning(
                "%s has the column '%s', and the trainer was given no tools, so the model sees none of them: pass the "
                "functions as tools=[...], of which the column names those of a row",
                argument,
                TOOLS_COLUMN,
            )
        if self.chat is None:
            return
        prompt = first.get("prompt")
        if isinstance(prompt, str):
            raise ValueError(
                f"{argument} has text prompts ({prompt[:80]!r}), but tools and environments need conversations; "
                f"{MESSAGES_REMEDY}"
            )
        if self.environments is not None:
            _check_each(dataset, argument, ENV_COLUMN, first, self.environments.spec_of)
        _check_each(dataset, argument, TOOLS_COLUMN, first, lambda row: chosen_tools(self.tools, row))


def _has_column(dataset: Dataset | IterableDataset, column: str) -> bool:
    """True if all values of a column can be read without its rows."""
    return isinstance(dataset, Dataset) and not is_transformed(dataset) and column in dataset.column_names


def _check_each(
    dataset: Dataset | IterableDataset,
    argument: str,
    column: str,
    first: dict[str, Any],
    check: Callable[[dict[str, Any]], object],
) -> None:
    """Calls `check` with the `column` of each row. Its ValueError gets the names of row and data set.

    Of a stream, and of a column that a user's transform makes, only the first row is checked.
    """
    rows: Iterable[dict[str, Any]] = [first]
    if _has_column(dataset, column):
        rows = ({column: value} for value in dataset[column])
    for number, row in enumerate(rows):
        try:
            check(row)
        except ValueError as error:
            raise ValueError(f"row {number} of {argument}: {error}") from error


def build_rollout_components(
    prompt_maker: PromptMaker,
    tools: Any = None,
    environment_factory: Any = None,
    rollout_func: Any = None,
    response_parser: Any = None,
    agent: Any = None,
    *,
    max_tool_calling_iterations: int | None = None,
    reuse_environments: bool | None = None,
) -> RolloutComponents:
    """Checks the trainer's arguments about rollouts and builds the components.

    An environment serves later rollouts too with `reuse_environments`; None: only if it has no `close`. ValueError or
    TypeError, before anything is sampled, for tools without hints or docstring, factories that fail, chat templates
    that cannot write tools down, and arguments that exclude each other.
    """
    call_settings = {
        "response_parser": response_parser,
        "max_tool_calling_iterations": max_tool_calling_iterations,
    }
    reuse = {"reuse_environments": reuse_environments}
    if agent is not None:
        given = {"tools": tools, "environment_factory": environment_factory, "rollout_func": rollout_func}
        _check_program(agent, [name for name, value in given.items() if value])
        parser = call_settings.pop("response_parser")
        _warn_unused({**call_settings, **reuse}, "an agent makes whole rollouts itself")
        return RolloutComponents(program=agent, response_parser=parser)
    if rollout_func is not None:
        _warn_unused({**call_settings, **reuse}, "a rollout_func makes whole rollouts itself")
        if tools or environment_factory:
            raise ValueError(
                "rollout_func makes whole rollouts itself, so tools and environment_factory cannot be given with it; "
                "leave them out and call the tools from rollout_func"
            )
        if not callable(rollout_func) or is_async(rollout_func):
            raise TypeError(f"rollout_func is {rollout_func!r}; give a plain function of (prompts, trainer)")
        return RolloutComponents(rollout_func)
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
        environments = Environments(environment_factory, shared_tools, reuse=reuse_environments)
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
            ending=prompt_maker.ending,
            keeps_special_tokens=prompt_maker.keeps_special_tokens,
        )
        on_error.pop_all()
    return RolloutComponents(tools=shared_tools, environments=environments, chat=chat)


def _check_program(agent: Any, others: Sequence[str]) -> None:
    """TypeError, ValueError or ImportError for an agent that cannot make rollouts."""
    if not callable(agent):
        raise TypeError(f"agent is a {type(agent).__name__}; give a function of (row, session), plain or async")
    if others:
        raise ValueError(f"agent makes whole rollouts itself, so {' and '.join(others)} cannot be given with it")
    try:
        signature(agent).bind({}, None)
    except TypeError as error:
        raise TypeError(f"agent must take two arguments, (row, session): {error}") from error
    except ValueError:  # some callables have no signature
        pass
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise ImportError(
            f"an agent talks to an address, which needs {' and '.join(missing)}: pip install groupgrad[agents]"
        )


def _warn_unused(settings: dict[str, Any], reason: str) -> None:
    """Warns of each setting that is given although it has no effect."""
    for name, value in settings.items():
        if value is not None:
            warnings.warn(f"{name} has no effect: {reason}")
