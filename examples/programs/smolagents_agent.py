"""An agent of smolagents that calls a tool: `python examples/programs/smolagents_agent.py MODEL OUTPUT_DIR`.

Needs `pip install smolagents`. Its prompt describes the tools, and `parse` reads calls where the model's chat template
has none.
"""

import json
import re

from run import is_right, train
from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def parse(text: str, ids: list[int]) -> dict:
    called = re.search(r'\{\s*"name".*\}', text, re.DOTALL)
    return {"content": "" if called else text, "tool_calls": [json.loads(called[0])] if called else []}


def solve(row: dict, session) -> float:
    model = OpenAIModel(session.model, api_base=session.base_url, api_key=session.api_key)
    agent = ToolCallingAgent([add], model, max_steps=2, verbosity_level=0)
    return is_right(agent.run(row["question"]), row["answer"])


if __name__ == "__main__":
    train(solve, parse, max_completion_length=128)
