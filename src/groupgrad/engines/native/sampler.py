"""Choosing tokens: each row by its own random stream, with the log-prob that training will give the token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from groupgrad.engines.base import Request
from groupgrad.engines.native.cpp_step import UnfilteredSampling
from groupgrad.engines.native.sampling_params import SamplingParams
from groupgrad.kernels import library
from groupgrad.kernels.choose import Choice, choose, score

TILE = 1 << 19
"""Logits that are worked on at a time on a CPU: with their exponentials they stay in its cache."""

BLOCK = 128
"""Neighbouring tokens whose probabilities are summed before a choice is looked for among the sums."""

_BELOW_ONE = 1.0 - 2**-52


@dataclass(slots=True, frozen=True)
class Numbers:
    """What was noted of a request's tokens."""

    logprobs: list[float]
    entropies: list[float]


class Sampler:
    """The random streams of requests under way, and what was chosen for them.

    Each request has a row in tables of draws, log-probs and entropies from `add` to `take_out`; rows are used again.
    """

    def __init__(self, choosing: SamplingParams, device: torch.device):
        self._choosing, self.device = choosing, device
        self._draws = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.logprobs = torch.zeros(0, 0, dtype=torch.float32, device=device)
        """(rows, longest) of the tokens chosen so far."""
        self.entropies = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._free: list[int] = []
        self._seen: torch.Tensor | None = None
        self._unseen: dict[int, list[int]] = {}
        """Prompts that are not in `_seen` yet, by row."""
        self._warpers = _warpers(choosing)
        self._scratch: dict[str, torch.Tensor] = {}
        self._id_masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._library = library() if device.type == "cpu" else None
        self._kernels = None if choosing.greedy or choosing.is_cut else self._library
        """Those that choose tokens, where a draw is all that a choice needs."""

    def add(self, requests: Sequence[Request]) -> list[int]:
        """The rows of requests that begin; everything before their first token counts as their prompts."""
        if not requests:
            return []
        longest = max(request.max_new_tokens for request in requests)
        self._grow(len(requests) - len(self._free), longest)
        rows, self._free = self._free[: len(requests)], self._free[len(requests) :]
        draws = torch.zeros(len(requests), longest, dtype=torch.float64)
        for row, request in zip(draws, requests):
            stream = torch.Generator().manual_seed(request.seed)
            row[: request.max_new_tokens] = torch.rand(request.max_new_tokens, generator=stream, dtype=torch.float64)
        self._draws[torch.tensor(rows, device=self.device), :longest] = draws.to(self.device)
        if self._choosing.repetition_penalty != 1.0:
            self._unseen.update(zip(rows, (request.prompt_ids for request in requests)))
        return rows

    def _grow(self, num_more: int, longest: int) -> None:
        """At least so many more rows, for requests of up to `longest` tokens; the tables double at least."""
        height, width = self._draws.shape
        new_height = max(height + num_more, 2 * height) if num_more > 0 else height
        new_width = max(longest, 2 * width) if longest > width else width
        if (new_height, new_width) == (height, width):
            return
        self._free += range(height, new_height)
        self._draws, self.logprobs, self.entropies = (
            F.pad(table, (0, new_width - width, 0, new_height - height))
            for table in (self._draws, self.logprobs, self.entropies)
        )

    def take_out(self, rows: Sequence[int], counts: Sequence[int]) -> list[Numbers]:
        """What was noted of the first `counts` tokens of requests that have ended; their rows are free afterwards."""
        at, longest = torch.tensor(rows, device=self.device), max(counts)
        logprobs, entropies = self.logprobs[at, :longest].tolist(), self.entropies[at, :longest].tolist()
        self._free += rows
        return [Numbers(p[:count], e[:count]) for p, e, count in zip(logprobs, entropies, counts)]

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n,) tokens that follow, from logits (n, V), for the requests `rows` (n,) that have `counts` (n,) tokens."""
        draws = self._draws[rows, counts]
        chosen = choose(self._kernels, logits, self._choosing.temperature, draws) if self._kernels else None
        if chosen is None:
            chosen = self._choose_in_tiles(logits, draws, rows, counts)
        self.logprobs[rows, counts] = chosen.logprobs
        self.entropies[rows, counts] = chosen.entropies
        if self._seen is not None:
            self._seen[rows, chosen.tokens] = True
        return chosen.tokens

    def free(self, rows: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor) -> UnfilteredSampling | None:
        """How the next tokens of the requests `rows` (n,) that have `counts` (n,) are chosen; None if a choice needs
        more than a draw."""
        if self._kernels is None:
            return None
        return UnfilteredSampling(
            self._draws, self.logprobs, self.entropies, self._choosing.temperature, rows, counts, ends
        )

    def _choose_in_tiles(
        self, logits: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> Choice:
        height = logits.shape[0] if logits.device.type != "cpu" else max(1, TILE // logits.shape[1])
        parts = [
            self._choose_tile(logits[at], draws[at], rows[at], counts[at])
            for at in (slice(i, i + height) for i in range(0, logits.shape[0], height))
        ]
        return Choice(*(parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))))

    def _choose_tile(
        self, logits: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probs and entropies, each (n,)."""
        choosing, logits = self._choosing, logits.float()
        own = None
        if choosing.greedy:
            tokens = (self._cut(logits, rows, counts) if choosing.is_cut else logits).argmax(dim=-1)
        elif choosing.is_cut:
            tokens = _invert(self._spread(self._cut(logits, rows, counts), 1.0), draws)
        else:
            own = self._spread(logits, choosing.temperature)
            tokens = _invert(own, draws)
        # Logits that are no numbers find no place; `NativeEngine.sample` reports them by their log-probs.
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
        if self._library is not None and (found := score(self._library, logits, choosing.temperature, tokens)):
            return found.tokens, found.logprobs, found.entropies
        spread = self._spread(logits, choosing.temperature) if own is None else own
        total = spread.sums.sum(dim=-1)
        log_total = total.log()
        entropies = log_total - spread.weighted_sum().div_(total)
        chosen = logits.gather(-1, tokens[:, None]).sub_(spread.peak).div_(choosing.temperature).squeeze(-1)
        return tokens, chosen.double().sub_(log_total).float(), entropies.float()

    def _spread(self, logits: torch.Tensor, temperature: float) -> _Spread:
        num_rows, size = logits.shape
        peak = logits.amax(dim=-1, keepdim=True)
        padded = self._buffer("shifted", logits), self._buffer("weights", logits)
        shifted = torch.sub(logits, peak, out=padded[0][:, :size])
        if temperature != 1.0:
            shifted.div_(temperature)
        torch.exp(shifted, out=padded[1][:, :size])
        return _Spread(peak, *padded, padded[1].view(num_rows, -1, BLOCK).sum(dim=-1).double())

    def _buffer(self, name: str, logits: torch.Tensor) -> torch.Tensor:
        """(n, V rounded up to whole blocks) of scratch that starts as zeros; the same memory for every tile."""
        num_rows, width = logits.shape[0], -(-logits.shape[1] // BLOCK) * BLOCK
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape[0] < num_rows or buffer.shape[1] != width:
            buffer = self._scratch[name] = torch.zeros(num_rows, width, device=logits.device)
        return buffer[:num_rows]

    def _cut(self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The scores to draw from: -inf for what must not come, in the order in which `generate` cuts."""
        choosing = self._choosing
        scores = logits.clone()
        if choosing.repetition_penalty != 1.0:
            seen = self._seen_on(logits)[rows]
            penalised = torch.where(
                scores < 0, scores * choosing.repetition_penalty, scores / choosing.repetition_penalty
            )
            scores = torch.where(seen, penalised, scores)
        if choosing.min_new_tokens:
            self._forbid(scores, choosing.eos_ids, counts < choosing.min_new_tokens)
        self._forbid(scores, choosing.suppressed, None)
        self._forbid(scores, choosing.suppressed_first, counts == 0)
        if choosing.greedy:
            return scores
        if choosing.temperature != 1.0:
            scores = scores / choosing.temperature
        for warper in self._warpers:
            scores = warper(None, scores)  # pyright: ignore[reportArgumentType]
        return scores

    def _forbid(self, scores: torch.Tensor, ids: tuple[int, ...], where: torch.Tensor | None) -> None:
        """Minus infinity for the tokens `ids` in the rows `where` (n,) bool, or in all."""
        if not ids:
            return
        if ids not in self._id_masks:
            # Ids past the vocabulary can't come anyway.
            mask = torch.zeros(scores.shape[1], dtype=torch.bool)
            mask[[token for token in ids if 0 <= token < len(mask)]] = True
            self._id_masks[ids] = mask.to(scores.device)
        mask = self._id_masks[ids]
        scores.masked_fill_(mask if where is None else where[:, None] & mask, float("-inf"))

    def _seen_on(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows, V) bool, the tokens that are in a request's prompt or completion."""
        height = self._draws.shape[0]
        if self._seen is None:
            self._seen = torch.zeros(height, logits.shape[1], dtype=torch.bool, device=logits.device)
        if len(self._seen) < height:
            self._seen = F.pad(self._seen, (0, 0, 0, height - len(self._seen)))
        for row, prompt_ids in self._unseen.items():
            self._seen[row] = False
            self._seen[row, torch.tensor(prompt_ids, device=logits.device)] = True
        self._unseen = {}
        return self._seen


def _warpers(choosing: SamplingParams) -> list[LogitsProcessor]:
    """The cuts of the distribution after temperature, in `generate`'s order."""
    warpers: list[LogitsProcessor] = []
    if choosing.top_k:
        warpers.append(TopKLogitsWarper(top_k=choosing.top_k))
    if choosing.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=choosing.top_p))
    if choosing.min_p:
        warpers.append(MinPLogitsWarper(min_p=choosing.min_p))
    return warpers


@dataclass(slots=True)
class _Spread:
    """A distribution over tokens, up to a factor. Blocks are `BLOCK` neighbouring tokens; the last one may be padded.

    Sums over blocks are taken in float32 and those over the vocabulary in float64: a float32 sum over a large
    vocabulary would be wrong in the sixth digit.
    """

    peak: torch.Tensor
    """(n, 1) of the logits."""
    shifted: torch.Tensor
    """(n, padded V) scaled logits less their peak, 0 in the padding; spoilt by `weighted_sum`."""
    weights: torch.Tensor
    """(n, padded V) their exponentials, 0 in the padding."""
    sums: torch.Tensor
    """(n, blocks) float64, of the weights."""

    def weighted_sum(self) -> torch.Tensor:
        """(n,) float64, the sum of weights times shifted logits."""
        products = self.shifted.mul_(self.weights)
        return products.view(len(products), -1, BLOCK).sum(dim=-1).sum(dim=-1, dtype=torch.float64)


def _invert(spread: _Spread, draws: torch.Tensor) -> torch.Tensor:
    """(n,) the first tokens whose cumulative share exceeds the uniform `draws` (n,): first the block, then in it."""
    cumulative = spread.sums.cumsum(dim=-1)
    # A product may round up to the sum, which no token exceeds.
    target = (draws.clamp(max=_BELOW_ONE) * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    mass = spread.sums.gather(-1, block)
    share = ((target - cumulative.gather(-1, block) + mass) / mass).clamp_(0.0, _BELOW_ONE)
    blocks = spread.weights.view(len(draws), -1, BLOCK)
    within = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    found = torch.searchsorted(within, share * within[:, -1:], right=True)
    return (block * BLOCK + found).squeeze(-1)
