"""The wheel, installed where there is no compiler (`make test-wheel` builds it first).

What it requires comes from the environment of the tests, whose packages the new environment finds behind its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from groupgrad.kernels import build, compile, library, status

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests/helpers"
FLAGS = set(" ".join(compile._processor()).split())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif("GROUPGRAD_WHEEL" not in os.environ, reason="GROUPGRAD_WHEEL names no wheel: make test-wheel"),
]
has_level = pytest.mark.skipif(
    not FLAGS.issuperset(build.LEVELS["x86-64-v3"].split()), reason="the processor has less than x86-64-v3"
)


@pytest.fixture(scope="module")
def wheel() -> Path:
    return ROOT / os.environ["GROUPGRAD_WHEEL"]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], env=variables, check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (site / "tests.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def output_of(installed: Path, *command: str) -> str:
    """What a command of the environment prints, with no other commands and an empty home."""
    variables = {"PATH": str(installed / "bin"), "HOME": str(installed / "home"), "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        env=variables,
        cwd=installed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in run.stderr and "groupgrad: compiling" not in run.stderr, run.stderr
    return run.stdout


def test_the_wheel_suits_every_python_and_brings_no_openmp(wheel: Path):
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("groupgrad", "py3", "none")
    assert platform.startswith("manylinux_2_") and platform.endswith("_x86_64")
    libraries = [file for file in zipfile.ZipFile(wheel).namelist() if ".so" in file]
    assert libraries == [f"groupgrad/kernels/{build.packaged(level).name}" for level in build.LEVELS]


@has_level
def test_its_kernels_compute_on_the_threads_of_torch(installed: Path):
    level = next(level for level, flags in reversed(build.LEVELS.items()) if FLAGS.issuperset(flags.split()))
    assert output_of(installed, "python", str(HELPERS / "one_pool.py")) == f"packaged for {level}; 0; 1\n"


@has_level
def test_the_demo_samples_and_trains_with_the_same_bits(installed: Path):
    printed = output_of(installed, "groupgrad", "demo", "--tiny", "--warm-up-steps", "40", "--grpo-steps", "10")
    assert "the largest difference of a log entry's tokens: 0.0e+00 on average, 0.0e+00 at most" in printed
    assert not (installed / "home").exists() or not list((installed / "home").rglob("*.so"))


@has_level
def test_its_kernels_are_as_fast_as_those_compiled_here(installed: Path):
    """The bound leaves room for processors that other instructions than the level's suit; the ratio is printed."""
    if library() is None:
        pytest.skip(status())
    (level,) = [level for level in build.LEVELS if f"packaged for {level}" in output_of(installed, "groupgrad", "env")]
    (packaged,) = installed.rglob(build.packaged(level).name)
    command = [sys.executable, str(HELPERS / "kernel_speed.py"), str(packaged)]
    for _ in range(3):  # other processes may slow one of the two
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ratios = {kind: float(ours) / float(theirs) for kind, ours, theirs in map(str.split, printed.splitlines())}
        print({kind: f"{ratio:.3f} times the seconds" for kind, ratio in ratios.items()})
        if max(ratios.values()) < 1.25:
            return
    pytest.fail(f"slower than kernels compiled here: {ratios}")
