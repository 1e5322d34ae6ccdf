"""OpenMP threads that wait for others sleep, unless the environment says how they wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from groupgrad.kernels import threads
from groupgrad.kernels.compile import openmp_runtime

MEASURE = """
import time, torch
from groupgrad.kernels.threads import limit_spinning

numbers = torch.ones(1 << 18)

def cpu_seconds():
    numbers.add_(1)
    start = time.process_time()
    for _ in range(10):
        numbers.add_(1)
        time.sleep(0.02)
    return time.process_time() - start

before = cpu_seconds()
limit_spinning()
print(before, cpu_seconds())
"""


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "_holder", None)
    for name in threads.WAIT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


@pytest.mark.slow
@pytest.mark.skipif("libgomp" not in (openmp_runtime() or ""), reason="torch runs on another OpenMP runtime")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="libgomp spins on several cores only")
def test_threads_that_wait_use_no_processor_time():
    """After a parallel region its threads spin for about 10 ms of processor time, and afterwards for almost none."""
    environment = {key: value for key, value in os.environ.items() if key not in threads.WAIT_SETTINGS}
    process = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**environment, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after = map(float, process.stdout.split())
    assert before > 0.03
    assert after < before / 4


@pytest.mark.parametrize("name", [*threads.WAIT_SETTINGS, "one thread"])
def test_the_environments_choice_stays(two_threads, monkeypatch, name):
    if name == "one thread":
        torch.set_num_threads(1)
    else:
        monkeypatch.setenv(name, "ACTIVE")
    threads.limit_spinning()
    assert threads._holder is None


def test_one_team_is_held(two_threads):
    threads.limit_spinning()
    holder = threads._holder
    threads.limit_spinning()
    assert threads._holder is holder
    assert holder is None or (holder.is_alive() and holder.daemon)
