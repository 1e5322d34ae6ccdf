"""A graph of LangGraph that asks the model twice: `python examples/programs/langgraph_agent.py MODEL OUTPUT_DIR`.

Needs `pip install langgraph langchain-openai`.
"""

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from run import is_right, train


async def solve(row: dict, session) -> float:
    model = ChatOpenAI(
        model=session.model, base_url=session.base_url, api_key=session.api_key, max_completion_tokens=32, max_retries=0
    )

    async def answer(state: MessagesState) -> dict:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def insist(state: MessagesState) -> dict:
        return {"messages": [("user", "Say only the number.")]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("insist", insist)
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", lambda state: "insist" if len(state["messages"]) < 3 else END)
    graph.add_edge("insist", "answer")
    done = await graph.compile().ainvoke({"messages": [("user", row["question"])]})
    return is_right(done["messages"][-1].content, row["answer"])


if __name__ == "__main__":
    train(solve)
