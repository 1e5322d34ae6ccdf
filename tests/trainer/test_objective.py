"""Loss and gradient of training equal the papers' equations, written out densely here, for each option of the loss.

Each case goes the whole way: fields of `GRPOConfig`, a `GRPOTrainer`, two optimizer steps on one generation batch. The
second step trains another policy than the one that sampled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import TrainerCallback

EOS = [1, *range(4, 24)]
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


class Weights(TrainerCallback):
    """The policy's weights before each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({name: value.clone() for name, value in model.state_dict().items()})


def scores(model: Any, prompts: list[list[int]], completions: list[list[int]], temperature: float) -> Any:
    """Log-probs and entropies (B, T), every row on its own, 0 where it has ended."""
    width, parts = max(map(len, completions)), []
    for prompt, completion in zip(prompts, completions):
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        everything = F.log_softmax(logits, dim=-1)
        chosen = everything.gather(1, torch.tensor(completion)[:, None])[:, 0]
        entropy = -(everything.exp() * everything).sum(-1)
        parts.append([F.pad(values, (0, width - len(completion))) for values in (chosen, entropy)])
    return tuple(torch.stack(list(values)) for values in zip(*parts))


def dense_advantages(rewards: torch.Tensor, args: Any) -> torch.Tensor:
    """(B,) from (B, R) rewards in groups of four."""
    weights = torch.tensor(args.reward_weights or [1.0] * rewards.shape[1], dtype=torch.float64)

    def about_mean(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values - values.mean(-1, keepdim=True), values.std(-1, keepdim=True) + 1e-4

    if args.multi_objective_aggregation == "normalize_then_sum":
        deviations, std = about_mean(rewards.T.reshape(-1, 4))
        deviations, std = about_mean(((deviations / std).reshape(rewards.shape[1], -1).T * weights).sum(1))
        return deviations / std
    combined = (rewards * weights).sum(1)
    deviations, std = about_mean(combined.view(-1, 4))
    if args.scale_rewards == "batch":
        std = combined.std() + 1e-4
    return (deviations / (1.0 if args.scale_rewards == "none" else std)).flatten()


def dense_loss(args: Any, logprobs: Any, entropy: Any, old: Any, ref: Any, mask: Any, advantages: Any) -> torch.Tensor:
    """The loss of a step as the papers write it, from (B, T) tensors."""

    def row_mean(values: torch.Tensor) -> torch.Tensor:
        return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)

    a, kind, tokens = advantages[:, None], args.loss_type, mask.sum()
    log_ratio = (logprobs - old) * mask
    ratio = log_ratio.exp()
    if args.importance_sampling_level == "sequence":
        ratio = row_mean(log_ratio).exp().expand_as(logprobs)
    if kind == "cispo":
        term = -ratio.detach().clamp(max=args.epsilon_high) * a * logprobs
    elif kind == "sapo":
        tau = torch.where(a > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        term = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    elif kind == "vespo":
        log_weight = log_ratio.sum(1, keepdim=True).detach()
        k = torch.where(a >= 0, args.vespo_k_pos, args.vespo_k_neg)
        decay = torch.where(a >= 0, args.vespo_lambda_pos, args.vespo_lambda_neg)
        term = -(decay + k * log_weight - decay * log_weight.exp()).exp() * a * logprobs
    else:
        high = args.epsilon if args.epsilon_high is None else args.epsilon_high
        bounded = ratio if args.delta is None else ratio.clamp(max=args.delta)
        term = -torch.minimum(bounded * a, ratio.clamp(1 - args.epsilon, 1 + high) * a)
    keep = mask
    if args.top_entropy_quantile < 1:
        keep = keep & (entropy >= torch.quantile(entropy[mask].detach(), 1 - args.top_entropy_quantile) - 1e-5)
    if args.off_policy_mask_threshold is not None:
        keep = keep & ((a >= 0) | (row_mean(old - logprobs) <= args.off_policy_mask_threshold))
    kl = (ref - logprobs).exp() - (ref - logprobs) - 1
    kl = kl * ratio if args.use_bias_correction_kl else kl
    term = (torch.where(keep, term, 0.0) + args.beta * kl) * mask
    loss = {
        "grpo": lambda: row_mean(term).mean(),
        "sapo": lambda: row_mean(term).mean(),
        "luspo": lambda: term.sum() / len(term),
        "dr_grpo": lambda: term.sum() / (len(term) * args.max_completion_length),
    }.get(kind, lambda: term.sum() / tokens)()
    return loss - args.entropy_coef * (entropy * mask).sum() / tokens


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

    weights = Weights()
    trainer = train(
        reward_funcs=[length, last],
        learning_rate=3e-2,
        temperature=0.8,
        trainer={"callbacks": [weights]},
        **{**RUN, **CASES[case]},
    )
    (texts, completions, first), (_, _, second) = seen
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    args, advantages = trainer.args, dense_advantages(torch.stack([first, second], dim=1), trainer.args)
    lengths = torch.tensor(
        [0 if args.mask_truncated_completions and ids[-1] not in EOS else len(ids) for ids in completions]
    )
    mask = torch.arange(max(map(len, completions)))[None] < lengths[:, None]
    dense = make_policy().double()
    old = None
    for state, entry in zip(weights.steps, trainer.state.log_history):
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
    assert len(weights.steps) == trainer.state.global_step
