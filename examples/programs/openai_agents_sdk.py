"""Two agents of OpenAI's Agents SDK: `python examples/programs/openai_agents_sdk.py MODEL OUTPUT_DIR`.

Needs `pip install openai-agents`.
"""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from run import is_right, train

set_tracing_disabled(True)


async def solve(row: dict, session) -> float:
    model = OpenAIChatCompletionsModel(model=session.model, openai_client=session.async_openai())
    long, short = ModelSettings(max_tokens=32), ModelSettings(max_tokens=8)
    solver = Agent("Solver", instructions="Add up.", model=model, model_settings=long)
    checker = Agent("Checker", instructions="Say only the number.", model=model, model_settings=short)
    worked = await Runner.run(solver, row["question"])
    session.log_reward(0.1 * is_right(worked.final_output, row["answer"]), "on the way")
    checked = await Runner.run(checker, f"{row['question']} {worked.final_output}")  # another conversation
    return is_right(checked.final_output, row["answer"])


if __name__ == "__main__":
    train(solve)
