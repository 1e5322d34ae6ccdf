"""The records that flow through a training step. They hold data and depend on no model, config or rank.

Legend of shapes, the same in every file: ``Q`` distinct prompts, ``G`` completions a group, ``N = Q*G`` rows on all
ranks, ``B`` rows here, ``L`` completion tokens here (all rows end to end), ``P`` prompt tokens here (all distinct
prompts end to end), ``R`` reward functions, ``V`` vocabulary, ``H`` hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch

from groupgrad.metrics import Metric

FinishReason = Literal["eos", "length", "tool_budget", "context", "tool_limit", "error"]

Messages = list[dict[str, Any]]

Reward = float | None | list[float | None]
"""The reward of a rollout, or of each of its turns; None for no reward."""


@dataclass(slots=True, frozen=True, eq=False)
class Media:
    """The images of one prompt, decoded and processed once, kept in host memory, never edited."""

    images: tuple[Any, ...]
    """PIL images in the order of their places in the prompt."""
    tensors: dict[str, torch.Tensor]
    """The processor's tensors of the images (`pixel_values`, `image_grid_thw`, ...), of this prompt alone, on the CPU,
    with the first dimension that the processor gives."""
    token_tensors: dict[str, torch.Tensor]
    """Tensors (P_i,) that the processor makes for the prompt tokens, such as `token_type_ids` and
    `mm_token_type_ids`; they are 0 for completion tokens."""
    key: str
    """Digest of the images' content: two media with the same key are the same."""


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of the data set, tokenised once, shared by all completions of its group."""

    ids: list[int]
    """Token ids that the model is given, template and generation prompt included."""
    row: dict[str, Any]
    """The data-set row as it is, `prompt` included; its other columns reach the reward functions."""
    group: int
    """Number of the group in the generation batch, 0 to U-1, the same on all ranks."""
    media: Media | None = None
    """Images that belong to the prompt, or None."""

    @property
    def identity(self) -> tuple[tuple[int, ...], str]:
        """Equal for prompts that the model cannot tell apart."""
        return tuple(self.ids), "" if self.media is None else self.media.key

    @property
    def is_conversational(self) -> bool:
        """True if the row's prompt is a list of messages rather than a text."""
        return not isinstance(self.row["prompt"], str)


@dataclass(slots=True, frozen=True)
class ToolUse:
    """One tool call that was answered."""

    name: str
    failed: bool
    """The tool raised, ran out of time, was not there, or its arguments did not fit."""
    timed_out: bool
    seconds: float
    """Wall-clock seconds that the tool ran."""


@dataclass(slots=True, frozen=True)
class Trace:
    """Counts of an agent's rollout."""

    num_turns: int
    """Times that the model was asked."""
    tool_uses: list[ToolUse] = field(default_factory=list[ToolUse])
    """In the order of the calls."""
    wait_s: float = 0.0
    """Wall-clock seconds that it waited for tools and its environment."""
    hidden_s: float = 0.0
    """Seconds of `wait_s` during which the engine worked for other rollouts."""
    problem: str = ""
    """Why it ended as `error`, or what its environment failed at; empty if nothing did."""
    numbers: dict[str, float] = field(default_factory=dict[str, float])
    """Numbers that a program logged of it, by name."""


@dataclass(slots=True, frozen=True)
class Branch:
    """A part of a completion that continues tokens of its own, not the prompt and the tokens before it.

    An agent makes one where it drops or edits earlier messages, asks the same question again, or begins a sub-agent.
    """

    start: int
    """Place of its first token in the completion; it reaches to the next branch or to the end."""
    context: tuple[int, ...]
    """Token ids that the model read before its first token, at least one."""


@dataclass(slots=True, frozen=True)
class Rollout:
    """One finished completion. Made once, never edited."""

    prompt: Prompt
    index: int
    """Row number in the generation batch, 0 to N-1, the same on all ranks; `index // G` is the group."""
    completion_ids: list[int]
    """Token ids after the prompt; may be empty. The EOS that ended it, if any, is included."""
    finish_reason: FinishReason
    """Why it ended. Anything but `eos` counts as truncated."""
    completion: str | Messages
    """Text for a text prompt, messages for a conversational one. Tools' results are as the model read them."""
    text: str
    """The completion decoded, without special tokens unless `special_tokens_in_completions` keeps them."""
    sampled: list[bool] | None = None
    """Which completion tokens the policy sampled (tool output is not); None means all of them."""
    sampling_logprobs: list[float] | None = None
    """Log-probability (nats, temperature applied) that the engine gave each token; None if it gives none."""
    sampling_entropy: list[float] | None = None
    """Entropy (nats) of the distribution that the engine drew each token from; None if it gives none."""
    temperatures: list[float] | None = None
    """Sampling temperature of each token, where a program asked for its own; NaN: the policy's. None: the policy's for
    all."""
    policy_version: int = 0
    """Optimizer step whose weights sampled it; the earliest, where they changed meanwhile."""
    policy_versions: list[int] | None = None
    """Optimizer step whose weights sampled each token; None if it is `policy_version` for all. A token that the policy
    did not sample has the step of the token before it."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further values for the reward functions, by argument name."""
    tool_results: dict[int, Any] = field(default_factory=dict[int, Any])
    """Results of tools as reward functions get them, by their places in `completion`, where the model read another
    form."""
    environment_rewards: dict[str, Reward] = field(default_factory=dict[str, "Reward"])
    """Rewards that the rollout brings with it, by the name of their column (its environment's)."""
    states: list[str] | None = None
    """A digest of the environment's state before each turn; None if it was not read."""
    branches: tuple[Branch, ...] = ()
    """Parts of the completion that continue other tokens, by their starts."""
    trace: Trace | None = None
    """Turns, calls and failures of an agent's rollout; None for a rollout of one turn."""
    media: Media | None = None
    """All images of prompt and completion if tools put some into the completion, else None. Its token tensors reach
    from the prompt's first token to the last image or beyond."""

    @property
    def scored_completion(self) -> str | Messages:
        """The completion as reward functions get it."""
        if not self.tool_results or isinstance(self.completion, str):
            return self.completion
        messages = list(self.completion)
        for place, result in self.tool_results.items():
            messages[place] = {**messages[place], "content": result}
        return messages

    @property
    def is_scorable(self) -> bool:
        """True unless it failed: a failed rollout gets no reward at all."""
        return self.finish_reason != "error"

    @property
    def is_truncated(self) -> bool:
        """True if it ended for another reason than an end-of-sequence token."""
        return self.finish_reason != "eos"

    @property
    def turns(self) -> list[tuple[int, int]]:
        """The first and last place (exclusive) of each turn: a run of completion tokens that the policy sampled, which
        ends where a branch begins."""
        sampled = [True] * len(self.completion_ids) if self.sampled is None else self.sampled
        bounds = [place for place, (before, now) in enumerate(pairwise([False, *sampled, False])) if before != now]
        inside = [
            b.start for b in self.branches if 0 < b.start < len(sampled) and all(sampled[b.start - 1 : b.start + 1])
        ]
        bounds = sorted([*bounds, *inside, *inside])
        return list(zip(bounds[::2], bounds[1::2]))

    @property
    def num_sampled(self) -> int:
        """Completion tokens that the policy itself produced."""
        return len(self.completion_ids) if self.sampled is None else sum(self.sampled)


@dataclass(slots=True)
class RewardTable:
    """Rewards of some rollouts, and what the functions logged of them."""

    rewards: torch.Tensor
    """(B, R) float64; NaN where a function gave no reward for the row."""
    names: list[str]
    """R distinct names, the keys of the metrics."""
    columns: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Extra columns for the completions table, one value a row (None where a function logged none)."""
    metrics: dict[str, Metric] = field(default_factory=dict[str, Metric])
    """Scalars logged by the reward functions."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Wall-clock seconds of each function's call, by its name."""
    by_turn: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Rows whose turns were scored -> (T, R) float64 rewards of their turns, NaN where a function gave none; a reward
    of the whole rollout stands at its last turn. `rewards` has the sums."""


@dataclass(slots=True, frozen=True)
class Turns:
    """The turns of a rollout, for an estimator that credits each of them."""

    lengths: list[int]
    """Tokens that the policy sampled in each of the T turns."""
    rewards: torch.Tensor
    """(T, R) float64, NaN where a function gave none; a reward of the whole rollout stands at the last turn."""
    states: list[str]
    """Equal for turns that begin in equal states."""
