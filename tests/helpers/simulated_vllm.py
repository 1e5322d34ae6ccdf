"""Simulates colocated vLLM in a training run: another copy of the model, which only a push changes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupgrad.engines.native import NativeEngine
from groupgrad.engines.transformers import TransformersEngine
from groupgrad.integrations.vllm import setup as vllm_setup
from groupgrad.integrations.vllm.vllm_policy import Push, VLLMEngine, VLLMPolicy


class Copy(VLLMEngine):
    """In place of a `VLLMColocateEngine`."""

    max_model_len = 64

    def __init__(self, model: Any, tokenizer: Any, *, in_a_thread: bool = False):
        super().__init__()
        self.model = copy.deepcopy(model)
        with torch.no_grad():  # the first weights must differ from the policy's
            for parameter in self.model.parameters():
                parameter.zero_()
        # The native engine takes one model at a time in a process; a real server is another process.
        engine = TransformersEngine if in_a_thread else NativeEngine
        self.inner = engine(self.model, tokenizer=tokenizer)
        self.pushes: list[tuple[str, int]] = []
        self.shift, self.sleeps = 0.0, 0

    def _push(self, push: Push) -> str:
        self.model.load_state_dict(push.model.state_dict())
        self.pushes.append((push.kind, push.policy_step))
        return push.weight_version

    def sleep(self) -> None:
        self.sleeps += 1

    @contextmanager
    def session(self, options: Any) -> Iterator[Any]:
        assert self.pushes, "sampled before any weights were sent"
        with self.inner.session(options) as session:
            yield _Shifted(session, self)


class _Shifted:
    def __init__(self, inner: Any, owner: Copy):
        self._inner, self._owner = inner, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def advance(self) -> list[Any]:
        """vLLM returns no entropies, and rounds log-probs in its own way."""
        shift = self._owner.shift
        return [
            (ticket, replace(sample, entropies=None, logprobs=[x + shift for x in sample.logprobs]))
            for ticket, sample in self._inner.advance()
        ]


def simulate_vllm(monkeypatch: pytest.MonkeyPatch) -> list[Copy]:
    """Replaces vLLM by `Copy`; returns the copies that were started."""
    started: list[Copy] = []

    def start(config: Any, model: Any, parts: Any, rollout_components: Any) -> VLLMPolicy:
        started.append(Copy(model, parts.tokenizer, in_a_thread=config.rollout_ahead > 0))
        sends_adapter = vllm_setup._sends_adapter(config, model)
        return VLLMPolicy(started[-1], model, sends_adapter=sends_adapter)

    monkeypatch.setattr(vllm_setup, "serve_policy", start)
    return started
