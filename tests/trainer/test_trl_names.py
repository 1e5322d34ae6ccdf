"""TRL's names on the trainer: attributes have their meaning there, and methods that are never called are refused."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from step_events import At
from transformers import Trainer

from groupgrad import GRPOConfig, GRPOTrainer
from groupgrad.errors import ConfigError
from groupgrad.objectives import PolicyLoss
from groupgrad.trainer.trl_names import NEVER_CALLED, REPLACED, TRLNames

PAGE = Path(__file__).parents[2] / "docs" / "from-trl.md"


def peer_attributes() -> list[str]:
    """Public attributes that the installed peer's trainer assigns, read from its source."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, "the dev extra installs trl, whose names this test reads"
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    return sorted(set(re.findall(r"\bself\.([a-z]\w*) = ", source)))


def twice(completions, **kwargs):
    return [2.0 for _ in completions]


def test_attributes_have_the_values_of_the_run(make_trainer, tokenizer):
    settings = {"beta": 0.1, "temperature": 0.7, "epsilon": 0.1, "epsilon_high": 0.3, "reward_weights": [1, 2]}
    trainer = make_trainer(reward_funcs=[twice, len_reward], **settings)
    assert (trainer.beta, trainer.temperature, trainer.epsilon_low, trainer.epsilon_high) == (0.1, 0.7, 0.1, 0.3)
    assert (trainer.num_generations, trainer.num_generations_eval, trainer.max_completion_length) == (4, 4, 6)
    assert trainer.reward_funcs == [twice, len_reward]
    assert trainer.reward_func_names == ["twice", "len_reward"]
    assert trainer.reward_processing_classes == [None, None]
    assert torch.equal(trainer.reward_weights, torch.tensor([1.0, 2.0]))
    assert (trainer.pad_token_id, trainer.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert trainer.eos_token_id in trainer.eos_token_ids
    assert trainer.tools == []
    assert (trainer.vllm_client, trainer.rollout_func, trainer.aux_loss_enabled) == (None, None, False)
    reference = dict(trainer.ref_model.named_parameters())
    assert all(torch.equal(value, reference[name]) for name, value in trainer.model.named_parameters())
    assert make_trainer().ref_model is None


def len_reward(completions, **kwargs):
    return [float(len(text)) for text in completions]


def test_each_attribute_of_the_peer_is_there_or_names_its_replacement(make_trainer):
    trainer = make_trainer()
    names = peer_attributes()
    assert len(names) > 40
    for name in names:
        if name in REPLACED:
            with pytest.raises(AttributeError, match=re.escape(f"no {name}; instead: {REPLACED[name]}")):
                getattr(trainer, name)
        else:
            getattr(trainer, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        trainer.no_such_thing  # noqa: B018


def test_an_assigned_setting_is_the_configurations(make_trainer):
    """As scripts do that set what the configuration of an earlier release did not have."""
    trainer = make_trainer(max_steps=1, num_iterations=2)
    trainer.epsilon_low, trainer.epsilon_high, trainer.temperature = 0.1, 0.3, 0.7
    assert (trainer.args.epsilon, trainer.args.epsilon_high, trainer.args.temperature) == (0.1, 0.3, 0.7)
    trainer.train()
    policy = trainer.components.policy_options
    assert (policy.epsilon, policy.epsilon_high) == (0.1, 0.3)
    assert trainer.components.sampling.temperature == trainer.temperature == 0.7
    trainer.epsilon_low = -1.0
    with pytest.raises(ConfigError, match="epsilon"):
        trainer.train()


@pytest.mark.parametrize("name", ["ref_model", "reward_funcs", "reward_weights", "rollout_func", "entropy_coef"])
def test_other_attributes_cannot_be_assigned(make_trainer, name):
    with pytest.raises(AttributeError, match=f"{name} can be read, not assigned: the constructor and trainer.args"):
        setattr(make_trainer(), name, 1)


def test_a_generation_config_is_refused_with_the_fields_to_set(make_trainer):
    with pytest.raises(AttributeError, match="set temperature, top_p, max_completion_length or generation_kwargs"):
        make_trainer().generation_config = object()


def test_appended_metrics_are_logged(make_trainer):
    def append(at):
        trainer._metrics["train"]["mine"].append(at.state.global_step)
        trainer._metrics["train"]["mine"].extend([3.0, 5.0])
        trainer.log_metric("other", 7)

    trainer = make_trainer(max_steps=2, trainer={"callbacks": [At("on_step_begin", append)]})
    trainer.train()
    first, second = (event for event in trainer.state.log_history if "loss" in event)
    assert (first["mine"], second["mine"]) == (pytest.approx(8 / 3), 3.0)
    assert first["other"] == 7
    trainer._metrics["eval"]["seen"].append(4)
    assert trainer.evaluate(trainer.train_dataset)["eval_seen"] == 4
    assert "eval_seen" not in trainer.evaluate(trainer.train_dataset)
    readings = [list, len, lambda metric: metric[-1], lambda metric: metric.pop()]
    for read in readings:
        with pytest.raises(AttributeError, match=r"state\.log_history"):
            read(trainer._metrics["train"]["mine"])
    for read in (list, len, lambda metrics: "mine" in metrics, lambda metrics: metrics.get("mine")):
        with pytest.raises(AttributeError, match=r"state\.log_history"):
            read(trainer._metrics["train"])


def test_all_methods_that_are_never_called_are_refused_at_once(make_trainer, monkeypatch):
    class Base(GRPOTrainer):
        def _compute_advantages(self, rewards):
            return rewards

    class Mine(Base):
        def _generate(self, prompts):
            return prompts

        def compute_advantages(self, rewards, num_generations):
            return super().compute_advantages(rewards, num_generations)

    arguments = {"model": "none is loaded", "reward_funcs": twice, "args": GRPOConfig(use_cpu=True, bf16=False)}
    listed = (
        r"Mine has methods .*\n  _generate: pass rollout_func, .*\n  _compute_advantages: define compute_advantages"
    )
    with pytest.raises(TypeError, match=listed):
        Mine(**arguments)
    trainer = make_trainer()
    trainer._prepare_inputs = twice
    with pytest.raises(TypeError, match="of\n  _prepare_inputs: define"):
        trainer.train()
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", twice, raising=False)  # as some libraries patch the class
    with pytest.raises(TypeError, match="of\n  _calculate_rewards: define"):
        GRPOTrainer(**arguments)


def test_reading_a_method_that_the_peer_alone_has_says_what_to_do(make_trainer):
    trainer = make_trainer()
    for name in NEVER_CALLED:
        if hasattr(Trainer, name):  # which transformers and its extensions may call
            assert callable(getattr(trainer, name))
            continue
        with pytest.raises(AttributeError, match=re.escape(f"no {name}; instead: {NEVER_CALLED[name]}")):
            getattr(trainer, name)


def test_the_methods_are_never_called(make_trainer, tools, monkeypatch):
    given = {"eval_dataset": tools.prompts(4)}
    trainer = make_trainer(max_steps=2, eval_strategy="steps", eval_steps=1, trainer=given)
    for name in NEVER_CALLED:
        monkeypatch.setattr(TRLNames, name, lambda *args, name=name, **kwargs: pytest.fail(name), raising=False)
    trainer.train()
    trainer.predict(trainer.train_dataset)


ONE_GROUP = {"max_steps": 1, "per_device_train_batch_size": 4}


@pytest.mark.parametrize("hook", ["batch_loss", "compute_loss"])
def test_a_defined_loss_gets_every_row_also_without_advantage(hook, train, make_policy):
    """A subclass as the documents write it, and a term of its own that does not depend on rewards."""

    class Mine(GRPOTrainer):
        pass

    def batch_loss(self, model, batch):
        calls.append(batch.num_rows)
        result = GRPOTrainer.batch_loss(self, model, batch)
        return PolicyLoss(result.loss + model.lm_head.weight.float().square().sum(), result.metrics)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        calls.append(inputs.num_rows)
        loss = GRPOTrainer.compute_loss(self, model, inputs)
        return loss + model.lm_head.weight.float().square().sum()

    setattr(Mine, hook, {"batch_loss": batch_loss, "compute_loss": compute_loss}[hook])
    calls, model = [], make_policy()
    before = model.lm_head.weight.detach().norm()
    train(model=model, reward_funcs=twice, cls=Mine, **ONE_GROUP)
    assert calls == [4]
    assert model.lm_head.weight.detach().norm() < before


def test_the_curriculum_of_the_page_follows_rewards(train):
    """The block of docs/from-trl.md: each generation batch has rows of the level that the last step has set."""
    names = {"make_problem": lambda level: f"{level}+{level}="}
    exec(re.search(r"```python\n(from datasets import IterableDataset.*?)```", PAGE.read_text(), re.DOTALL)[1], names)  # pyright: ignore
    levels = []

    def reward(completions, level, **kwargs):
        levels.append(level)
        return [1.0 if len(levels) != 2 else 0.0 for _ in completions]

    curriculum = names["curriculum"]
    settings = {"max_steps": 4, "shuffle_dataset": False, "trainer": {"callbacks": [curriculum]}}
    train(reward_funcs=reward, train_dataset=names["train_dataset"], **settings)
    assert levels == [[level] * 8 for level in (1, 2, 2, 3)]


def test_the_page_says_the_same_of_each_name():
    text = PAGE.read_text()
    for name, instead in {**NEVER_CALLED, **REPLACED}.items():
        assert f"| `{name}` | {instead} |\n" in text


def test_rewards_and_advantages_of_a_subclass(train):
    class Mine(GRPOTrainer):
        def score_rollouts(self, rollouts, *, trainer_state, step):
            table = super().score_rollouts(rollouts, trainer_state=trainer_state, step=step)
            return replace(table, rewards=table.rewards * 0 + torch.arange(len(rollouts)).unsqueeze(1))

        def compute_advantages(self, rewards, num_generations):
            result = super().compute_advantages(rewards, num_generations)
            return replace(result, advantages=torch.sign(result.advantages) * 3)

        def batch_loss(self, model, batch, **known):
            advantages.append(batch.advantages.tolist())
            return super().batch_loss(model, batch, **known)

    advantages = []
    trainer = train(reward_funcs=len_reward, cls=Mine, **ONE_GROUP)
    assert advantages == [[-3.0, -3.0, 3.0, 3.0]]
    assert trainer.state.log_history[0]["reward"] == 1.5
    assert trainer.evaluate(trainer.train_dataset)["eval_reward"] == 3.5, "eight rows at once"
