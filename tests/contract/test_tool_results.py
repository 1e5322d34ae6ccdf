"""Tools' results reach reward functions in the form that TRL gives them, and the model as text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from datasets import Dataset
from scripted_agents import SEED, PlayingEngine, call, with_tools

STATE: list[tuple[str, int]] = [("a", 1), ("b", 2)]
CASES: dict[str, tuple[Any, str]] = {  # what the tool returns, and what the model reads
    "rows": (STATE, '[["a", 1], ["b", 2]]'),
    "nested": ([[1, None], {"x": True}], '[[1, null], {"x": true}]'),
    "blocks": ([{"type": "text", "text": "one"}], "one"),
    "empty": ([], "[]"),
    "text": ("plain", "plain"),
    "number": (30, "30"),
    "switch": (True, "true"),
    "nothing": (None, "null"),
    "record": ({"t": 21.5, "ok": True}, '{"t": 21.5, "ok": true}'),
    "pair": ((1, 2), "[1, 2]"),
    "long": ("x" * 400, "x" * 300 + "\n[cut: 300 characters of 400 shown]"),
}
RESULTS = {name: result for name, (result, _) in CASES.items()}
READ = {name: text for name, (_, text) in CASES.items()}


def look_up(key: str) -> Any:
    """Looks a value up.

    Args:
        key: Its name.
    """
    if key == "after":
        STATE.append(("c", 3))
    return RESULTS[key]


def test_results_reach_reward_functions_as_in_trl(
    tmp_path: Path, make_model: Any, tokenizer: Any, make_agents: Any, use_engine: Any, caplog: Any
) -> None:
    """A list is a list, and anything else `str` of it. The model reads JSON, which is in the logs too."""
    turns = [call("look_up", key=key) for key in (*RESULTS, "after", "unknown")]
    malformed = '<tool_call>{"name": "look_up", "arguments": </tool_call>'
    engine = PlayingEngine(with_tools(tokenizer), {row: [*turns, malformed, "done"] for row in range(2)})
    use_engine(engine)
    seen: list[list[Any]] = []

    def reward(completions: Any, **kwargs: Any) -> list[float]:
        for messages in completions:
            seen.append([message["content"] for message in messages if message["role"] == "tool"])
            seen[-1][0].append("changed by the function")
        return [0.0, 1.0]

    expected = [
        value if isinstance(value, list) else str(value)
        for value in (list(v) if v is STATE else v for v in RESULTS.values())
    ]
    config = {
        "seed": SEED,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4000,
        "tool_max_result_chars": 300,
    }
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "go"}]}])
    model = make_model(max_position_embeddings=8192)
    trainer = make_agents(config, model=model, reward_funcs=[reward, reward], train_dataset=rows, tools=[look_up])
    experiences: list[Any] = []
    trainer.on_experience = experiences.append
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert len(seen) == 4
    expected[list(RESULTS).index("long")] = READ["long"]
    for contents in seen:
        assert contents[0].pop() == "changed by the function"
        assert contents[: len(expected)] == expected
        assert isinstance(contents[0][0], tuple)
        assert contents[len(expected) : -1] == ["Error: KeyError: 'after'", "Error: KeyError: 'unknown'"]
    read = tokenizer.decode(engine.asked[-1].prompt_ids)
    assert [f"<tool>{text}<" in read for text in READ.values()] == [True] * len(READ)
    assert (
        caplog.text.count("the text \"Error: KeyError: 'after'\"")
        == 1
        == caplog.text.count("where TRL gives {'error': ...}")
    )
    assert caplog.text.count("is malformed") == 1 == caplog.text.count("where TRL ends the rollout")
    (table,) = (tmp_path / "run" / "completions").glob("*.parquet")
    logged = Dataset.from_parquet(str(table))[0]["completion"]
    assert [m["content"] for m in logged if m["role"] == "tool"][: len(READ)] == [*READ.values()]
