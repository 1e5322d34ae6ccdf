"""Choosing tokens: each row by its own random stream, with the log-prob that training will give the token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from groupgrad.engines.base import Request
from groupgrad.engines.native.options import Choosing

TILE = 1 << 19
"""Logits that are worked on at a time on a CPU: with their exponentials they stay in its cache."""

BLOCK = 128
"""Neighbouring tokens whose probabilities are summed before a choice is looked for among the sums."""


class Sampler:
    """The random streams of a number of requests, and what was chosen for them."""

    def __init__(self, requests: Sequence[Request], choosing: Choosing, device: torch.device):
        self._choosing = choosing
        self._requests = requests
        longest = max((request.max_new_tokens for request in requests), default=0)
        draws = torch.zeros(len(requests), longest, dtype=torch.float64)
        for row, request in zip(draws, requests):
            stream = torch.Generator().manual_seed(request.seed)
            row[: request.max_new_tokens] = torch.rand(request.max_new_tokens, generator=stream, dtype=torch.float64)
        self._draws = draws.to(device)
        self.logprobs = torch.zeros(len(requests), longest, device=device)
        """(requests, longest) of the tokens chosen so far."""
        self.entropies = torch.zeros(len(requests), longest, device=device)
        self._seen: torch.Tensor | None = None
        self._warpers = _warpers(choosing)
        self._scratch: dict[str, torch.Tensor] = {}
        self._id_masks: dict[tuple[int, ...], torch.Tensor] = {}

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n,) tokens that follow, from logits (n, V), for the requests `rows` (n,) that have `counts` (n,) tokens."""
        draws = self._draws[rows, counts]
        height = logits.shape[0] if logits.device.type != "cpu" else max(1, TILE // logits.shape[1])
        parts = [
            self._choose_tile(logits[at], draws[at], rows[at], counts[at])
            for at in (slice(i, i + height) for i in range(0, logits.shape[0], height))
        ]
        tokens, logprobs, entropies = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts))
        self.logprobs[rows, counts] = logprobs
        self.entropies[rows, counts] = entropies
        if self._seen is not None:
            self._seen[rows, tokens] = True
        return tokens

    def _choose_tile(
        self, logits: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probs and entropies, each (n,)."""
        logits = logits.float()
        shifted, weights, sums, total = self._exponentials(logits, self._choosing.temperature)
        log_total = total.log()
        mean = torch.bmm(weights[:, None], shifted[..., None]).flatten().double() / total
        entropies = log_total - mean
        if self._choosing.greedy:
            tokens = self._cut(logits, rows, counts).argmax(dim=-1)
            return tokens, _take(shifted, tokens).double().sub(log_total).float(), entropies.float()
        if not self._choosing.is_cut:
            tokens = _invert(weights, sums, draws)
            return tokens, _take(shifted, tokens).double().sub(log_total).float(), entropies.float()
        kept = shifted.clone()
        _, weights, sums, _ = self._exponentials(self._cut(logits, rows, counts), 1.0)
        tokens = _invert(weights, sums, draws)
        return tokens, _take(kept, tokens).double().sub(log_total).float(), entropies.float()

    def _exponentials(
        self, logits: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scaled logits less their peak (n, V), their exponentials (n, V), sums of these (n, blocks), totals (n,)."""
        num_rows, size = logits.shape
        shifted = torch.sub(logits, logits.amax(dim=-1, keepdim=True), out=self._buffer("shifted", logits)[:, :size])
        if temperature != 1.0:
            shifted.div_(temperature)
        padded = self._buffer("weights", logits)
        weights = torch.exp(shifted, out=padded[:, :size])
        sums = padded.view(num_rows, -1, BLOCK).sum(dim=-1).double()
        return shifted, weights, sums, sums.sum(dim=-1)

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
            mask[[token for token in ids if token < len(mask)]] = True
            self._id_masks[ids] = mask.to(scores.device)
        mask = self._id_masks[ids]
        scores.masked_fill_(mask if where is None else where[:, None] & mask, float("-inf"))

    def _seen_on(self, logits: torch.Tensor) -> torch.Tensor:
        """(requests, V) bool, the tokens that are in a request's prompt or completion."""
        if self._seen is None:
            self._seen = torch.zeros(len(self._requests), logits.shape[1], dtype=torch.bool, device=logits.device)
            for row, request in zip(self._seen, self._requests):
                row[torch.tensor(request.prompt_ids, device=logits.device)] = True
        return self._seen


def _warpers(choosing: Choosing) -> list[LogitsProcessor]:
    """The cuts of the distribution after temperature, in `generate`'s order."""
    warpers: list[LogitsProcessor] = []
    if choosing.top_k:
        warpers.append(TopKLogitsWarper(top_k=choosing.top_k))
    if choosing.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=choosing.top_p))
    if choosing.min_p:
        warpers.append(MinPLogitsWarper(min_p=choosing.min_p))
    return warpers


def _take(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens[:, None]).squeeze(-1)


def _invert(weights: torch.Tensor, sums: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """(n,) the first tokens whose cumulative share exceeds the uniform `draws` (n,).

    `weights` (n, V) are the probabilities up to a factor and `sums` (n, blocks) those of whole blocks of tokens. Sums
    are float64: in float32 the cumulative sum over a large vocabulary would shift probabilities.
    """
    cumulative = sums.cumsum(dim=-1)
    target = (draws * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    mass = sums.gather(-1, block)
    share = ((target - cumulative.gather(-1, block) + mass) / mass).clamp_(0.0, 1.0 - 2**-53)
    offsets = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, offsets.clamp_(max=weights.shape[1] - 1)).double()
    inside = inside * (block * BLOCK + torch.arange(BLOCK, device=weights.device) < weights.shape[1])
    within = inside.cumsum(dim=-1)
    found = torch.searchsorted(within, share * within[:, -1:], right=True).clamp_(max=BLOCK - 1)
    return (block * BLOCK + found).squeeze(-1).clamp_(max=weights.shape[1] - 1)
