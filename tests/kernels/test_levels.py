"""The kernels' tests once more, with kernels compiled for other levels of x86-64 (`make test-kernels`).

The levels differ in the width of vectors and in whether a product is rounded before it is added.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from groupgrad.kernels import build, library, status

TESTS = Path(__file__).parents[1]
LEVELS = {"x86-64-v2": "sse4_2 ssse3 popcnt", **build.LEVELS}
"""Level -> flags of processors that have it, as Linux names them: an older level beside those of a wheel."""

RUN = """
import sys, pytest
from groupgrad.kernels import compile
level, *arguments = sys.argv[1:]
compile._TARGET = level
sys.exit(pytest.main(arguments))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_pass_their_tests_at_each_level(level: str) -> None:
    if library() is None:
        pytest.skip(status())
    missing = set(LEVELS[level].split()) - set(Path("/proc/cpuinfo").read_text().split())
    if missing:
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))} of {level}")
    steps = "engines/native/test_cpp_step.py::test_steps_give_the_numbers_of_the_model"
    tests = ["kernels", "engines/native/test_choose.py", steps]
    command = [sys.executable, "-c", RUN, level, "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
