"""Samples tokens, each request from its own random stream, with the log-probs that training will compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from groupgrad.engines.base import Request
from groupgrad.engines.native.cpp_step import UnfilteredSampling
from groupgrad.engines.native.sampling_params import SamplingParams
from groupgrad.kernels import library
from groupgrad.kernels.choose import Choice, choose, score
from groupgrad.kernels.cumulative_sums import cumulative_sum

TILE = 1 << 19
"""Number of logits processed at a time on a CPU; they and their exponentials fit into its cache."""

BLOCK = 128
"""Neighbouring tokens per partial sum; sampling first finds the block, then the token in it."""

COLDEST = 1e-6
"""Temperature at which a request for 0 is sampled."""

_BELOW_ONE = 1.0 - 2**-52


class Sampler:
    """Random streams of open requests, and the scores of their tokens.

    Each request has a row in tables of draws, log-probs and entropies from `add` to `take_out` or `free`; rows are
    reused.
    """

    def __init__(self, params: SamplingParams, device: torch.device):
        self.params, self.device = params, device
        self._draws = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.logprobs = torch.zeros(0, 0, dtype=torch.float32, device=device)
        """(rows, longest) of the tokens sampled so far."""
        self.entropies = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._scales: dict[int, float] = {}
        """Factors of the logits of requests that have a temperature of their own, by row."""
        self._free: list[int] = []
        self._seen: torch.Tensor | None = None
        self._unseen: dict[int, list[int]] = {}
        """Prompts that are not in `_seen` yet, by row."""
        self._ends = torch.tensor(sorted(set(params.eos_ids)), dtype=torch.int64, device=device)
        self._warpers = _warpers(params)
        self._id_masks: dict[tuple[int, ...], torch.Tensor] = {}
        self._library = library() if device.type == "cpu" else None
        self._kernels = None if params.greedy or params.is_filtered else self._library
        """Kernels that sample tokens by a draw from the plain softmax; None for greedy or filtered sampling."""

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Gives new requests table rows; all tokens of `prompt_ids` count as prompt."""
        if not requests:
            return []
        longest = max(request.max_new_tokens for request in requests)
        self._grow(len(requests) - len(self._free), longest)
        rows = self._free[: len(requests)]
        # A row's first numbers are the same however many are drawn, so the longest row of the batch changes none.
        stream = torch.Generator()
        draws = torch.stack(
            [torch.rand(longest, generator=stream.manual_seed(r.seed), dtype=torch.float64) for r in requests]
        )
        self._draws[torch.tensor(rows, device=self.device), :longest] = draws.to(self.device)
        self._free = self._free[len(requests) :]
        for row, request in zip(rows, requests):
            if request.temperature is not None:
                self._scales[row] = self.params.temperature / max(request.temperature, COLDEST)
        if self.params.repetition_penalty != 1.0:
            self._unseen.update(zip(rows, (request.prompt_ids for request in requests)))
        return rows

    def _grow(self, num_more: int, longest: int) -> None:
        """Adds free rows, and columns for requests of up to `longest` tokens; the tables at least double."""
        height, width = self._draws.shape
        new_height = max(height + num_more, 2 * height) if num_more > 0 else height
        new_width = max(longest, 2 * width) if longest > width else width
        if (new_height, new_width) == (height, width):
            return
        self._draws, self.logprobs, self.entropies = [
            F.pad(table, (0, new_width - width, 0, new_height - height))
            for table in (self._draws, self.logprobs, self.entropies)
        ]
        self._free += range(height, new_height)  # once there is memory for them

    def restart(self, row: int, request: Request) -> None:
        """Resets the tokens under the repetition penalty to a request's prompt; does nothing without a row (-1)."""
        if row >= 0 and self.params.repetition_penalty != 1.0:
            self._unseen[row] = request.prompt_ids

    def take_out(self, rows: Sequence[int], counts: Sequence[int]) -> list[tuple[list[float], list[float]]]:
        """Log-probs and entropies of the first `counts` tokens of finished requests; frees their rows."""
        at, longest = torch.tensor(rows, device=self.device), max(counts)
        # One copy from a GPU, for which the host waits.
        logprobs, entropies = torch.stack([self.logprobs[at, :longest], self.entropies[at, :longest]]).tolist()
        self.free(rows)
        return [(p[:count], e[:count]) for p, e, count in zip(logprobs, entropies, counts)]

    def free(self, rows: Sequence[int]) -> None:
        """Gives rows back, whose requests are over."""
        self._free += rows
        for row in rows:
            self._scales.pop(row, None)

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """(n,) next tokens from logits (n, V), for the requests in table `rows` (n,) that have `counts` (n,) tokens."""
        draws = self._draws[rows, counts]
        if self._scales:
            logits = logits.float() * torch.tensor(self._scales_of(rows), device=logits.device)[:, None]
        choice = choose(self._kernels, logits, self.params.temperature, draws) if self._kernels else None
        if choice is None:
            choice = self._choose_in_tiles(logits, draws, rows, counts)
        self.logprobs[rows, counts] = choice.logprobs
        self.entropies[rows, counts] = choice.entropies
        if self._seen is not None:
            self._seen[rows, choice.tokens] = True
        return choice.tokens

    def unfiltered(self, rows: torch.Tensor, counts: torch.Tensor, idle: int = 0) -> UnfilteredSampling | None:
        """Sampling state of the requests in `rows` (n,) with `counts` (n,) tokens.

        None without kernels to sample, or where a request has a temperature of its own.
        """
        if self._kernels is None or (self._scales and set(self._scales_of(rows)) != {1.0}):
            return None
        return UnfilteredSampling(
            self._draws, self.logprobs, self.entropies, self.params.temperature, rows, counts, self._ends, idle
        )

    def _scales_of(self, rows: torch.Tensor) -> list[float]:
        return [self._scales.get(row, 1.0) for row in cast(list[int], rows.tolist())]

    def _choose_in_tiles(
        self, logits: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> Choice:
        height = logits.shape[0] if logits.device.type != "cpu" else max(1, TILE // logits.shape[1])
        tiles = [
            self._choose_tile(logits[at], draws[at], rows[at], counts[at])
            for at in (slice(i, i + height) for i in range(0, logits.shape[0], height))
        ]
        return Choice(*(tiles[0] if len(tiles) == 1 else map(torch.cat, zip(*tiles))))

    def _choose_tile(
        self, logits: torch.Tensor, draws: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, log-probs and entropies, each (n,)."""
        params, logits = self.params, logits.float()
        softmax = None
        if params.greedy:
            tokens = (self._filtered(logits, rows, counts) if params.is_filtered else logits).argmax(dim=-1)
        elif params.is_filtered:
            tokens = _invert(self._softmax(self._filtered(logits, rows, counts), 1.0), draws)
        else:
            softmax = self._softmax(logits, params.temperature)
            tokens = _invert(softmax, draws)
        # NaN logits find no token; `NativeSession.advance` reports them by their log-probs.
        tokens = tokens.clamp_(max=logits.shape[1] - 1)
        if self._library is not None and (choice := score(self._library, logits, params.temperature, tokens)):
            return choice.tokens, choice.logprobs, choice.entropies
        softmax = self._softmax(logits, params.temperature) if softmax is None else softmax
        total = softmax.sums.sum(dim=-1)
        log_total = total.log()
        entropies = log_total - softmax.weighted_sum().div_(total)
        shifted = logits.gather(-1, tokens[:, None]).sub_(softmax.peak).div_(params.temperature).squeeze(-1)
        return tokens, shifted.double().sub_(log_total).float(), entropies.float()

    def _softmax(self, logits: torch.Tensor, temperature: float) -> _Softmax:
        num_rows, size = logits.shape
        peak = logits.amax(dim=-1, keepdim=True)
        shifted, weights = logits.new_zeros(2, num_rows, -(-size // BLOCK) * BLOCK)
        torch.sub(logits, peak, out=shifted[:, :size])
        if temperature != 1.0:
            shifted.div_(temperature)
        torch.exp(shifted[:, :size], out=weights[:, :size])
        return _Softmax(peak, shifted, weights, weights.view(num_rows, -1, BLOCK).sum(dim=-1).double())

    def _filtered(self, logits: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Scores to sample from, -inf for filtered tokens; filters apply in the order of `generate`."""
        params = self.params
        scores = logits.clone()
        if params.repetition_penalty != 1.0:
            seen = self._seen_on(logits)[rows]
            penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
            scores = torch.where(seen, penalised, scores)
        if params.min_new_tokens:
            self._forbid(scores, params.eos_ids, counts < params.min_new_tokens)
        self._forbid(scores, params.suppressed, None)
        self._forbid(scores, params.suppressed_first, counts == 0)
        if params.greedy:
            return scores
        if params.temperature != 1.0:
            scores = scores / params.temperature
        for warper in self._warpers:
            scores = warper(None, scores)  # pyright: ignore[reportArgumentType]
        return scores

    def _forbid(self, scores: torch.Tensor, ids: tuple[int, ...], where: torch.Tensor | None) -> None:
        """Sets the scores of the tokens `ids` to -inf in the rows `where` (n,) bool, or in all."""
        if not ids:
            return
        if ids not in self._id_masks:
            # Ids beyond the vocabulary cannot be sampled anyway.
            mask = torch.zeros(scores.shape[1], dtype=torch.bool)
            mask[[token for token in ids if 0 <= token < len(mask)]] = True
            self._id_masks[ids] = mask.to(scores.device)
        mask = self._id_masks[ids]
        scores.masked_fill_(mask if where is None else where[:, None] & mask, float("-inf"))

    def _seen_on(self, logits: torch.Tensor) -> torch.Tensor:
        """(rows, V) bool, the tokens in a request's prompt or completion."""
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


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """Filters applied after the temperature, in the order of `generate`."""
    warpers: list[LogitsProcessor] = []
    if params.top_k:
        warpers.append(TopKLogitsWarper(top_k=params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p=params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(min_p=params.min_p))
    return warpers


@dataclass(slots=True)
class _Softmax:
    """An unnormalised softmax, with sums over blocks of `BLOCK` neighbouring tokens; the last block may be padded.

    A block is summed in float32, the vocabulary in float64: a float32 sum over a large vocabulary would be wrong in the
    sixth digit.
    """

    peak: torch.Tensor
    """(n, 1) largest logits."""
    shifted: torch.Tensor
    """(n, padded V) logits minus their peak over the temperature, 0 in the padding; overwritten by `weighted_sum`."""
    weights: torch.Tensor
    """(n, padded V) exponentials of `shifted`, 0 in the padding."""
    sums: torch.Tensor
    """(n, blocks) float64 sums of the weights."""

    def weighted_sum(self) -> torch.Tensor:
        """(n,) float64, the sum of weights times shifted logits."""
        products = self.shifted.mul_(self.weights)
        return products.view(len(products), -1, BLOCK).sum(dim=-1).sum(dim=-1, dtype=torch.float64)


def _invert(softmax: _Softmax, draws: torch.Tensor) -> torch.Tensor:
    """(n,) first tokens whose cumulative probability exceeds the uniform `draws` (n,): first the block, then in it."""
    cumulative = cumulative_sum(softmax.sums)
    # The product may round up to the sum, which no token exceeds.
    target = (draws.clamp(max=_BELOW_ONE) * cumulative[:, -1])[:, None]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    mass = softmax.sums.gather(-1, block)
    fraction = ((target - cumulative.gather(-1, block) + mass) / mass).clamp_(0.0, _BELOW_ONE)
    blocks = softmax.weights.view(len(draws), -1, BLOCK)
    within = cumulative_sum(blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1).double())
    place = torch.searchsorted(within, fraction * within[:, -1:], right=True)
    return (block * BLOCK + place).squeeze(-1)
