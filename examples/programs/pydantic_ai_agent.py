"""An agent of Pydantic AI: `python examples/programs/pydantic_ai_agent.py MODEL OUTPUT_DIR`.

Needs `pip install 'pydantic-ai-slim[openai]'`.
"""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from run import is_right, train


async def solve(row: dict, session) -> float:
    provider = OpenAIProvider(openai_client=session.async_openai())
    model = OpenAIChatModel(session.model, provider=provider)
    agent = Agent(model, instructions="Add up.", model_settings={"max_tokens": 32})
    worked = await agent.run(row["question"])
    checked = await agent.run("Say only the number.", message_history=worked.all_messages())
    return is_right(checked.output, row["answer"])


if __name__ == "__main__":
    train(solve)
