"""A server that quantizes the weights it is sent, as it quantized those it read from disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from real_vllm import OPTIONS, Served, mean_difference, requests, vary


@pytest.mark.slow
def test_each_push_is_quantized(serve: Callable[..., Served], policy: Any) -> None:
    engine = serve("--dtype", "bfloat16", "--quantization", "fp8_per_channel").start().engine()
    rows = requests()
    for version in range(2):
        vary(policy, version)
        engine.push(policy, version)
        # float8 keeps three bits of a fraction; other weights would be nats away.
        assert 1e-3 < mean_difference(policy, rows, engine.sample(rows, OPTIONS)) < 0.3
    assert engine.info["quantization"] == "fp8_per_channel"
