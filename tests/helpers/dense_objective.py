"""Advantages and losses as the papers write them, dense: one row a completion, padded on the right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


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
