"""A script over a bare `openai` client: `python examples/programs/openai_client.py MODEL OUTPUT_DIR`."""

from run import is_right, train


async def solve(row: dict, session) -> float:
    client = session.async_openai()
    messages = [{"role": "user", "content": row["question"]}]
    answer = await client.chat.completions.create(model=session.model, messages=messages, max_tokens=32)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": "Say only the number."})
    answer = await client.chat.completions.create(model=session.model, messages=messages, max_tokens=8)
    return is_right(answer.choices[0].message.content, row["answer"])


if __name__ == "__main__":
    train(solve)
