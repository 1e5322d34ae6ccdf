"""Loss and gradient of training equal the papers' equations, written out densely here, for each option of the loss.

Each case goes the whole way: fields of `GRPOConfig`, a `GRPOTrainer`, two optimizer steps on one generation batch. The
second step trains another policy than the one that sampled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_objective import dense_advantages, dense_loss, scores
from small_runs import EOS
from step_events import At

RUN = {"max_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    # One width for both sides, and no other option.
    "dapo": {"epsilon": 0.1},
    "dapo: on policy": {"num_iterations": 1, "max_steps": 1},
    "dapo: two widths, KL": {"epsilon": 0.05, "epsilon_high": 0.4, "beta": 0.2, "scale_rewards": "none"},
    "dapo: unbiased KL": {
        "beta": 0.5,
        "use_bias_correction_kl": True,
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "grpo: ceiling, mask, batch scale": {
        "loss_type": "grpo",
        "epsilon_high": 0.3,
        "delta": 1.35,
        "mask_truncated_completions": True,
        "scale_rewards": "batch",
        "reward_weights": [1.0, -0.5],
    },
    "grpo: ratio of sequences": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02},
    "dr_grpo: uncertain tokens": {"loss_type": "dr_grpo", "top_entropy_quantile": 0.5},
    "luspo: off-policy mask": {
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "off_policy_mask_threshold": 0.02,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0},
    "vespo": {
        "loss_type": "vespo",
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 0.5,
        "vespo_k_neg": 0.7,
        "vespo_lambda_neg": 1.5,
    },
    "entropy bonus": {"entropy_coef": 0.1},
}


def clipped_share(args: Any, log_ratio: torch.Tensor, mask: torch.Tensor, a: torch.Tensor) -> float:
    """The share of loss tokens that the clip takes the gradient from; of sequences, for a ratio of sequences."""
    if args.importance_sampling_level == "sequence":
        log_ratio, mask = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True), mask[:, :1]
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    low_side, high_side = log_ratio.exp() < 1 - args.epsilon, log_ratio.exp() > 1 + high
    return ((low_side & (a < 0)) | (high_side & (a > 0)))[mask].double().mean().item()


@pytest.mark.quick("dapo: two widths, KL", "entropy bonus", "vespo", "luspo: off-policy mask")
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_of_two_steps(train, make_policy, tokenizer, case):
    seen: list[tuple[list[str], list[list[int]], torch.Tensor]] = []

    def length(prompts, completion_ids, **kwargs):
        values = [float(len(ids) % 3) + ids[0] % 2 for ids in completion_ids]
        seen.append((prompts, completion_ids, torch.tensor(values, dtype=torch.float64)))
        return values

    def last(completion_ids, **kwargs):
        seen.append(([], completion_ids, torch.tensor([ids[-1] % 7 / 3 for ids in completion_ids]).double()))
        return seen[-1][2].tolist()

    weights: list[dict[str, torch.Tensor]] = []
    keep = lambda at: weights.append({name: value.clone() for name, value in at.model.state_dict().items()})  # noqa: E731
    trainer = train(
        reward_funcs=[length, last],
        learning_rate=3e-2,
        temperature=0.8,
        trainer={"callbacks": [At("on_step_begin", keep)]},
        **{**RUN, **CASES[case]},
    )
    (texts, completions, first), (_, _, second) = seen
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    args, advantages = trainer.args, dense_advantages(torch.stack([first, second], dim=1), trainer.args)
    lengths = [0 if args.mask_truncated_completions and ids[-1] not in EOS else len(ids) for ids in completions]
    mask = torch.arange(max(map(len, completions)))[None] < torch.tensor(lengths)[:, None]
    dense = make_policy().double()
    old = None
    for state, entry in zip(weights, trainer.state.log_history):
        dense.load_state_dict(state)
        dense.zero_grad()
        logprobs, entropy = scores(dense, prompts, completions, 0.8)
        old = logprobs.detach() if old is None else old  # the policy that sampled, which is the reference too
        loss = dense_loss(args, logprobs, entropy, old, old, mask, advantages)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in dense.parameters() if p.grad is not None]).norm()
        assert entry["loss"] == pytest.approx(loss.item(), abs=2e-5)
        assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert entry["entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-4)
        if "clip_ratio/region_mean" in entry:
            share = clipped_share(args, logprobs - old, mask, advantages[:, None])
            assert entry["clip_ratio/region_mean"] == pytest.approx(share, abs=1e-6)
    assert len(weights) == trainer.state.global_step
