"""Single-turn rollouts: one engine call, one assistant message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from groupgrad.data.completions import CompletionTexts
from groupgrad.data.prompts import PromptMaker
from groupgrad.engines.base import Engine, Request, Sample, SamplingOptions
from groupgrad.metrics import Metric
from groupgrad.rollout.requests import GenerationRequest, RolloutSource, versions_of
from groupgrad.types import FinishReason, Prompt, Rollout


def completion_budget(prompt: Prompt, max_new_tokens: int, max_context: int | None) -> tuple[int, FinishReason]:
    """Completion tokens that fit after the prompt, and the finish reason of a completion that uses them up."""
    if max_context is not None and max_context - len(prompt.ids) < max_new_tokens:
        return max_context - len(prompt.ids), "context"
    return max_new_tokens, "length"


def sample_prompts(
    engine: Engine,
    prompt_maker: PromptMaker,
    sampling: SamplingOptions,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
) -> list[Sample]:
    """Samples one completion for each prompt within the model's context."""
    budgets = [completion_budget(prompt, sampling.max_new_tokens, prompt_maker.max_context) for prompt in prompts]
    requests = [
        Request(prompt.ids, seed, budget, media=prompt.media)
        for prompt, seed, (budget, _) in zip(prompts, seeds, budgets)
    ]
    return [
        replace(sample, finish_reason="context") if reason == "context" and sample.finish_reason == "length" else sample
        for sample, (_, reason) in zip(engine.sample(requests, sampling), budgets)
    ]


class SingleTurnRollouts(RolloutSource):
    """Samples one completion for each row and decodes it to text or a message."""

    def __init__(self, prompt_maker: PromptMaker, engine: Engine, sampling: SamplingOptions, *, seed: int):
        self.prompt_maker, self.engine, self.sampling, self.seed = prompt_maker, engine, sampling, seed

    @property
    def is_exact(self) -> bool:
        """True if the engine's log-probs are those that training would compute."""
        return self.engine.is_exact

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """What the engine tells of how it sampled."""
        return self.engine.metrics()

    def __call__(self, request: GenerationRequest) -> list[Rollout]:
        """One rollout for each row number."""
        by_group = {group: self.prompt_maker(row, group) for group, row in request.rows_by_group.items()}
        prompts = [by_group[row // request.num_generations] for row in request.rows]
        seeds = [request.seed_of(row, self.seed) for row in request.rows]
        sampling = replace(self.sampling, **request.sampling)
        samples = sample_prompts(self.engine, self.prompt_maker, sampling, prompts, seeds)
        maker = self.prompt_maker
        decode = CompletionTexts(maker.tokenizer, self.sampling.eos_ids, maker.keeps_special_tokens)
        texts = decode([sample.ids for sample in samples])
        return [
            Rollout(
                prompt=prompt,
                index=row,
                completion_ids=sample.ids,
                finish_reason=sample.finish_reason,
                completion=[{"role": "assistant", "content": text}] if prompt.is_conversational else text,
                text=text,
                sampling_logprobs=sample.logprobs,
                sampling_entropy=sample.entropies,
                **versions_of(sample.policy_versions, request.step),
            )
            for prompt, row, sample, text in zip(prompts, request.rows, samples, texts)
        ]
