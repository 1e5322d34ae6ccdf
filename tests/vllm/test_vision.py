"""Images through a real vLLM.

vLLM's vision-language models import torchvision, which has no build for this CPU torch. `make test-vllm` installs the
build for GPUs into a folder of its own. Its operators are declared here before it is imported, which is all that its
transforms need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from real_vllm import SETTINGS, Served
from vlm_requests import build_vlm, difference, perturb_vision_tower, vlm_requests

TORCHVISION = Path(sys.prefix) / "vision"
PREPARED = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
pytestmark = pytest.mark.skipif(not TORCHVISION.exists(), reason=f"{TORCHVISION} has no torchvision")


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here on can import torchvision."""
    (tmp_path / "sitecustomize.py").write_text(PREPARED)
    helpers = Path(__file__).parents[1] / "helpers"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, TORCHVISION, helpers))))


@pytest.mark.slow
def test_vllm_in_the_process_sees_what_the_policy_sees(prepared: None) -> None:
    worker = Path(__file__).with_name("vision_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0 and "seen" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
def test_a_server_sees_what_the_policy_sees(prepared: None, serve: Callable[..., Served], tmp_path: Path) -> None:
    built = build_vlm()
    folder = tmp_path / "seeing"
    built.model.save_pretrained(folder)
    built.processor.save_pretrained(folder)
    # vLLM 0.32 cannot load the names by which transformers 5.19 saves this model; a push renames them.
    served = serve(
        "--load-format", "dummy", "--limit-mm-per-prompt", '{"image": 2}', "--max-model-len", "256", of=folder
    ).start()
    engine = served.engine()
    rows = vlm_requests(built)
    for version in range(2):
        engine.push(perturb_vision_tower(built.model, version), version)
        assert difference(built, rows, engine) < 1e-5
    served.kill()
