"""OpenMP threads that wait sleep while other processes use the cores, unless the environment says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from groupgrad.kernels import threads
from groupgrad.kernels.compile import openmp_runtime

MEASURE = """
import time, torch
from groupgrad.kernels.compile import openmp_runtime
from groupgrad.kernels.threads import ParkedTeam

numbers = torch.ones(1 << 18)

def cpu_seconds():
    numbers.add_(1)
    start = time.process_time()
    for _ in range(10):
        numbers.add_(1)
        time.sleep(0.02)
    return time.process_time() - start

before = cpu_seconds()
team = ParkedTeam(openmp_runtime())
parked = cpu_seconds()
team.release()
print(before, parked, cpu_seconds())
"""

RUNTIME = openmp_runtime() or ""
NUM_CORES = os.cpu_count() or 1

has_libgomp = pytest.mark.skipif("libgomp" not in RUNTIME, reason="torch runs on another OpenMP runtime")
has_cores = pytest.mark.skipif(NUM_CORES < 2, reason="libgomp spins on several cores only")


class Team(threads.ParkedTeam):
    """A team that only says whether it is parked."""

    def __init__(self):
        self.is_parked = True

    def park(self):
        self.is_parked = True

    def release(self):
        self.is_parked = False


class Waits(threads.CoreWaits):
    """Shares of waiting that a test sets."""

    def __init__(self, shares):
        self.shares = iter(shares)

    def share(self):
        return next(self.shares)


def parked_after_each(*shares):
    """True for each look after which the team is parked."""
    watch = threads.SpinningWatch(team := Team(), Waits(shares))
    seen = []
    for _ in shares:
        watch.check()
        seen.append(team.is_parked)
    return seen


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(threads, "_watched_process", None)
    for name in threads.WAIT_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


def num_watches():
    return sum(thread.name == "openmp-watch" for thread in threading.enumerate())


@pytest.mark.slow
@has_libgomp
@has_cores
def test_threads_that_wait_use_no_processor_time_while_a_team_is_parked():
    """After a parallel region its threads spin for about 10 ms of processor time, and for almost none with the team."""
    environment = {key: value for key, value in os.environ.items() if key not in threads.WAIT_SETTINGS}
    process = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env={**environment, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, parked, released = map(float, process.stdout.split())
    assert before > 0.03
    assert parked < before / 4
    assert released > before / 2


@pytest.mark.slow
@has_libgomp
@has_cores
def test_the_team_is_parked_when_other_processes_use_the_cores(two_threads):
    team = threads.ParkedTeam(RUNTIME)
    team.release()
    watch, numbers = threads.SpinningWatch(team, threads.CoreWaits()), torch.ones(1 << 18)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * NUM_CORES)]
    try:
        deadline = time.monotonic() + 20
        while not team.is_parked and time.monotonic() < deadline:
            until = time.monotonic() + threads.CHECK_S
            while time.monotonic() < until:
                numbers.add_(1)
            watch.check()
        assert team.is_parked
    finally:
        team.release()
        for burner in burners:
            burner.kill()
            burner.wait()


def test_calm_releases_the_team_and_a_crowd_parks_it():
    """Looks at idle threads say nothing (None)."""
    assert parked_after_each(0.07, 0.01, 0.01, 0.07, 0.5, 0.5) == [True, False, False, False, True, True]
    assert parked_after_each(None, 0.01, None, 0.5, None) == [True, False, False, True, True]


def test_a_team_that_comes_and_goes_is_kept_for_longer_each_time():
    """Two calm looks in a row are needed after the first crowd, four after the second."""
    assert parked_after_each(0.01, 0.5, 0.01, 0.01, 0.5) == [False, True, True, False, True]
    assert parked_after_each(0.01, 0.5, 0.01, 0.01, 0.5, 0.01, 0.01, 0.01, 0.01)[4:] == [True, True, True, True, False]
    assert parked_after_each(0.01, 0.5, 0.01, 0.07, 0.01, 0.01)[2:] == [True, True, True, False]


def test_waiting_is_a_share_of_the_time_of_all_threads(tmp_path):
    def write(task, ran_s, waited_s):
        (tmp_path / task).mkdir(exist_ok=True)
        (tmp_path / task / "schedstat").write_text(f"{int(ran_s * 1e9)} {int(waited_s * 1e9)} 12\n")

    write("10", 4.0, 1.0)
    write("11", 2.0, 0.0)
    (tmp_path / "12").mkdir()  # a thread that has just ended
    waits = threads.CoreWaits(tmp_path)
    assert waits.share() == pytest.approx(1 / 7)
    assert waits.share() is None
    write("10", 4.5, 1.1)
    write("13", 0.2, 0.2)
    assert waits.share() == pytest.approx(0.3 / 1.0)


@pytest.mark.parametrize("content", [None, "no numbers"])
def test_where_waits_cannot_be_read_the_team_stays(tmp_path, monkeypatch, content):
    monkeypatch.setattr(threads, "CHECK_S", 0.0)
    tasks = tmp_path / "task"
    if content is not None:
        (tasks / "10").mkdir(parents=True)
        (tasks / "10" / "schedstat").write_text(content)
    team = Team()
    team.release()
    threads.SpinningWatch(team, threads.CoreWaits(tasks)).run()
    assert team.is_parked


@pytest.mark.parametrize("name", [*threads.WAIT_SETTINGS, "one thread"])
def test_the_environments_choice_stays(two_threads, monkeypatch, name):
    if name == "one thread":
        torch.set_num_threads(1)
    else:
        monkeypatch.setenv(name, "ACTIVE")
    threads.limit_spinning()
    assert threads._watched_process is None


@has_libgomp
def test_one_watch_runs_in_a_process(two_threads):
    before = num_watches()
    threads.limit_spinning()
    threads.limit_spinning()
    assert num_watches() == before + 1
