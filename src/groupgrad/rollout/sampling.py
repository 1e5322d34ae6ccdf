"""Single-turn rollouts: one engine call, one assistant message."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from groupgrad.engines.base import Engine, Request, SamplingOptions
from groupgrad.types import Prompt, Rollout


def row_seed(run_seed: int, phase: str, round_number: int, row: int) -> int:
    """The seed of a row's random stream. It depends on what the row is, never on who samples it or beside whom."""
    digest = hashlib.blake2b(f"{run_seed}/{phase}/{round_number}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RolloutMaker:
    """Samples completions for prompts and reads them back as text or messages."""

    def __init__(self, engine: Engine, tokenizer: Any, options: SamplingOptions, *, seed: int, max_context: int | None):
        self.engine, self.tokenizer, self.options = engine, tokenizer, options
        self.seed, self.max_context = seed, max_context

    def __call__(
        self,
        prompts: Mapping[int, Prompt],
        rows: Sequence[int],
        *,
        num_generations: int,
        phase: str,
        round_number: int,
        policy_version: int,
    ) -> list[Rollout]:
        """One rollout for each row number; `prompts` holds the prompt of each of the rows' groups."""
        chosen = [prompts[row // num_generations] for row in rows]
        requests = [
            Request(prompt.ids, row_seed(self.seed, phase, round_number, row), self._budget(prompt))
            for prompt, row in zip(chosen, rows)
        ]
        samples = self.engine.sample(requests, self.options)
        texts = self.tokenizer.batch_decode([sample.ids for sample in samples], skip_special_tokens=True)
        return [
            Rollout(
                prompt=prompt,
                index=row,
                completion_ids=sample.ids,
                finish_reason=self._finish_reason(prompt, sample.finish_reason),
                completion=[{"role": "assistant", "content": text}] if prompt.is_conversational else text,
                text=text,
                sampling_logprobs=sample.logprobs,
                sampling_entropy=sample.entropies,
                policy_version=policy_version,
            )
            for prompt, row, sample, text in zip(chosen, rows, samples, texts)
        ]

    def with_options(self, **changes: Any) -> RolloutMaker:
        """The same maker with other sampling options."""
        return RolloutMaker(
            self.engine,
            self.tokenizer,
            replace(self.options, **changes),
            seed=self.seed,
            max_context=self.max_context,
        )

    def _budget(self, prompt: Prompt) -> int:
        """New tokens that fit behind the prompt."""
        if self.max_context is None:
            return self.options.max_new_tokens
        return min(self.options.max_new_tokens, self.max_context - len(prompt.ids))

    def _finish_reason(self, prompt: Prompt, reason: str) -> Any:
        is_short = self._budget(prompt) < self.options.max_new_tokens
        return "context" if reason == "length" and is_short else reason
