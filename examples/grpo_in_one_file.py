"""GRPO in one file: samples, scores and trains a small model in a linear loop.

    python examples/grpo_in_one_file.py [--steps 120] [--seed 0]

The model is given one of eight letters and shall answer with that letter, six times. It starts from random weights and
learns this from rewards alone, on a CPU in less than a minute. All of the algorithm is here but its
arithmetic, which is `groupgrad.objectives`: advantages from rewards, and the policy loss of a batch.

What `groupgrad.GRPOTrainer` adds to these lines:

- sampling by an engine with a key-value cache shared by the group, continuous batching and exact log-probs, or by vLLM;
- a layout that computes each prompt once a group and no padding, and a head that never keeps the logits;
- micro-batches, gradient accumulation and several processes, all with the same result;
- several optimizer steps on one generation batch (`num_iterations`), a reference model, adapters, images, agents;
- data sets, chat templates, reward functions of every kind, logs, checkpoints, evaluation, and checks of all settings.
"""

from __future__ import annotations

import argparse

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from groupgrad.objectives import (
    Batch,
    PolicyOptions,
    StepTotals,
    TokenScores,
    compute_advantages,
    offsets_of,
    policy_loss,
    rows_of,
)

PAD, EOS, FIRST_LETTER, NUM_LETTERS = 0, 1, 2, 8
NUM_PROMPTS, NUM_GENERATIONS, MAX_TOKENS = 8, 16, 6


def make_model(seed: int) -> Qwen3ForCausalLM:
    """A random model of about 40 thousand parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=FIRST_LETTER + NUM_LETTERS,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: torch.Tensor) -> list[list[int]]:
    """`NUM_GENERATIONS` completions for each prompt (Q, P), group after group; the EOS that ends one is included."""
    tokens = prompts.repeat_interleave(NUM_GENERATIONS, dim=0)
    for _ in range(MAX_TOKENS):
        logits = model(tokens).logits[:, -1]
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    completions = tokens[:, prompts.shape[1] :].tolist()
    return [ids[: ids.index(EOS) + 1] if EOS in ids else ids for ids in completions]


def reward(prompt: list[int], completion: list[int]) -> float:
    """Number of tokens that are the prompt's letter, as a share of `MAX_TOKENS`."""
    return completion.count(prompt[-1]) / MAX_TOKENS


def make_batch(prompts: torch.Tensor, completions: list[list[int]], advantages: torch.Tensor) -> Batch:
    """The completions end to end and each prompt once; the step has this batch alone, so the totals are its own."""
    offsets = offsets_of(torch.tensor([len(ids) for ids in completions]))
    tokens = torch.tensor([token for ids in completions for token in ids])
    return Batch(
        completion_ids=tokens,
        row_of_token=rows_of(offsets),
        offsets=offsets,
        prompt_ids=prompts.flatten(),
        prompt_offsets=torch.arange(len(prompts) + 1) * prompts.shape[1],
        prompt_of_row=torch.arange(len(prompts)).repeat_interleave(NUM_GENERATIONS),
        trained=torch.ones(len(tokens), dtype=torch.bool),
        advantages=advantages.float(),
        totals=StepTotals(rows=len(completions), tokens=len(tokens)),
    )


def score(model: Qwen3ForCausalLM, prompts: torch.Tensor, batch: Batch) -> TokenScores:
    """Log-probs and entropies (nats) of the completion tokens, from one padded forward pass."""
    rows = prompts[batch.prompt_of_row]
    places = torch.arange(batch.num_tokens) - batch.offsets[batch.row_of_token] + prompts.shape[1]
    padded = torch.full((batch.num_rows, prompts.shape[1] + MAX_TOKENS), PAD)
    padded[:, : prompts.shape[1]] = rows
    padded[batch.row_of_token, places] = batch.completion_ids
    # The logits at a place predict the next one. Padding on the right cannot reach a token on its left.
    logprobs = model(padded).logits[batch.row_of_token, places - 1].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TokenScores(logprobs.gather(-1, batch.completion_ids[:, None]).squeeze(-1), entropy)


def train(steps: int, seed: int) -> list[float]:
    """The mean reward of each step."""
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    options = PolicyOptions(loss_type="dapo", max_completion_length=MAX_TOKENS)
    history: list[float] = []
    for step in range(steps):
        prompts = torch.randint(FIRST_LETTER, FIRST_LETTER + NUM_LETTERS, (NUM_PROMPTS, 1))
        completions = sample(model, prompts)
        rewards = torch.tensor(
            [[reward(prompts[row // NUM_GENERATIONS].tolist(), ids)] for row, ids in enumerate(completions)]
        )
        advantages = compute_advantages(rewards.double(), torch.ones(1, dtype=torch.float64), NUM_GENERATIONS)
        batch = make_batch(prompts, completions, advantages.advantages)
        result = policy_loss(score(model, prompts, batch), batch, options)
        optimizer.zero_grad()
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(float(rewards.mean()))
        if step % 20 == 0 or step == steps - 1:
            entropy = result.metrics["entropy"].read()
            print(f"step {step:3d}  reward {history[-1]:.3f}  entropy {entropy:.3f} nats")
    return history


def main() -> None:
    """Train, and exit with 1 if the reward did not rise."""
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    history = train(options.steps, options.seed)
    raise SystemExit(0 if history[-1] > history[0] + 0.3 else 1)


if __name__ == "__main__":
    main()
