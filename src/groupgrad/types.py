"""The records that flow through a training step. They hold data and know nothing of models, configs or ranks.

Legend of shapes, the same in every file: ``Q`` distinct prompts, ``G`` completions a group, ``N = Q*G`` rows on all
ranks, ``B`` rows here, ``L`` completion tokens here (all rows end to end), ``P`` prompt tokens here (all distinct
prompts end to end), ``R`` reward functions, ``V`` vocabulary, ``H`` hidden size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from groupgrad.metrics import Metric

FinishReason = Literal["eos", "length", "tool_budget", "context", "tool_limit", "error"]

Messages = list[dict[str, Any]]


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of the data set, tokenised once, shared by all completions of its group."""

    ids: list[int]
    """Token ids that the model is given, template and generation prompt included."""
    row: dict[str, Any]
    """The data-set row as it is, `prompt` included; its other columns reach the reward functions."""
    group: int
    """Number of the group in the generation round, 0 to U-1, the same on all ranks."""
    media: Any = None
    """Images that belong to the prompt, or None."""

    @property
    def is_conversational(self) -> bool:
        """True if the row's prompt is a list of messages rather than a text."""
        return not isinstance(self.row["prompt"], str)


@dataclass(slots=True, frozen=True)
class Rollout:
    """One finished completion. Made once, never edited."""

    prompt: Prompt
    index: int
    """Row number in the generation round, 0 to N-1, the same on all ranks; `index // G` is the group."""
    completion_ids: list[int]
    """Token ids after the prompt; may be empty. The EOS that ended it, if any, is included."""
    finish_reason: FinishReason
    """Why it ended. Anything but `eos` counts as truncated."""
    completion: str | Messages
    """What reward functions see: text for a text prompt, messages for a conversational one."""
    text: str
    """The completion decoded without special tokens."""
    sampled: list[bool] | None = None
    """Which completion tokens the policy sampled (tool output is not); None means all of them."""
    sampling_logprobs: list[float] | None = None
    """Log-probability (nats, temperature applied) that the engine gave each token; None if it gives none."""
    policy_version: int = 0
    """Optimizer step whose weights sampled it."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further values for the reward functions, by argument name."""

    @property
    def is_truncated(self) -> bool:
        """True if it ended for another reason than an end-of-sequence token."""
        return self.finish_reason != "eos"

    @property
    def num_sampled(self) -> int:
        """Completion tokens that the policy itself produced."""
        return len(self.completion_ids) if self.sampled is None else sum(self.sampled)


@dataclass(slots=True)
class RewardTable:
    """What the reward functions said of some rollouts."""

    rewards: torch.Tensor
    """(B, R) float64; NaN where a function gave no reward for the row."""
    names: list[str]
    """R distinct names, the keys of the metrics."""
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Extra columns for the completions table, one value a row (None where a function logged none)."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    """Scalars logged by the reward functions."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Wall-clock seconds spent in each function, by name."""


@dataclass(slots=True, frozen=True)
class StepTotals:
    """Denominators of the optimizer step that a micro-batch belongs to, over all ranks and micro-batches."""

    rows: float
    """Completions in the optimizer step, truncated and masked ones included."""
    tokens: float
    """Loss tokens (`trained`) in the optimizer step."""
    micro_batches: int = 1
    """Micro-batches of this rank in the optimizer step."""
    world_size: int = 1
    """Ranks whose gradients are averaged."""
    entropy_threshold: float | None = None
    """Entropy (nats) from which a token of the step is kept, when only the most uncertain tokens are trained."""
    entropy_tokens: float | None = None
    """Loss tokens of the step at or above `entropy_threshold`."""


@dataclass(slots=True)
class Batch:
    """A ragged micro-batch: all completions end to end, each distinct prompt once. Nothing is padded."""

    completion_ids: torch.Tensor
    """(L,) int64."""
    row_of_token: torch.Tensor
    """(L,) int64, the row that each completion token belongs to, ascending."""
    offsets: torch.Tensor
    """(B+1,) int64, row i owns tokens offsets[i]:offsets[i+1]; rows may be empty."""
    prompt_ids: torch.Tensor
    """(P,) int64, the distinct prompts end to end."""
    prompt_offsets: torch.Tensor
    """(Q+1,) int64."""
    prompt_of_row: torch.Tensor
    """(B,) int64, which prompt each row continues."""
    trained: torch.Tensor
    """(L,) bool, the loss mask m: sampled by the policy and not masked out as truncated."""
    advantages: torch.Tensor
    """(B,) float32."""
    totals: StepTotals
    old_logprobs: torch.Tensor | None = None
    """(L,) float32, policy at sampling time; None means "the present policy" (ratio 1)."""
    ref_logprobs: torch.Tensor | None = None
    """(L,) float32, reference model; None if no KL term is used."""
    sampling_logprobs: torch.Tensor | None = None
    """(L,) float32, as the sampling engine reported them, NaN where it reported none; None if it never does."""
    row_index: torch.Tensor | None = None
    """(B,) int64, the rows' numbers in the generation round."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.advantages.shape[0]

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.completion_ids.shape[0]

    @property
    def num_forward_tokens(self) -> int:
        """Tokens that a forward pass sees when each row is computed with its own copy of the prompt."""
        return int(self.prompt_offsets.diff()[self.prompt_of_row].sum()) + self.num_tokens

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with every tensor on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        return dataclasses.replace(self, **moved)


@dataclass(slots=True)
class TokenScores:
    """What a model says of the completion tokens of a batch."""

    logprobs: torch.Tensor
    """(L,) float32, log-probability (nats) of each completion token at the sampling temperature."""
    entropy: torch.Tensor
    """(L,) float32, entropy (nats) of the distribution that each token was drawn from."""
    aux_loss: torch.Tensor | None = None
    """() load-balancing loss of a mixture of experts, or None."""
