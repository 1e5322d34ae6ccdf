"""Changes that a script makes to a trainer are applied, or refused before anything is sampled."""

from __future__ import annotations

import threading

import pytest
import torch
from step_events import At
from torch.utils.data import DataLoader

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import ConfigError
from groupgrad.trainer import checked_entry


@pytest.fixture
def trained(train, recorder):
    """`trained(**settings)`: a trainer after a training of one step, and the calls of its reward function."""
    return lambda **settings: (train(reward_funcs=recorder, max_steps=1, **settings), recorder.calls)


def test_a_change_that_cannot_work_is_refused_before_anything_is_sampled(trained, tools):
    trainer, scored = trained()
    for name, value, message in (
        ("temperature", 0, "temperature=0 cannot work: logits are divided by it"),
        ("num_generations", 3, "num_generations=3 does not divide the 8 completions"),
        ("per_device_train_batch_size", 128, "train_dataset has 16 rows, but one generation batch takes 32"),
        ("beta", 0.1, "trainer.args.beta was changed from 0.0 to 0.1 after the trainer was made, and it has kept no"),
        ("rollout_engine", "transformers", "rollout_engine was changed from 'auto' to 'transformers' after"),
        ("generation_kwargs", {"min_new_tokens": 2}, "generation_kwargs was changed from None to"),
        ("reward_timeout_s", 2.0, "Make another one with GRPOConfig(reward_timeout_s=...)"),
    ):
        before = getattr(trainer.args, name)
        setattr(trainer.args, name, value)
        for call in (trainer.train, lambda: trainer.evaluate(tools.prompts(4))):
            with pytest.raises(ValueError) as error:
                call()
            assert message in str(error.value)
        setattr(trainer.args, name, before)
    assert len(scored) == 1


def test_a_beta_of_a_trainer_with_a_reference_may_change(trained, make_policy):
    """Another model may not take the place of the first."""
    trainer, scored = trained(beta=0.1)
    trainer.args.beta = 0.2
    trainer.train()
    assert trainer.components.policy_options.beta == 0.2
    trainer.model = make_policy(seed=1)
    with pytest.raises(ValueError, match="model was replaced by another Qwen3ForCausalLM"):
        trainer.train()
    assert len(scored) == 2


def test_an_evaluation_reads_changed_options(make_trainer, tools):
    """Before the first training the learning rate may change too."""
    trainer = make_trainer(max_steps=1)
    trainer.args.max_completion_length = 2
    metrics = trainer.evaluate(tools.prompts(4))
    assert metrics["eval_completions/max_length"] == 2
    trainer.args.learning_rate = 3e-3
    trainer.train()
    assert trainer.state.log_history[-2]["learning_rate"] == 3e-3


def test_a_learning_rate_that_the_optimizer_would_not_take_is_refused(trained):
    trainer, scored = trained()
    trainer.args.learning_rate = 3e-3
    with pytest.raises(ConfigError, match=r"learning_rate was changed from 0\.01 to 0\.003, and the trainer goes on"):
        trainer.train()
    assert len(scored) == 1
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == 3e-3


def test_an_option_that_a_callback_changes_to_no_effect_is_named_once(train, caplog):
    def anneal(at):
        at.args.temperature, at.args.learning_rate = 1.0 - 0.1 * at.state.global_step, 1e-9
        at.args.ref_model_sync_steps, at.args.logging_steps = 7, 1

    trainer = train(max_steps=3, trainer={"callbacks": [At("on_step_end", anneal)]})
    told = [record.message for record in caplog.records if "was changed" in record.message]
    assert len(told) == 2
    assert told[0].startswith("trainer.args.learning_rate was changed from 0.01 to 1e-09 during training, which")
    assert told[1].startswith("trainer.args.temperature was changed from 1.0 to 0.9 during training, which")
    assert trainer.components.sampling.temperature == 1.0
    assert trainer.state.log_history[0]["learning_rate"] == 0.01


def test_two_threads_do_not_train_at_once(make_trainer, make_policy, tokenizer, tools, train, tmp_path):
    """They gave NaN gradients and other weights than each alone, since attention is switched for the process. In the
    same thread a training within a training works."""
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
    again |= {"train_dataset": tools.prompts(), "processing_class": tokenizer}
    other = make_trainer(max_steps=1, output_dir=str(tmp_path / "other"))

    def reward(completion_ids, **kwargs):
        if not errors:
            in_another_thread(other.train)
            in_another_thread(lambda: GRPOTrainer(**again, reward_funcs=tools.letters_reward))
            other.train()
        return [float(len(ids)) for ids in completion_ids]

    trainer = train(reward_funcs=reward, max_steps=2)
    assert (other.state.global_step, trainer.state.global_step) == (1, 2)
    assert errors[0].startswith(
        "train() was called in second while another thread makes or runs a trainer: two threads"
    )
    assert errors[1].startswith("GRPOTrainer() was called in second while another thread")


@pytest.mark.parametrize("name", ["get_train_dataloader", "get_eval_dataloader"])
def test_a_loader_of_a_scripts_own_is_refused_before_anything_is_sampled(
    make_trainer, recorder, tools, monkeypatch, name
):
    """It is named, with the way to do the same: a step is trained from the keys of the trainer's own loader."""
    trainer = make_trainer(reward_funcs=recorder)
    own = DataLoader(tools.prompts(), batch_size=8, collate_fn=list)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(trainer, name, lambda *args: own)
    call = trainer.train if name == "get_train_dataloader" else lambda: trainer.evaluate(tools.prompts())
    with pytest.raises(TypeError, match=rf"{name} returned a loader that yields a list") as error:
        call()
    assert f"super().{name}(" in str(error.value)
    assert not recorder.calls


def test_options_assigned_before_the_trainer_get_what_the_constructor_does(model_dir, tools, tmp_path, monkeypatch):
    """The folder is relative, and the model is loaded with a dtype that a script names by the object."""
    monkeypatch.chdir(tmp_path)
    args = GRPOConfig(
        "run", use_cpu=True, max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4
    )
    args.model_init_kwargs = {"dtype": torch.bfloat16}
    args.scale_rewards, args.report_to, args.logging_steps = False, "none", 1
    trainer = GRPOTrainer(str(model_dir), tools.letters_reward, args, tools.prompts())
    assert trainer.args is args
    trainer.train()
    assert trainer.model.dtype == torch.bfloat16
    assert (args.scale_rewards, trainer.components.scoring_options.scale_rewards) == ("none", "none")
    trainer.args.scale_rewards = True
    trainer.train()
    assert trainer.components.scoring_options.scale_rewards == "group"
    assert (args.output_dir, (tmp_path / "run" / "checkpoint-1").is_dir()) == ("run", True)
    args.loss_type = "grop"
    with pytest.raises(ConfigError, match="loss_type='grop'"):
        GRPOTrainer(str(model_dir), tools.letters_reward, args, tools.prompts())
    with pytest.raises(ConfigError, match="loss_type='grop'"):
        trainer.train()


def test_a_relative_folder_is_no_changed_option(make_trainer, tmp_path, monkeypatch):
    """Nothing is checked again for a folder that is made a whole path while a run trains."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(output_dir="run", max_steps=1)
    checked: list[object] = []
    monkeypatch.setattr(checked_entry.dataset_checks, "check_datasets", lambda *args: checked.append(args))
    trainer.train()
    assert not checked
