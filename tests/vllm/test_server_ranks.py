"""Two training processes, of which each requests its own rows from one real vLLM server, equal one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import run_on
from real_vllm import Served
from small_runs import relative
from vllm_ranks import CASES, run

from groupgrad.integrations.vllm.vllm_policy import policy_step_of

WORKER = Path(__file__).parents[1] / "helpers" / "vllm_ranks.py"
DEEPSPEED = Path(sys.prefix) / "deepspeed"
"""Where `make test-vllm` installs DeepSpeed. Only ranks of its cases have it on their path: others would import it."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(large_server: Callable[[], Served], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """`ranks(case)`: what each of two ranks ended with. All cases with or without DeepSpeed run at first use of one."""
    folder, done = tmp_path_factory.mktemp("ranks"), set()

    def results(case: str) -> list[dict[str, Any]]:
        needs_deepspeed = "deepspeed" in CASES[case]
        if needs_deepspeed not in done:
            done.add(needs_deepspeed)
            cases = [name for name, settings in CASES.items() if ("deepspeed" in settings) == needs_deepspeed]
            path = os.pathsep.join([str(DEEPSPEED)] * needs_deepspeed + [os.environ.get("PYTHONPATH", "")])
            run_on(2, WORKER, folder, large_server().port, *cases, timeout_s=500, PYTHONPATH=path)
        return [torch.load(folder / f"{case}_{rank}.pt", weights_only=False) for rank in range(2)]

    return results


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_beside_a_server_as_one_process_does(
    case: str, ranks: Callable[[str], Any], large_server: Callable[[], Served], tmp_path: Path
) -> None:
    """Completions are the same, weights equal to 1e-5, and vLLM's log-probs are those of the weights that train."""
    if "deepspeed" in CASES[case] and not DEEPSPEED.exists():
        pytest.skip(f"{DEEPSPEED} has no DeepSpeed")
    found, one = ranks(case), run(case, tmp_path, large_server().port)
    assert [end["is_sharded"] for end in (*found, one)] == [not case.startswith("data_parallel")] * 2 + [False]
    for end in (*found, one):
        assert [policy_step_of(version) for version in end["versions"]] == [0, 1, 2]
        assert len(end["differences"]) == 3 and max(end["differences"]) < 1e-5
    assert found[0]["versions"] == found[1]["versions"]
    assert sorted(found[0]["rows"] + found[1]["rows"]) == sorted(one["rows"]) and len(one["rows"]) == 24
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert relative(found[0]["weights"], one["weights"]) < 1e-5 < relative(one["weights"], one["first_weights"])
