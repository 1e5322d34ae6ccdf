"""Signals stop a run with a checkpoint of the last whole step; nothing that training calls ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from step_events import At

from groupgrad.errors import RewardError
from groupgrad.run_folder.run_files import LOCK_OWNER
from groupgrad.stopping import Stopped

LOGGED = {
    "steps_per_generation": 2,
    "max_steps": 5,
    "logging_steps": 2,
    "log_completions": True,
    "num_completions_to_print": 0,
}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def send(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def rewards(tools: Any, step: int, action: Callable[[], None]) -> Callable[..., Any]:
    """A reward function that calls `action` in the step that follows `step` whole ones, and random numbers always."""

    def reward(completion_ids: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        torch.rand(3)
        if trainer_state.global_step == step:
            action()
        return tools.letters_reward(completion_ids)

    return reward


@pytest.fixture
def make(make_trainer: Any, make_policy: Any, tools: Any, tmp_path: Path) -> Callable[..., Any]:
    """`make(folder, place, step)`: a trainer that gets SIGTERM in a reward or at an event after `step` whole steps."""

    def run(folder: str, place: str = "", step: int = -1, trainer: Any = None, **settings: Any) -> Any:
        stop = lambda *_: send("SIGTERM")  # noqa: E731
        callbacks = [At(place, stop, step)] if place.startswith("on_") else []
        return make_trainer(
            model=make_policy(attention_dropout=0.3),
            reward_funcs=rewards(tools, step if place == "reward" else -1, stop),
            trainer={"callbacks": callbacks, **(trainer or {})},
            output_dir=str(tmp_path / folder),
            **settings,
        )

    return run


@pytest.fixture
def stopped(make: Any) -> Callable[..., Any]:
    """`stopped(step, text)`: a trainer that SIGTERM has stopped in the step that follows `step` whole ones."""

    def run(step: int, text: str = "", **settings: Any) -> Any:
        trainer = make("run", "reward", step, **settings)
        with pytest.raises(Stopped, match=text):
            trainer.train()
        return trainer

    return run


def checkpoints(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


def test_a_stopped_run_goes_on_as_if_it_had_not_been(make, tools, tmp_path):
    """A signal in a reward leaves the step, which is made again; one in training lets the step end."""
    step, settings = 3, {**tools.STATEFUL, **LOGGED}
    straight = make("straight", **settings)
    straight.train()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    for place, whole in (("reward", step), ("on_step_begin", step), ("on_pre_optimizer_step", step + 1)):
        stopped = make(place, place, step, **settings)
        with pytest.raises(Stopped, match="SIGTERM stopped the run after step") as exit_:
            stopped.train()
        assert exit_.value.code == 75
        assert checkpoints(stopped) == [f"checkpoint-{whole}"]
        assert {number: signal.getsignal(number) for number in before} == before
        resumed = make(place, **settings)
        resumed.train(str(tmp_path / place / f"checkpoint-{whole}"))
        assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))
        # The window of the last log event has step 3, which was made before the stop.
        logs = [tools.without_times(trainer.state.log_history)[-2] for trainer in (resumed, straight)]
        assert logs[0] == logs[1]
        assert resumed.state.num_input_tokens_seen == straight.state.num_input_tokens_seen


@pytest.fixture
def hang_up() -> Iterator[Callable[[Any], Any]]:
    """Sets what SIGHUP does, at first the default: a suite that `nohup` has started ignores it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


def test_a_run_of_nohup_goes_on_when_its_terminal_ends(make_trainer, tools, hang_up):
    hang_up(signal.SIG_IGN)
    trainer = make_trainer(reward_funcs=rewards(tools, 1, lambda: send("SIGHUP")), max_steps=2)
    assert trainer.train().global_step == 2
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(("name", "code"), [("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130)])
def test_each_signal_has_its_code(make_trainer, tools, hang_up, name, code):
    trainer = make_trainer(reward_funcs=rewards(tools, 1, lambda: send(name)))
    with pytest.raises(SystemExit) as exit_:
        trainer.train()
    assert exit_.value.code == code
    assert checkpoints(trainer) == ["checkpoint-1"]


@pytest.mark.parametrize("launched", [False, True])
def test_a_second_interrupt_ends_at_once(make_trainer, monkeypatch, launched):
    """torchrun passes an interrupt on to its processes, so there the second one is the first one again."""
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    twice = At("on_pre_optimizer_step", lambda _: (send("SIGINT"), send("SIGINT")), 1)
    trainer = make_trainer(trainer={"callbacks": [twice]})
    with pytest.raises(Stopped if launched else KeyboardInterrupt):
        trainer.train()
    assert checkpoints(trainer) == ["checkpoint-2"] * launched


def test_a_signal_in_the_first_step_has_nothing_to_save(stopped):
    assert checkpoints(stopped(0, "no step was finished")) == []


def test_a_signal_in_the_last_step_is_no_reason_to_begin_again(train):
    trainer = train(trainer={"callbacks": [At("on_pre_optimizer_step", lambda _: send("SIGTERM"), 2)]})
    assert trainer.state.global_step == 3


@pytest.mark.slow
def test_an_evaluation_that_a_stop_has_left_out_is_made_up(make, tools):
    settings = {**EVALUATED, "eval_steps": 2, "trainer": {"eval_dataset": tools.prompts(2)}}

    def evaluations(trainer: Any) -> list[tuple[int, float]]:
        return [(e["step"], e["eval_reward"]) for e in trainer.state.log_history if "eval_reward" in e]

    straight = make("straight", **settings)
    straight.train()
    for place, step in (("on_pre_optimizer_step", 1), ("reward", 2)):  # in the step, and in the evaluation
        stopped = make(place, place, step, **settings)
        with pytest.raises(Stopped):
            stopped.train()
        assert checkpoints(stopped) == ["checkpoint-2"]
        assert evaluations(stopped) == []
        resumed = make(place, **settings)
        resumed.train(resume_from_checkpoint=True)
        assert evaluations(resumed) == evaluations(straight) != []
        assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))


def test_a_stopped_trial_of_a_search_is_saved_in_its_own_folder(make_trainer, tools, tmp_path):
    """Each trial locks its own folder too, so that trials in several processes may share `output_dir`."""
    locked: list[bool] = []

    def in_second_trial() -> None:
        locked.append((tmp_path / "run" / "run-0" / LOCK_OWNER).exists())
        if (tmp_path / "run" / "run-1" / LOCK_OWNER).exists():
            send("SIGTERM")

    trainer = make_trainer(
        reward_funcs=rewards(tools, 1, in_second_trial), max_steps=2, trainer={"eval_dataset": tools.prompts(2)}
    )
    with pytest.raises(Stopped, match=r"checkpoint-1 in .*run-1 has it"):
        trainer.hyperparameter_search(
            lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
            compute_objective=lambda metrics: metrics["eval_reward"],
            n_trials=3,
            direction="maximize",
            backend="optuna",
        )
    assert locked == [True, False]
    assert [path.parent.name for path in (tmp_path / "run").rglob("checkpoint-*")] == ["run-1"]


def test_training_on_another_thread_leaves_the_signals_alone(make_trainer):
    handler = signal.getsignal(signal.SIGTERM)
    trainer, seen = make_trainer(max_steps=1), []
    trainer.add_callback(At("on_step_begin", lambda _: seen.append(signal.getsignal(signal.SIGTERM))))
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen == [handler]
    assert trainer.state.global_step == 1


def test_the_checkpoint_of_a_stop_stays(stopped, tools):
    trainer = stopped(
        2,
        trainer={"eval_dataset": tools.prompts(2)},
        save_strategy="steps",
        save_steps=1,
        **EVALUATED,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="completions/mean_length",
    )
    assert "checkpoint-2" in checkpoints(trainer)


def test_a_folder_of_an_earlier_run_is_not_taken_for_that_of_the_stop(make, stopped, tmp_path):
    earlier = tmp_path / "run" / "checkpoint-1"
    earlier.mkdir(parents=True)
    (earlier / "model.safetensors").write_bytes(b"another model")
    stopped(1, max_steps=2)
    resumed = make("run", max_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2


@pytest.mark.slow
def test_a_stop_in_the_first_step_of_an_epoch_goes_on_as_if_it_had_not_been(make, tools):
    """The start of an epoch draws nothing from the global random stream, which a resume restores before it."""
    rows = {"train_dataset": tools.prompts(4)}
    straight, resumed = make("straight", **rows), make("stopped", **rows)
    straight.train()
    with pytest.raises(Stopped):
        make("stopped", "reward", 2, **rows).train()
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(tools.weights(resumed.model), tools.weights(straight.model))


def test_a_signal_in_the_evaluation_after_the_last_step_stops_the_run(stopped, tools):
    trainer = stopped(1, "after step 1 of 1", max_steps=1, trainer={"eval_dataset": tools.prompts(2)}, **EVALUATED)
    assert checkpoints(trainer) == ["checkpoint-1"]


def test_a_forked_process_ends_as_it_would(train):
    codes: list[int] = []

    def fork(_: Any) -> None:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"x")  # Python loses a signal that arrives during a fork
            time.sleep(60)
            os._exit(1)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    train(trainer={"callbacks": [At("on_step_end", fork, 1)]})
    assert codes == [-signal.SIGTERM]


# --------------------------------------------------------------------------------------- exits of what training calls


def test_a_reward_cannot_end_the_process(make_trainer, tools):
    trainer = make_trainer(reward_funcs=rewards(tools, 1, lambda: sys.exit(0)))
    with pytest.raises(RewardError, match=r"'reward'.*step 1.*SystemExit"):
        trainer.train()


def test_a_callback_cannot_end_the_process(make_trainer):
    trainer = make_trainer(trainer={"callbacks": [At("on_step_end", lambda _: sys.exit(0), 2)]})
    with pytest.raises(RuntimeError, match=r"test_signals.py:\d+\) raised SystemExit\(0\), which would end"):
        trainer.train()
