"""Arms spread over devices: which devices, who trains which arm, lost workers, and what cannot be sent to one."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from groupgrad.apps.sweep import device_workers
from groupgrad.apps.sweep.device_workers import Device, DeviceWorkers, find_devices
from groupgrad.apps.sweep.store import Arm, Store
from groupgrad.apps.sweep.sweep_plan import SweepPlan
from groupgrad.concurrency.worker_process import WorkerDied
from groupgrad.concurrency.workers import Outcome

# --------------------------------------------------------------------------------------------------------- the devices


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ("all", {}, ["0", "1", "2"]),
        (2, {}, ["0", "1"]),
        ("2", {}, ["0", "1"]),
        ([2, 0], {}, ["2", "0"]),
        ("0,2", {}, ["0", "2"]),
        ([1, 2], {"CUDA_VISIBLE_DEVICES": "4,5, GPU-9b"}, ["5", "GPU-9b"]),
    ],
)
def test_each_worker_sees_one_gpu(monkeypatch, given, environment, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    devices = find_devices(given, on_cpu=False)
    assert [device.environment for device in devices] == [{"CUDA_VISIBLE_DEVICES": name} for name in expected]


def test_a_number_means_processes_where_arms_train_on_the_cpu(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    for num_gpus, on_cpu in ((0, False), (3, True)):
        monkeypatch.setattr("torch.cuda.device_count", lambda num_gpus=num_gpus: num_gpus)
        devices = find_devices(4, on_cpu=on_cpu)
        assert [device.environment for device in devices] == [{"OMP_NUM_THREADS": "1"}] * 4
    assert find_devices(None, on_cpu=True) == []


@pytest.mark.parametrize(
    ("given", "num_gpus", "text"),
    [
        *(
            (given, 2, "does not name devices, each once; set it to")
            for given in (0, True, "two", [], [0, "1"], [0, -1], [1, 1])
        ),
        (3, 2, "devices=3 needs GPU 2, but GPUs 0 to 1 are visible here"),
        ([4], 1, r"devices=\[4\] needs GPU 4, but GPU 0 alone is visible"),
        ("all", 0, "devices='all' names GPUs, but no GPU is visible; set it to a number of worker processes"),
        ([0], 0, r"devices=\[0\] names GPUs, but no GPU is visible"),
        (5, 0, "devices=5 is more than the 4 cores of this machine; set it to at most 4"),
    ],
)
def test_devices_that_the_machine_does_not_have_are_refused(monkeypatch, given, num_gpus, text):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=text):
        find_devices(given, on_cpu=False)


def test_what_cannot_be_sent_to_a_worker_is_refused(make_sweep, tools, tmp_path):
    lock = threading.Lock()

    def locked(completions: list[str], **kwargs: Any) -> list[float]:
        with lock:
            return [0.0] * len(completions)

    with pytest.raises(ValueError, match="devices=5000 is more than"):
        make_sweep(tools.rates, devices=5000)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        make_sweep(tools.rates, devices=1, reward_funcs=[locked])
    assert not (tmp_path / "sweep").exists()


# --------------------------------------------------------------------------------------------------- who trains what


class Process:
    """Stands for a worker process: it runs its calls in this one, or loses them."""

    lost: dict[str, int]
    """Turns that are still to be lost, by the name of the arm; set by the fixture."""
    started: list[Process]

    def __init__(self, functions: list[bytes], *, name: str, environment: dict[str, str]):
        self._function = pickle.loads(functions[0])
        self.pid, self.is_closed = None, False  # without a process there is nothing to end in order
        self.started.append(self)

    def call(self, function: int, arguments: tuple[Any, ...]) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        arm = arguments[1]
        if arm is not None and self.lost.get(arm.name, 0) > 0:
            self.lost[arm.name] -= 1
            future.set_result(Outcome(error=WorkerDied("was killed by SIGKILL")))
        else:
            future.set_result(Outcome(self._function(*arguments)))
        return future

    def kill(self) -> None:
        self.is_closed = True


@pytest.fixture
def processes(monkeypatch) -> type[Process]:
    """The class that takes the place of worker processes; their output stays this process's."""
    monkeypatch.setattr(Process, "lost", {}, raising=False)
    monkeypatch.setattr(Process, "started", [], raising=False)
    monkeypatch.setattr(device_workers, "WorkerProcess", Process)
    monkeypatch.setattr(device_workers, "_write_output_to", lambda path: None)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    return Process


def arm(number: int) -> Arm:
    return Arm(number, f"{number:02d}", 0, None, {}, "waiting", 0, None, 0, "", None)


def test_idle_workers_take_the_least_advanced_arms(processes, monkeypatch, tmp_path):
    monkeypatch.setattr(device_workers.TurnsOfWorker, "__call__", lambda *arguments: None)
    team = DeviceWorkers(SweepPlan({}), tmp_path, None, [Device("first", {}), Device("second", {})])  # pyright: ignore
    arms = [arm(number) for number in (1, 2, 3)]

    def handed(ready: list[Arm]) -> list[tuple[int, str]]:
        return [(taken.id, device.name) for taken, device in team.hand_out(ready)]

    assert handed(arms) == [(1, "first"), (2, "second")]
    assert (handed(arms), team.busy) == ([], {1, 2})
    assert [(ended.id, error) for ended, error in team.wait(0)] == [(1, None), (2, None)]
    assert handed([arms[2]]) == [(3, "first")]
    assert handed([arms[2], arms[0]]) == [(1, "second")]


def test_a_lost_worker_costs_its_turn_and_three_of_them_the_arm(make_sweep, processes, tmp_path, caplog):
    processes.lost |= {"01-learning_rate=0.01": 2, "02-learning_rate=0.03": 3}
    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2}, devices=2)
    results = {result.name: result for result in sweep.run()}
    assert results["01-learning_rate=0.01"].state == "done"
    lost = results["02-learning_rate=0.03"]
    assert (lost.state, lost.step) == ("failed", 0)
    assert "lost 3 worker processes after its step 0, the last one was killed by SIGKILL" in lost.reason
    assert (tmp_path / "sweep/arms" / lost.name / "error.txt").is_file()
    assert caplog.text.count("lost its worker process (was killed by SIGKILL)") == 5
    Store(tmp_path / "sweep").queue("resume", 2)
    assert {result.state for result in sweep.run()} == {"done"}


def test_commands_for_an_arm_in_a_turn_wait_for_its_end_alone(make_sweep, tools, tmp_path, monkeypatch):
    monkeypatch.setattr("groupgrad.apps.sweep.arm_turns.COMMAND_CHECK_S", 0.0)
    sweeper = make_sweep(tools.rates)._sweeper
    store = Store(tmp_path / "sweep")
    first, second = store.arms()[:2]
    store.queue("stop", first.id)
    store.queue("stop", second.id)
    assert sweeper.apply_commands({first.id}) == {}
    assert [known.state for known in store.arms()[:2]] == ["waiting", "stopped"]
    sweeper.turns.num_workers = 2
    assert sweeper.turns._end_of_turn(first)(100) == 0
    assert sweeper.turns._end_of_turn(store.arms()[2])(100) > 0
    assert sweeper.apply_commands() == {}
    assert store.arms()[0].state == "stopped"


def test_a_sweep_may_go_on_with_other_devices(make_sweep, processes):
    sweep = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2}, turn_steps=1)
    sweep._sweeper._turn(sweep._sweeper._next())
    results = make_sweep({"learning_rate": [1e-2, 3e-2]}, args={"max_steps": 2}, turn_steps=1, devices=2).run()
    assert [result.state for result in results] == ["done", "done"]
    assert len(processes.started) == 2
