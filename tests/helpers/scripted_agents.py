"""Agents in tests: a tokenizer whose template has tools, and an engine that plays a script by row and turn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupgrad.chat import ChatFormat
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import BatchEngine, Request, Sample, SamplingOptions
from groupgrad.envs.environments import Environments
from groupgrad.envs.tools import ToolOptions, make_tools
from groupgrad.rollout.agent import AgentOptions, AgentRollouts
from groupgrad.rollout.requests import GenerationRequest, row_seed, turn_seed

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ eos_token }}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 1
SEED = 7


def with_tools(tokenizer: Any) -> Any:
    """The tokenizer with a template that renders tools, calls and replies."""
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def call(name: str, **arguments: Any) -> str:
    """A call as the template writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class PlayingEngine(BatchEngine):
    """Samples the text `script[r][t]` for turn t of row r, with EOS unless it ends in "..." or the budget is used up.

    `asked` has all requests. Log-probs are -0.5, entropies 0.25.
    """

    is_exact = True

    def __init__(self, tokenizer: Any, script: Mapping[int, Sequence[str]], phase: str = "train", number: int = 0):
        self._tokenizer = tokenizer
        self._texts = {
            turn_seed(row_seed(SEED, phase, number, row), turn): text
            for row, texts in script.items()
            for turn, text in enumerate(texts)
        }
        self.asked: list[Request] = []
        self.options: SamplingOptions | None = None

    def sample(self, requests: Sequence[Request], options: SamplingOptions) -> list[Sample]:
        self.asked += requests
        self.options = options
        return [self._sample(request) for request in requests]

    def _sample(self, request: Request) -> Sample:
        text = self._texts[request.seed]
        is_truncated = text.endswith("...")
        ids = self._tokenizer(text.removesuffix("..."), add_special_tokens=False)["input_ids"]
        ids = ids if is_truncated else [*ids, EOS]
        reason = "length" if is_truncated or len(ids) > request.max_new_tokens else "eos"
        ids = ids[: request.max_new_tokens]
        return Sample(ids, reason, [-0.5] * len(ids), [0.25] * len(ids))


def make_agents(
    engine: Any,
    tokenizer: Any,
    tools: Sequence[Any] = (),
    environment: Any = None,
    *,
    budget: int = 1000,
    max_context: int | None = None,
    max_tool_calling_iterations: int | None = None,
    ahead: int = 0,
    state: str | None = None,
    maker: PromptMaker | None = None,
    **limits: Any,
) -> AgentRollouts:
    """Rollouts of agents over the engine."""
    maker = maker or PromptMaker(tokenizer, None, max_context)
    shared_tools = make_tools(list(tools))
    environments = None if environment is None else Environments(environment, shared_tools, reuse=True)
    schemas = [tool.schema for tool in shared_tools]
    if environments is not None:
        schemas = [schema for of_environment in environments.schemas.values() for schema in of_environment]
    return AgentRollouts(
        maker,
        engine,
        SamplingOptions(budget, eos_ids=(EOS,)),
        ChatFormat(tokenizer, schemas=schemas, prepare_messages=maker.template_messages),
        tools=shared_tools,
        environments=environments,
        options=AgentOptions(max_tool_calling_iterations, ToolOptions(**limits), ahead, state),
        seed=SEED,
    )


def ask(
    rows_by_group: Mapping[int, dict[str, Any]], size: int = 1, number: int = 0, phase: str = "train"
) -> GenerationRequest:
    """A generation batch of all rows of these groups, on one rank."""
    rows = [group * size + i for group in rows_by_group for i in range(size)]
    return GenerationRequest(rows_by_group, rows, len(rows), size, phase, number, 3)


def user(text: str, **columns: Any) -> dict[str, Any]:
    """A row with a conversation of one message."""
    return {"prompt": [{"role": "user", "content": text}], **columns}
