"""Agents on small local models: rewards, counts, options, and what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from scripted_agents import EOS, TEMPLATE, call

from groupgrad import GRPOTrainer
from groupgrad.rollout import driver


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CHAT = [{"prompt": [{"role": "user", "content": f"Increment by {i}."}]} for i in range(1, 9)]


def chats(*columns: dict[str, Any]) -> Dataset:
    """Conversations with further columns; those of one row stand for eight rows."""
    columns = columns * 8 if len(columns) == 1 else columns
    return Dataset.from_list([{**CHAT[place % 8], **row} for place, row in enumerate(columns)])


def increment(step: int) -> int:
    """Adds one.

    Args:
        step: A number.
    """
    return step + 1


class Counter:
    """Rewards twice its count; `closed` has the ids of closed instances."""

    closed: ClassVar[list[int]] = []

    def reset(self, **row: Any) -> None:
        self.value = 0

    def add(self, step: int) -> int:
        """Adds.

        Args:
            step: How much.
        """
        self.value += step
        return self.value

    async def get_reward(self) -> float:
        return 2.0 * self.value

    def close(self) -> None:
        Counter.closed.append(id(self))


def longer(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


# --- rewards, counts and options ---


def test_an_environments_own_reward_needs_no_function(train_agents: Any, calling: Any) -> None:
    calling(lambda n: call("add", step=n))
    trainer, log = train_agents(environment_factory=Counter)
    assert log["rewards/Counter/mean"] == log["reward"] > 0
    assert trainer.rewards.names == ["Counter"]
    _, log = train_agents({"reward_weights": [0.5]}, environment_factory=Counter, reward_funcs=longer)
    assert log["reward"] == pytest.approx(0.5 * log["rewards/longer/mean"] + log["rewards/Counter/mean"])


def test_the_rewards_of_environments_stay_in_an_evaluation_with_functions_of_its_own(
    make_agents: Any, calling: Any
) -> None:
    calling(lambda n: call("add", step=n))
    arguments = {"environment_factory": Counter, "reward_funcs": longer, "eval_dataset": chats({}, {})}
    shown = {}
    for functions in ([lambda completion_ids, **kwargs: [0.5] * len(completion_ids)], []):
        trainer = make_agents({"reward_weights": [9.0]}, **arguments, eval_reward_funcs=functions)
        metrics = trainer.evaluate()
        assert trainer.eval_rewards.names[-1] == "Counter" and trainer.rewards.names == ["longer", "Counter"]
        assert "eval_rewards/longer/mean" not in metrics
        shown[len(functions)] = metrics["eval_reward"], metrics["eval_rewards/Counter/mean"]
    assert shown[1][0] == shown[1][1] + 0.5 and shown[0][0] == shown[0][1] > 0


class Judged(Counter):
    def get_reward(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -1.0


def test_the_rewards_of_environments_are_the_last_functions(make_agents: Any) -> None:
    """As in TRL they can be called, score environments of their own class alone, and are async where the method is."""
    rows = chats(*({"environment": name} for name in "abab"))
    factories = {"a": Counter, "b": Judged}
    trainer = make_agents(environment_factory=factories, train_dataset=rows, reward_funcs=longer)
    environments = [Counter(), Judged(), Counter()]
    for environment in environments:
        environment.reset()
    environments[0].add(3)
    first, counted, judged = trainer.reward_funcs
    assert first is longer and trainer.reward_func_names == ["longer", "Counter", "Judged"]
    assert trainer.reward_processing_classes == [None, None, None] and len(trainer.reward_weights) == 3
    assert asyncio.run(counted(completions=[], environments=environments)) == [6.0, None, 0.0]
    assert judged(environments=environments, prompts=[]) == [None, -1.0, None]


def test_rows_come_in_waves_to_an_engine_that_samples_whole_batches(
    make_agents: Any, calling: Any, monkeypatch: Any
) -> None:
    """Two replies and an answer of 16 rows are three calls, though each tool answers at a time of its own."""
    monkeypatch.setattr(driver, "LEAST_PATIENCE_S", 2.0)  # a busy machine's threads are slow
    engine = calling(lambda n: call("pause", step=n), num_calls=2)

    def pause(step: int) -> int:
        """Waits.

        Args:
            step: For so long.
        """
        time.sleep(0.004 * step)
        return step

    config = {"per_device_train_batch_size": 16, "max_completion_length": 400}
    make_agents(config, tools=[pause], reward_funcs=longer).train()
    assert engine.rows_of_calls == [16, 16, 16]


def test_tool_tokens_are_not_counted(train_agents: Any, calling: Any) -> None:
    engine = calling(lambda n: call("increment", step=n))
    _, log = train_agents(tools=[increment], reward_funcs=longer)
    sampled = [len(call("increment", step=0)) + 1 + len("done") + 1] * 8
    assert log["completions/mean_length"] == sampled[0]
    prompts = [len(r.prompt_ids) for r in engine.asked if "<tool>" not in engine.tokenizer.decode(r.prompt_ids)]
    assert log["num_tokens"] == sum(prompts) + sum(sampled)
    assert '"function": {"name": "increment"' in engine.tokenizer.decode(engine.asked[0].prompt_ids)


def test_tool_calling_iterations_have_a_limit(train_agents: Any, calling: Any) -> None:
    calling(lambda n: call("increment", step=n), num_calls=9)
    config = {"max_tool_calling_iterations": 2, "mask_truncated_completions": True, "max_completion_length": 500}
    _, log = train_agents(config, tools=[increment], reward_funcs=longer)
    assert log["rollouts/turns"] == 3.0
    assert log["rollouts/tool_limit"] == log["completions/clipped_ratio"] == 1.0
    assert log["grad_norm"] == 0.0


def test_options_of_tools_reach_them(make_agents: Any, calling: Any) -> None:
    def slow(step: int) -> str:
        """Sleeps, or says much.

        Args:
            step: How long.
        """
        time.sleep(20 if step == 0 else 0)
        return "x" * 100

    calling(lambda n: call("slow", step=min(n, 1)))
    seen: list[str] = []

    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(messages[1]["content"] for messages in completions)
        return [float(len(messages[1]["content"])) for messages in completions]

    config = {"tool_timeout_s": 0.2, "tool_max_result_chars": 60, "tool_threads": 2, "max_steps": 2}
    trainer = make_agents(config, tools=[slow], reward_funcs=reward)
    assert trainer.components.collector.rollouts.workers._num_threads == 2  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    assert any("0.2 seconds" in text for text in seen)
    assert any("60 characters of 100" in text for text in seen)
    assert any(entry.get("tools/timeouts", 0) > 0 for entry in trainer.state.log_history)


def test_rollout_func_gets_the_trainer_and_its_fields_reach_the_rewards(make_agents: Any) -> None:
    seen: list[Any] = []

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        ids = [
            tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=True)["input_ids"] for p in prompts
        ]
        completions = [[*tokenizer("ab!cd")["input_ids"][: 2 + i % 4], EOS] for i in range(len(prompts))]
        return {
            "prompt_ids": ids,
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(c) for c in completions],
            "env_mask": [[1, 0] + [1] * (len(c) - 2) for c in completions],
            "won": [i % 2 for i in range(len(prompts))],
            "group_size": trainer.num_generations,
        }

    def reward(won: list[int], group_size: list[int], completion_ids: list[Any], **kw: Any) -> list[float]:
        seen.append((won, group_size))
        return [float(x) + 0.1 * len(ids) for x, ids in zip(won, completion_ids)]

    trainer = make_agents({"num_iterations": 2, "max_steps": 2}, rollout_func=rollout, reward_funcs=reward)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert seen == [([0, 1] * 4, [4] * 8)]
    log = trainer.state.log_history[0]
    assert log["completions/mean_length"] == sum(2 + i % 4 for i in range(8)) / 8
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))


def test_a_rollout_func_may_have_the_policy_sampled(make_agents: Any) -> None:
    """The trainer samples from the policy: different completions at each call, the same in another run."""
    answers: list[Any] = []

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        answers.append(trainer.sample_completions(prompts, max_new_tokens=5))
        return answers[-1]

    for _ in range(2):
        trainer = make_agents({"max_steps": 2}, rollout_func=rollout, reward_funcs=longer)
        trainer.train()
    first, second, *again = answers
    assert [first["completion_ids"], second["completion_ids"]] == [answer["completion_ids"] for answer in again]
    assert first["completion_ids"] != second["completion_ids"]
    assert len({tuple(ids) for ids in first["completion_ids"]}) == 8
    assert all(len(ids) <= 5 for ids in first["completion_ids"])
    assert first["prompt_ids"][0] == trainer.prompt_maker.token_ids(trainer.train_dataset[7]["prompt"])
    assert [len(values) for values in first["logprobs"]] == [len(ids) for ids in first["completion_ids"]]


def test_agents_are_evaluated_too_and_their_environments_closed(make_agents: Any, calling: Any) -> None:
    Counter.closed = closed = []
    calling(lambda n: call("add", step=n))
    trainer = make_agents(
        {"num_generations_eval": 2},
        environment_factory=Counter,
        eval_dataset=Dataset.from_list(CHAT[:4]),
    )
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == metrics["eval_rewards/Counter/mean"] > 0
    assert metrics["eval_tools/call_frequency"] == 1.0
    assert metrics["eval_rollouts/eos"] == 1.0
    assert len(closed) == len(set(closed)) == 8
    trainer.train()
    assert len(closed) == 16
    assert trainer.state.log_history[0]["tools/call_frequency"] == 1.0


def test_files_and_prints_tell_what_the_policy_a_tool_and_the_template_wrote(
    make_agents: Any, calling: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
):
    def looked_up(key: int) -> str:
        """Looks a key up.

        Args:
            key: The key.
        """
        return f"<b>{key} tool</b>"

    tokenizer = calling(lambda n: call("looked_up", key=n)).tokenizer
    settings = {"output_dir": str(tmp_path), "num_completions_to_print": 2}
    make_agents(settings, tools=[looked_up], reward_funcs=longer).train()
    assert "looked_up(key=" in capsys.readouterr().out
    (path,) = tmp_path.glob("completions/*.parquet")
    assert "looked_up" in json.dumps(pq.read_table(path).column("completion").to_pylist()[0])
    (path,) = tmp_path.glob("rollouts/*.parquet")
    for row in pq.read_table(path).to_pylist():
        reply = json.loads(row["completion"])[1]["content"]
        said = ["", ""]
        for is_sampled, token in zip(row["sampled"], row["tokens"], strict=True):
            said[is_sampled] += token
        ids = tokenizer(call("looked_up", key=int(reply[3])))["input_ids"]
        end = tokenizer.eos_token
        assert reply == f"<b>{reply[3]} tool</b>"
        assert said == [f"\n<tool>{reply}{end}\n<assistant>", tokenizer.decode(ids) + end + "done" + end]


def test_a_run_with_agents_goes_on_where_it_was_saved(make_agents: Any, calling: Any, tmp_path: Path) -> None:
    calling(lambda n: call("increment", step=n))
    config = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}
    whole = make_agents(config, tools=[increment], reward_funcs=longer)
    whole.train()
    again = make_agents(config, tools=[increment], reward_funcs=longer)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters()))


# --- errors before anything is sampled ---


TEXTS = Dataset.from_list([{"prompt": "1+1="}] * 8)
BAD: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ValueError: [
        ({"tools": [increment, increment]}, "two tools named 'increment'"),
        ({"tools": [increment], "train_dataset": TEXTS}, "text prompts.*conversations"),
        (
            {"environment_factory": {"a": Counter}, "train_dataset": chats({"environment": "b"})},
            "row 0 of train_dataset: its column 'environment' is 'b', which environment_factory does not have; "
            "it has 'a'",
        ),
        (
            {
                "environment_factory": {"a": Counter},
                "train_dataset": chats({"environment": "a"}),
                "eval_dataset": {"hard": chats(*({"environment": name} for name in "aab"))},
            },
            r"row 2 of eval_dataset\['hard'\]: its column 'environment' is 'b'",
        ),
        (
            {"tools": [increment], "train_dataset": chats(*[{"tools": ["increment"]}] * 8, {"tools": ["search"]})},
            r"row 8 of train_dataset: its column 'tools' is \['search'\] .*given, which are 'increment'",
        ),
        (
            {"tools": [increment], "train_dataset": chats({"tools": [{"name": "increment"}]})},
            r"row 0 of train_dataset: its column 'tools' is \[{'name': 'increment'}\]",
        ),
        ({"rollout_func": longer, "tools": [increment]}, "rollout_func makes whole rollouts itself, so tools"),
    ],
    TypeError: [
        ({"tools": increment}, "tools is a function; give a list of functions"),
        ({"rollout_func": Counter().get_reward}, "rollout_func is <bound method .*give a plain function"),
        ({"rollout_func": 3}, "rollout_func is 3"),
    ],
}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [pytest.param(given, error, text, id=text) for error, rows in BAD.items() for given, text in rows],
)
def test_arguments_that_cannot_work(
    arguments: Any, error: type[Exception], text: str, make_agents: Any, unsampled: None
) -> None:
    with pytest.raises(error, match=text):
        make_agents(**{"reward_funcs": longer, **arguments})


class Levelled(Counter):
    def reset(self, level: int, **row: Any) -> None:
        super().reset()
        assert (level, row.keys()) == (1, {"prompt"})


def test_columns_that_an_environment_needs_are_kept(make_agents: Any) -> None:
    """Those that its reset names, also where it takes others by `**kwargs`, and where rows have no prompt."""
    config, rows = {"remove_unused_columns": True}, chats({"level": 1, "note": "x"})
    make_agents(config, environment_factory=Levelled, train_dataset=rows).train()
    trainer = make_agents(config, environment_factory=Levelled, train_dataset=rows.remove_columns(["prompt"]))
    assert trainer.train_dataset.column_names == ["level"]
    rows = chats({"environment": "a", "level": 1})
    trainer = make_agents(config, environment_factory={"a": Counter, "b": Silent}, train_dataset=rows)
    assert trainer.train_dataset.column_names == ["prompt", "environment"]


@pytest.mark.parametrize("with_environment", [False, True])
def test_a_column_chooses_the_tools_of_each_row(with_environment: bool, calling: Any, make_agents: Any) -> None:
    """The template shows them alone, and a call of another is answered with an error; None stands for all of them."""

    def double(step: int) -> int:
        """Doubles.

        Args:
            step: A number.
        """
        return 2 * step

    engine = calling(lambda number: call("increment", step=number))
    rows = chats(*({"tools": names} for names in [["increment"], ["double"], None, []] * 2))
    seen: dict[str, list[Any]] = {}

    def reward(completions: list[Any], tools: list[Any], **kwargs: Any) -> list[float]:
        for completion, names in zip(completions, tools):
            seen.setdefault(str(names), []).append(completion)
        return [0.0] * len(completions)

    trainer = make_agents(
        {"per_device_train_batch_size": 16, "shuffle_dataset": False, "remove_unused_columns": True},
        reward_funcs=reward,
        tools=[increment, double],
        train_dataset=rows,
        **({"environment_factory": Counter} if with_environment else {}),
    )
    trainer.train()
    shown = {
        tuple(name for name in ("increment", "double", "add") if f'"name": "{name}"' in text) for text in first(engine)
    }
    methods = ("add",) if with_environment else ()
    assert shown == {("increment", *methods), ("double", *methods), ("increment", "double", *methods), methods}
    contents = {key: {m["content"] for c in found for m in c if m["role"] == "tool"} for key, found in seen.items()}
    assert all(text.isdigit() for key in ("['increment']", "None") for text in contents[key])
    assert all("there is no tool 'increment'" in text for text in contents["['double']"])
    assert all("there is no tool" in text for text in contents["[]"])
    assert bool(contents["[]"]) is with_environment


def test_agents_continue_a_turn(calling: Any, make_agents: Any) -> None:
    """What the model adds to an open turn may have calls, and the replies stand behind them."""
    engine = calling(lambda number: call("increment", step=number))
    opened = [{"prompt": [*row["prompt"], {"role": "assistant", "content": "I call: "}]} for row in CHAT]
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, completions))
        return [0.0] * len(completions)

    trainer = make_agents(
        {"chat_template_kwargs": {"continue_final_message": True}},
        reward_funcs=reward,
        tools=[increment],
        train_dataset=Dataset.from_list(opened),
    )
    trainer.train()
    texts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.asked]
    assert sum(text.endswith("<assistant>I call: ") for text in texts) == 8
    assert sum("<assistant>I call: <tool_call>" in text and text.endswith("<assistant>") for text in texts) == 8
    for prompt, completion in seen:
        assert prompt[-1] == {"role": "assistant", "content": "I call: "}
        assert [message["role"] for message in completion] == ["assistant", "tool", "assistant"]


def first(engine: Any) -> list[str]:
    """The prompts of first turns."""
    texts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.asked]
    return [text for text in texts if text.endswith("<assistant>") and text.count("<assistant>") == 1]


def test_a_wrong_row_of_a_stream_is_refused_when_it_is_read(make_agents: Any) -> None:
    stream = chats(*[{"tools": ["increment"]}] * 8, {"tools": ["search"]}).to_iterable_dataset()
    trainer = make_agents({"max_steps": 9}, tools=[increment], reward_funcs=longer, train_dataset=stream)
    with pytest.raises(ValueError, match=r"its column 'tools' is .*'search'.*; give a list of names"):
        trainer.train()


def test_a_column_of_tools_without_tools_is_said(make_agents: Any, caplog: Any) -> None:
    make_agents(reward_funcs=longer, train_dataset=chats({"tools": ["increment"]}))
    assert "train_dataset has the column 'tools', and the trainer was given no tools" in caplog.text


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_environments_are_closed_if_the_trainer_cannot_be_made(
    template: Any, make_agents: Any, make_tokenizer: Any
) -> None:
    """Both if the template is missing, an early error, and for text prompts, a late one."""
    Counter.closed = closed = []
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="text prompts" if template else "chat template"):
        make_agents(processing_class=tokenizer, train_dataset=TEXTS, environment_factory=Counter)
    assert len(closed) == 1


class Silent:
    """Has no methods to call."""

    def reset(self) -> str:
        return "Speak."


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "there are no tools to call"),
        ({"rollout_func": lambda prompts, trainer: {}}, "a rollout_func makes whole rollouts itself"),
        ({"environment_factory": Silent}, "the environments have no methods that are tools"),
    ],
)
def test_settings_of_calls_warn_where_there_are_none(arguments: dict[str, Any], reason: str, make_agents: Any) -> None:
    arguments = {"reward_funcs": longer, "response_parser": lambda text, ids: {"content": text}, **arguments}
    with pytest.warns(UserWarning) as warned:
        make_agents({"max_tool_calling_iterations": 3}, **arguments)
    for name in ("response_parser", "max_tool_calling_iterations"):
        assert [str(w.message) for w in warned].count(f"{name} has no effect: {reason}") == 1


def test_a_template_without_tools_is_refused(make_agents: Any, make_tokenizer: Any, unsampled: None) -> None:
    with pytest.raises(ValueError, match="chat template"):
        make_agents(processing_class=make_tokenizer(), reward_funcs=longer, tools=[increment])


class Asking(Counter):
    def reset(self, **row: Any) -> str:
        super().reset(**row)
        return "count to nine"


def test_an_environment_may_bring_the_prompts(make_agents: Any, calling: Any) -> None:
    engine = calling(lambda n: call("add", step=n))
    trainer = make_agents({"max_steps": 2}, environment_factory=Asking, train_dataset=None)
    trainer.train()
    assert trainer.state.global_step == 2
    assert all("<user>count to nine" in engine.tokenizer.decode(request.prompt_ids) for request in engine.asked)
