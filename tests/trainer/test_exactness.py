"""A step computes the papers' equations, however it is divided into micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from dense_objective import dense_advantages, dense_loss, scores
from rank_cases import PAIRS, loss_settings, success

from groupgrad.objectives import LOSSES as ALL_LOSSES
from groupgrad.scoring import forward
from groupgrad.scoring.beginnings import with_beginnings_once

SPLITS = [(8, 2), (4, 4), (2, 8)]
"""(per_device_train_batch_size, gradient_accumulation_steps) of the same 16 rows as (16, 1)."""

LOSSES = [name for name, method in ALL_LOSSES.items() if method.reduction != "local_token_mean"]
"""Every loss but `bnpo`, which alone depends on the micro-batch size."""

SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2}

# AdamW's first step divides each gradient by its own size, rounding included. With its usual epsilon of 1e-8 one weight
# of the runs below, of gradient 2.6e-8 and a rounding of 3e-9 (the gradients' norm is 1, and they agree to 3e-7 of it),
# moves by 2e-4 more or less: 1.02e-5 of all weights. The plain SGD beside it shows the gradients as they are.
STEADY_ADAMW = {**ADAMW, "adam_epsilon": 1e-6}

# Two optimizer steps a generation batch, so that the second trains on what an older policy sampled.
TWO_STEPS = {"generation_batch_size": 32, "max_steps": 4}

FEATURES: dict[str, dict[str, Any]] = {
    "clipping_and_kl": {"beta": 0.1, "delta": 1.25, "shuffle_rows": "rows", "scale_rewards": "batch", **TWO_STEPS},
    "kl_to_a_moving_reference": {
        "beta": 0.1,
        "use_bias_correction_kl": True,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
        "ref_model_mixup_alpha": 0.5,
        "num_iterations": 2,
        "max_steps": 4,
    },
    "masked_rows": {
        "mask_truncated_completions": True,
        "max_completion_length": 3,
        "off_policy_mask_threshold": 0.01,
        "entropy_coef": 0.1,
        **TWO_STEPS,
    },
    "top_entropy_quantile": {"top_entropy_quantile": 0.4, "temperature": 0.7, **TWO_STEPS},
    "entropy_of_top_tokens": {
        "top_entropy_quantile": 0.4,
        "entropy_coef": 0.1,
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef_delta": 0.05,
    },
    "furthest_tokens_left_out": {"off_policy_mask": "m2po", "off_policy_mask_settings": {"tau": 1e-4}, **TWO_STEPS},
    "drawn_tokens_left_out": {
        "loss_type": "clip_cov",
        "loss_settings": {"share": 0.2, "low": 0.0},
        "off_policy_mask": "k3",
        "off_policy_mask_settings": {"threshold": 1e-3},
        **TWO_STEPS,
    },
    "sequence_ratio": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "beta": 0.1,
        "use_bias_correction_kl": True,
        **TWO_STEPS,
    },
}


@pytest.fixture
def run(train, tools, make_policy):
    """`run((b, accumulation), **settings)` returns log and final weights; it fails if the weights hardly moved."""

    def run(split, **settings: Any):
        config = {"per_device_train_batch_size": split[0], "gradient_accumulation_steps": split[1], **settings}
        trainer = train(**config)
        final = tools.weights(trainer.model)
        assert tools.relative(final, tools.weights(make_policy())) > 1e-3
        return trainer.state.log_history, final

    return run


def assert_same(runs, tools) -> None:
    """Final weights to 1e-5 relative; every logged number of every step to 1e-4 (of 1)."""
    log, final = runs[0]
    for other_log, other in runs[1:]:
        assert tools.relative(other, final) < 1e-5
        tools.assert_like(other_log, log, 1e-4)


@pytest.mark.quick("dapo", "luspo")
@pytest.mark.parametrize(("loss_type", "optimizer"), [*((name, SGD) for name in LOSSES), ("grpo", ADAMW)], ids=str)
def test_losses_do_not_depend_on_the_micro_batch(run, tools, loss_type, optimizer):
    splits = [(16, 1), *(SPLITS if optimizer is ADAMW else [(4, 4)])]
    settings = {**loss_settings(loss_type), **TWO_STEPS, **optimizer}
    assert_same([run(split, **settings) for split in splits], tools)


@pytest.mark.quick(1)
@pytest.mark.parametrize("pair", PAIRS)
def test_estimators_and_masks_do_not_depend_on_the_micro_batch(run, tools, pair):
    runs = [run(split, **{**PAIRS[pair], **SGD}, reward_funcs=success) for split in [(16, 1), (4, 4)]]
    assert_same(runs, tools)
    shares = [entry["off_policy_mask/masked_mean"] for entry in runs[0][0] if "off_policy_mask/masked_mean" in entry]
    assert shares[0] == 0 and 0 < max(shares) < 1, "the mask acts in the second pass"


def test_the_ratio_moves_within_a_generation_batch(run):
    """Otherwise the comparisons above would only cover ratios of 1."""
    log, _ = run((8, 2), **TWO_STEPS, **ADAMW)
    moved = [entry["clip_ratio/region_mean"] for entry in log[:-1]]
    assert moved[0] == moved[2] == 0.0
    assert moved[1] > 0.05 and moved[3] > 0.05


@pytest.mark.quick("clipping_and_kl", "entropy_of_top_tokens", "masked_rows")
@pytest.mark.parametrize("optimizer", [SGD, pytest.param(STEADY_ADAMW, marks=pytest.mark.slow)], ids=["sgd", "adamw"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_do_not_depend_on_the_micro_batch(run, tools, feature, optimizer):
    assert_same([run(split, **{**optimizer, **FEATURES[feature]}) for split in [(16, 1), (4, 4)]], tools)


def test_bnpo_is_local_by_definition(run, tools):
    """The one loss whose value depends on the micro-batch: equal micro-batches give equal weights, others do not."""
    (_, whole), (_, cut) = (run(split, loss_type="bnpo", **ADAMW) for split in [(16, 1), (4, 4)])
    assert tools.relative(cut, whole) > 1e-4


@pytest.mark.slow
def test_a_generation_batch_may_be_cut_in_any_way_between_steps(run, tools):
    """Generation batches of 32 rows and steps of 8: S is 4 at one micro-batch a step, 8 at two, 16 at four."""
    splits = [(8, 1), (4, 2), (2, 4)]
    assert_same([run(split, generation_batch_size=32, max_steps=5, **ADAMW) for split in splits], tools)
    by_name = run((4, 2), steps_per_generation=8, max_steps=5, **ADAMW)
    assert_same([by_name, run((4, 2), generation_batch_size=32, max_steps=5, **ADAMW)], tools)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("splits", "settings"),
    [
        ([(8, 4), (4, 8)], {"generation_batch_size": 8, "max_steps": 2}),
        ([(8, 4), (4, 8)], {"generation_batch_size": 8, "num_iterations": 2, "max_steps": 2}),
        ([(8, 2), (4, 4)], {"generation_batch_size": 24, "max_steps": 4}),
    ],
    ids=["four batches", "two batches twice", "a batch and a half"],
)
def test_a_step_may_span_several_generation_batches(run, tools, splits, settings):
    assert_same([run(split, **settings, **ADAMW) for split in splits], tools)


def test_gradient_checkpointing_changes_nothing(run, tools):
    assert_same([run((8, 2), gradient_checkpointing=on, **ADAMW) for on in (False, True)], tools)


# ---------------------------------------------------------------------------------------- against a dense trainer


@pytest.mark.quick("dapo-rows")
@pytest.mark.parametrize(
    ("loss_type", "shuffle_rows", "system"),
    [("grpo", "groups", ""), ("dapo", "groups", ""), ("dapo", "rows", ""), ("dapo", "groups", "system" * 11)],
    ids=["grpo-groups", "dapo-groups", "dapo-rows", "system"],
)
def test_equals_a_plain_dense_trainer(
    train, make_policy, tokenizer, tools, loss_type, shuffle_rows, system, monkeypatch
):
    """Four steps of AdamW on the recorded rollouts, in two batches of two, with a KL term at temperature 0.8.

    The prompts have one system prompt or two, of which one begins with the other.
    """
    batches: list[tuple[list[list[int]], list[list[int]], list[float]]] = []

    def record(prompts, completion_ids, **kwargs):
        rewards = tools.letters_reward(completion_ids)
        batches.append(([tokenizer(p)["input_ids"] for p in prompts], completion_ids, rewards))
        return rewards

    num_copied: list[int] = []

    def counted(inputs):
        num_copied.append((inputs := with_beginnings_once(inputs)).num_copied)
        return inputs

    monkeypatch.setattr(forward, "with_beginnings_once", counted)
    policy = make_policy()
    texts = [system * (1 + row % 2) + text for row, text in enumerate(tools.PROMPTS)]
    trainer = train(
        model=policy,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        reward_funcs=record,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        loss_type=loss_type,
        shuffle_rows=shuffle_rows,
        beta=0.1,
        temperature=0.8,
        weight_decay=0.1,
        **TWO_STEPS,
        **STEADY_ADAMW,
    )

    dense, reference = make_policy(), make_policy()
    decayed = [p for n, p in dense.named_parameters() if "norm" not in n]
    others = [p for n, p in dense.named_parameters() if "norm" in n]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-6
    )
    losses = []
    for number, (prompts, completions, rewards) in enumerate(batches):
        advantages = dense_advantages(torch.tensor(rewards, dtype=torch.float64)[:, None], trainer.args).float()
        with torch.no_grad():
            old, ref = (scores(model, prompts, completions, 0.8)[0] for model in (dense, reference))
        steps = [
            [row for s in half for row in trainer.plan.slice_rows(0, s, number)] for half in (range(2), range(2, 4))
        ]
        assert (steps == [[*range(16)], [*range(16, 32)]]) is (shuffle_rows == "groups")
        for rows in steps:
            logprobs, entropy = scores(dense, [prompts[i] for i in rows], [completions[i] for i in rows], 0.8)
            width = logprobs.shape[1]
            mask = torch.arange(width)[None] < torch.tensor([len(completions[i]) for i in rows])[:, None]
            older = old[rows, :width], ref[rows, :width]
            loss = dense_loss(trainer.args, logprobs, entropy, *older, mask, advantages[rows])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
    assert len(batches) == 2
    assert (max(num_copied) > len(system)) is bool(system)
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx(losses, abs=1e-5)
    assert tools.relative(tools.weights(policy), tools.weights(dense)) < 1e-5


def test_adapters_are_sampled_in_trainings_mixed_precision(train):
    """An untouched policy scores its own samples as it sampled them; old log-probs are those of a training pass."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    trainer = train(trainer={"peft_config": adapter}, bf16=True, num_iterations=2, learning_rate=0.0, max_steps=1)
    batch, atol = trainer.buffer.batches[0], trainer.rounding.tolerance
    torch.testing.assert_close(batch.sampling_logprobs, batch.old_logprobs, rtol=0, atol=atol)


def test_training_adds_up_in_a_fixed_order_and_leaves_the_users_setting_alone(make_trainer):
    trainer, seen = make_trainer(max_steps=1), []
    trainer.model.model.layers[-1].register_full_backward_pre_hook(
        lambda *_: seen.append(torch.are_deterministic_algorithms_enabled())
    )
    trainer.train()
    assert seen and all(seen) and not torch.are_deterministic_algorithms_enabled()
