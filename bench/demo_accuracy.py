"""Grades a model on the problems of the tiny demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from groupgrad.apps.demo.task import MAX_COMPLETION_LENGTH, Problem, correctness_reward, format_reward


@dataclass(slots=True, frozen=True)
class Score:
    """Accuracy of a model on some problems, shares between 0 and 1."""

    accuracy: float
    """Share of completions whose tagged answer is the sum."""
    format_rate: float
    """Share of completions that show steps and tag the answer, right or wrong."""
    completions: list[str]
    """One sampled completion a problem, in their order."""


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    *,
    greedy: bool = False,
    seed: int = 0,
    batch_size: int = 256,
) -> Score:
    """One graded completion a problem, sampled at temperature 1 or greedily; leaves the global random state alone."""
    completions: list[str] = []
    was_training = model.training
    model.eval()
    choice: dict[str, Any] = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(problems), batch_size):
            prompts = [problem.prompt for problem in problems[start : start + batch_size]]
            inputs = tokenizer(prompts, return_tensors="pt", padding=True)
            generate: Any = model.generate
            ids = generate(**inputs, **choice, max_new_tokens=MAX_COMPLETION_LENGTH)
            completions += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train(was_training)
    right = correctness_reward(completions, [problem.solution for problem in problems])
    formatted = format_reward(completions)
    return Score(sum(right) / len(problems), sum(formatted) / len(problems), completions)
