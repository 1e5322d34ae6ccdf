"""Calls of a trainer that would disturb each other are refused."""

from __future__ import annotations

import threading

import pytest

from groupgrad import GRPOConfig, GRPOTrainer


def test_two_threads_do_not_train_at_once(make_trainer, make_policy, tokenizer, tools, tmp_path):
    """They gave NaN gradients and other weights than each alone, since attention is switched for the process."""
    errors: list[str] = []

    def in_another_thread(call):
        def run():
            with pytest.raises(RuntimeError) as error:
                call()
            errors.append(str(error.value))

        thread = threading.Thread(target=run, name="second")
        thread.start()
        thread.join()

    again = {"model": make_policy(), "args": GRPOConfig(output_dir=str(tmp_path / "again"), use_cpu=True)}
    other = make_trainer(max_steps=1, output_dir=str(tmp_path / "other"))

    def reward(completion_ids, **kwargs):
        if not errors:
            in_another_thread(other.train)
            in_another_thread(
                lambda: GRPOTrainer(
                    **again,
                    reward_funcs=tools.letters_reward,
                    processing_class=tokenizer,
                    train_dataset=tools.prompts(),
                )
            )
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(reward_funcs=reward, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    assert errors[0].startswith("train() was called in second while train() runs in MainThread: two threads")
    assert errors[1].startswith("GRPOTrainer() was called in second while train() runs in MainThread")
    other.train()
    assert other.state.global_step == 1


def test_a_training_within_a_training_works_in_the_same_thread(make_trainer, tmp_path):
    inner = make_trainer(max_steps=1, output_dir=str(tmp_path / "inner"))

    def reward(completion_ids, **kwargs):
        if not inner.state.global_step:
            inner.train()
        return [float(len(ids)) for ids in completion_ids]

    outer = make_trainer(reward_funcs=reward, max_steps=2)
    outer.train()
    assert (inner.state.global_step, outer.state.global_step) == (1, 2)
