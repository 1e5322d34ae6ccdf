"""Every option has its documented effect on a run. Models and callbacks: `test_models.py`."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from noted_calls import note_calls

ROUND_TRIP = {"generation_batch_size": 16, "max_steps": 2, "learning_rate": 3e-2}
"""Two steps on one generation batch; the second is far off-policy."""


@pytest.fixture
def requests(monkeypatch):
    """`requests(trainer)` returns a list that collects the (requests, options) of its engine."""

    return lambda trainer: note_calls(monkeypatch, trainer.engine, "sample", lambda *given: given)


@pytest.fixture
def completions(train, recorder):
    """`completions(**settings)` returns the completion ids of one step, and the trainer."""

    def run(**settings: Any):
        trainer = train(reward_funcs=recorder, max_steps=1, **settings)
        return recorder.take("completion_ids"), trainer

    return run


# ------------------------------------------------------------------------------------------------ what is computed

OBJECTIVE: dict[str, tuple[dict[str, Any], Any]] = {
    # field: (the run it is tried in, the value tried against the run's)
    "learning_rate": ({}, 1e-3),
    "sync_ref_model": ({"beta": 1.0, "max_steps": 3, "ref_model_sync_steps": 1}, True),
    "use_adaptive_entropy": ({"entropy_coef": 0.1}, True),
    "entropy_target": ({"entropy_coef": 0.1, "use_adaptive_entropy": True}, 9.0),
    "entropy_coef_delta": ({"use_adaptive_entropy": True, "entropy_target": 9.0}, 0.5),
    "entropy_coef_max": ({"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef_delta": 0.2}, 0.1),
    "shuffle_rows": ({}, "groups"),
}


@pytest.fixture
def final(final_weights):
    """`final(**settings)` returns the final weights of a short run."""
    return lambda **settings: final_weights(**{**ROUND_TRIP, **settings})


@pytest.mark.quick("learning_rate", "shuffle_rows", "sync_ref_model")
@pytest.mark.filterwarnings("ignore:.*no effect.*:UserWarning")
@pytest.mark.parametrize("field", OBJECTIVE)
def test_it_changes_the_weights(final, tools, field):
    """The same run with and without it. Options of the loss have their numbers in `test_objective.py`."""
    settings, value = OBJECTIVE[field]
    changed = final(**{**settings, field: value})
    assert tools.relative(changed, final(**settings)) > 1e-5


def test_data_seed_orders_the_prompts_and_seed_samples(train, recorder):
    """Two streams: the order of prompts follows `data_seed`, the texts follow `seed`."""

    def run(seed: int, data_seed: int) -> tuple[list[int], list[list[int]]]:
        recorder.calls.clear()
        train(seed=seed, data_seed=data_seed, reward_funcs=recorder, max_steps=1)
        return recorder.calls[0]["row"], recorder.calls[0]["completion_ids"]

    first, again, sampled, ordered = run(1, 5), run(1, 5), run(2, 5), run(1, 6)
    assert first == again
    assert first[0] == sampled[0] != ordered[0]
    assert first[1] != sampled[1]


def test_shuffle_dataset_off_keeps_the_order(train, recorder):
    train(reward_funcs=recorder, shuffle_dataset=False, max_steps=4)
    assert recorder.take("row")[::4] == list(range(8))


def test_a_limit_that_cannot_be_reached_is_a_remark(final_weights):
    """The constant of dr_grpo is the longest completion that there can be."""
    common = {"loss_type": "dr_grpo", "optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1}
    finals = []
    for limits, reason in (
        ({"max_completion_length": 15}, None),
        ({"max_completion_length": 100}, "=100 cannot be reached, since the model has 16 positions for prompt and"),
        (
            {"max_completion_length": 20, "generation_kwargs": {"max_new_tokens": 15}},
            "=20 cannot be reached, since generation_kwargs has max_new_tokens=15: ",
        ),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            finals.append(final_weights(model={"max_position_embeddings": 16}, **common, **limits))
        said = [str(warning.message) for warning in caught if "max_completion" in str(warning.message)]
        assert len(said) == (reason is not None)
        for text in said:
            assert text.startswith(f"max_completion_length{reason}")
            assert text.endswith("at most 15 tokens; loss_type='dr_grpo' divides by 15")
    assert all(torch.equal(weights, finals[0]) for weights in finals)


# ------------------------------------------------------------------------------------------------ sampling

CUTS: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}]


@pytest.mark.parametrize("settings", [*CUTS, {"generation_kwargs": CUTS[0]}], ids="-".join)
def test_a_cut_to_the_likeliest_token_gives_a_group_one_text(completions, settings):
    seen, trainer = completions(**settings)
    assert all(len({tuple(ids) for ids in seen[i : i + 4]}) == 1 for i in range(0, 8, 4))
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0


def test_a_repetition_penalty_keeps_tokens_apart(completions):
    free, _ = completions(repetition_penalty=1.0, top_k=4, max_completion_length=12)
    held, _ = completions(repetition_penalty=1e6, top_k=4, max_completion_length=12)
    assert any(len(set(ids)) < len(ids) for ids in free)
    assert all(len(set(ids)) == len(ids) for ids in held)


def test_generation_kwargs_go_to_the_sampler(completions):
    assert all(len(ids) >= 3 for ids in completions(generation_kwargs={"min_new_tokens": 3})[0])
    assert all(len(ids) <= 2 for ids in completions(generation_kwargs='{"max_new_tokens": 2}')[0])
    banned = completions(generation_kwargs={"suppress_tokens": list(range(30, 92))})[0]
    assert all(token < 30 for ids in banned for token in ids)


def test_max_completion_length(completions):
    for limit in (2, 5):
        seen, trainer = completions(max_completion_length=limit)
        assert max(map(len, seen)) == limit
        assert trainer.state.log_history[0]["completions/max_length"] == limit


def test_chat_template_kwargs_and_messages(make_trainer, tokenizer, requests):
    """The template sees them, the prompt that is sampled from is what it renders, the reward sees messages."""
    tokenizer.chat_template = (
        "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    shown: list[Any] = []

    def reward(completions, prompts, **kwargs):
        shown.append((prompts[0], completions[0]))
        return [float(len(c[0]["content"])) for c in completions]

    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "hi"}]] * 4})
    trainer = make_trainer(reward_funcs=reward, train_dataset=rows, max_steps=1, chat_template_kwargs={"mood": "calm"})
    seen = requests(trainer)
    trainer.train()
    assert tokenizer.decode(seen[0][0][0].prompt_ids) == "calmhi>"
    assert shown[0][0] == [{"role": "user", "content": "hi"}]
    assert [message["role"] for message in shown[0][1]] == ["assistant"]


@pytest.mark.parametrize(("setting", "count"), [("auto", 1), ("keep", 2)])
def test_special_tokens_in_prompts(make_trainer, tokenizer, requests, setting, count):
    """A prompt holds only the template's special tokens, unless the option keeps those of the data."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"1{tokenizer.eos_token}2"}]] * 4})
    trainer = make_trainer(train_dataset=rows, max_steps=1, special_tokens_in_prompts=setting)
    seen = requests(trainer)
    trainer.train()
    assert seen[0][0][0].prompt_ids.count(tokenizer.eos_token_id) == count


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_cache_implementation(completions, make_policy, monkeypatch, kind):
    expected, _ = completions()
    policy = make_policy()
    note = lambda *_, generation_config, **__: generation_config.cache_implementation  # noqa: E731
    kinds = note_calls(monkeypatch, policy, "generate", note)
    assert completions(model=policy, cache_implementation=kind)[0] == expected
    assert set(kinds) == {kind}


# ------------------------------------------------------------------------------------------------ groups and batches


def test_num_generations_is_the_group_size(train, recorder):
    for group in (2, 8):
        train(reward_funcs=recorder, num_generations=group, max_steps=1)
        rows = recorder.take("row")
        groups = [rows[i : i + group] for i in range(0, len(rows), group)]
        assert len(groups) == 8 // group
        assert all(len(set(rows)) == 1 for rows in groups)
        assert len({rows[0] for rows in groups}) == len(groups)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}, [(0, 8), (1, 8), (2, 8), (3, 8)]),
        ({"generation_batch_size": 16}, [(0, 16), (2, 16)]),
        ({"steps_per_generation": 2}, [(0, 16), (2, 16)]),
        ({"num_iterations": 2}, [(0, 8), (2, 8)]),
        ({"generation_batch_size": 16, "num_iterations": 2}, [(0, 16)]),
    ],
    ids=str,
)
def test_how_often_generation_batches_are_sampled(train, recorder, settings, calls):
    """Steps of 8 rows: by default each samples; a batch of 16, or two passes over one, feeds two steps; both four."""
    train(reward_funcs=recorder, max_steps=4, **settings)
    assert [(call["step"], len(call["completion_ids"])) for call in recorder.calls] == calls


def test_remove_unused_columns_hides_what_no_signature_names(make_trainer, recwarn):
    """In training and evaluation, also of a dict of sets and of streams; warnings name what is dropped."""
    rows = {"prompt": list("abcd"), "row": list(range(4)), "answer": list("wxyz"), "level": list("aabb")}
    data = Dataset.from_dict(rows)
    evaluation = {"plain": data, "stream": data.to_iterable_dataset()}
    for removed, train in ((False, data), (True, data), (True, data.to_iterable_dataset())):
        seen: dict[str, set] = {"kwargs": set(), "answer": set()}

        def reward(completion_ids, ground_truths, row=None, seen=seen, **kwargs):
            seen["kwargs"] |= kwargs.keys()
            seen["answer"] |= {*ground_truths}
            assert None not in row
            return [0.0] * len(completion_ids)

        trainer = make_trainer(
            reward_funcs=reward,
            train_dataset=train,
            trainer={"eval_dataset": evaluation},
            remove_unused_columns=removed,
            max_steps=1,
            per_device_train_batch_size=16,
        )
        trainer.train()
        trainer.evaluate()
        assert ("level" in seen["kwargs"]) is not removed
        assert seen["answer"] == {*"wxyz"}
        seen["kwargs"].clear()
        trainer.evaluate(data)  # of another set than the trainer's
        assert ("level" in seen["kwargs"]) is not removed
        said = {str(warning.message) for warning in recwarn if "remove_unused_columns" in str(warning.message)}
        assert {text.partition(": ")[0] for text in said} == {
            f"remove_unused_columns=True drops 'level' of {place}_dataset" for place in ("train", "eval") if removed
        }


def test_an_evaluation_set_may_have_a_column_that_is_dropped(make_trainer):
    """`prompts` is a name that the trainer gives reward functions itself, so it would be refused if it stayed."""
    evaluation = Dataset.from_dict({"prompt": ["a", "b"], "prompts": ["x", "y"]})
    for sets in (evaluation, {"one": evaluation}):
        trainer = make_trainer(trainer={"eval_dataset": sets}, remove_unused_columns=True)
        assert any(key.endswith("reward") for key in trainer.evaluate())
    with pytest.raises(ValueError, match="eval_dataset has the column 'prompts'"):
        make_trainer(trainer={"eval_dataset": evaluation})


def test_epochs_show_every_prompt_once_each(train, tools, recorder):
    """Ten prompts in batches of four: the last batch is filled up, or the rest is left out of the epoch."""
    epochs = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}
    for drop_last, num_batches in ((False, 3), (True, 2)):
        data = tools.prompts(10)
        trainer = train(reward_funcs=recorder, train_dataset=data, dataloader_drop_last=drop_last, **epochs)
        rows = recorder.take("row")[::4]
        assert trainer.state.global_step == 2 * num_batches
        first, second = rows[: 4 * num_batches], rows[4 * num_batches :]
        assert len(set(first)) == len(set(second)) == min(10, 4 * num_batches)
        assert first != second


# ------------------------------------------------------------------------------------------------ rewards and logs


def test_reward_weights_and_scaling(make_trainer, monkeypatch):
    """Advantages of groups of four, by hand: 1*[0,0,1,1] + 3*[0,1,0,1] = [0,3,1,4], mean 2, deviation 1.825742."""

    def first(completion_ids, **kwargs):
        return [0.0, 0.0, 1.0, 1.0] * (len(completion_ids) // 4)

    def second(completion_ids, **kwargs):
        return [0.0, 1.0, 0.0, 1.0] * (len(completion_ids) // 4)

    expected = {
        ("group", "sum_then_normalize"): [-1.095385, 0.547692, -0.547692, 1.095385],
        (False, "sum_then_normalize"): [-2.0, 1.0, -1.0, 2.0],
        # Over eight rows the sample deviation is sqrt(20 / 7) = 1.690309.
        ("batch", "sum_then_normalize"): [-1.183146, 0.591573, -0.591573, 1.183146],
        # Each function scaled by 0.577350: +-z, z = 0.865875; sums -4z, 2z, -2z, 4z with deviation 2.927192.
        ("group", "normalize_then_sum"): [-1.183176, 0.591588, -0.591588, 1.183176],
    }
    for (scale, aggregation), advantages in expected.items():
        trainer = make_trainer(
            reward_funcs=[first, second],
            reward_weights=[1.0, 3.0],
            scale_rewards=scale,
            multi_objective_aggregation=aggregation,
            max_steps=1,
        )
        batches = note_calls(monkeypatch, trainer, "_log_experience", lambda scored: scored)
        trainer.train()
        assert batches[0].advantages == pytest.approx(advantages * 2, abs=2e-5)
        assert trainer.state.log_history[0]["reward"] == 2.0


@pytest.mark.parametrize("shown", [None, 0, 3])
def test_completions_are_printed(train, capsys, shown):
    def reward(completion_ids, log_extra, **kwargs):
        log_extra("mark", ["MARK"] * len(completion_ids))
        return [float(len(ids)) for ids in completion_ids]

    train(reward_funcs=reward, max_steps=1, log_completions=True, num_completions_to_print=shown)
    assert capsys.readouterr().out.count("MARK") == (8 if shown is None else shown)


@pytest.mark.parametrize("unique", [False, True])
def test_trackers_get_each_prompt_once_if_asked(train, monkeypatch, unique):
    """A stand-in for wandb whose run the script has begun."""
    tables: list[Any] = []
    tracker = SimpleNamespace(run=object(), Table=lambda dataframe: dataframe, Image=None)
    tracker.log = lambda values: tables.append(values["completions"])
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.WandbCallback.setup", lambda *args, **kwargs: None)
    monkeypatch.setattr("transformers.integrations.WandbCallback.on_log", lambda *args, **kwargs: None)
    settings = {"max_steps": 1, "num_completions_to_print": 0, "log_unique_prompts": unique}
    train(log_completions=True, report_to="wandb", **settings)
    assert [len(table) for table in tables] == [2 if unique else 8]
    train(log_completions=True, **settings)
    assert len(tables) == 1


def test_settings_are_read_again_at_each_training(train):
    """For hyperparameter search: a changed setting applies to the next training, which starts from a clean state."""
    trainer = train(max_steps=1, entropy_coef=0.1, use_adaptive_entropy=True, entropy_target=9.0)
    assert trainer.entropy_controller.coef == pytest.approx(0.105)
    trainer.args.entropy_coef = 0.3
    trainer.args.reward_weights = [2.0]
    trainer.args.temperature = 0.5
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["entropy_coef"] == 0.3
    assert trainer.entropy_controller.coef == pytest.approx(0.305)
    assert entry["reward"] == pytest.approx(2 * entry["rewards/letters_reward/mean"])
    assert trainer.components.forward_options.temperature == 0.5
    assert dataclasses.asdict(trainer.components.policy_options)["loss_type"] == "dapo"
