"""Worker processes of a sweep, one for each device, which train arms for a turn at a time."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from groupgrad.apps.sweep.store import Arm, Store
from groupgrad.concurrency.worker_process import WorkerDied, WorkerNotStarted, WorkerProcess
from groupgrad.concurrency.workers import Outcome
from groupgrad.stopping import Stopped

if TYPE_CHECKING:
    from groupgrad.apps.sweep.arm_turns import ArmTurns
    from groupgrad.apps.sweep.factory import ArmFactory
    from groupgrad.apps.sweep.sweep_plan import SweepPlan

_FORMS = "set it to a number of devices, to a list of GPUs such as [0, 1], or to all for one worker for each GPU"


@dataclass(slots=True, frozen=True)
class Device:
    """A device with a worker process."""

    name: str
    environment: Mapping[str, str]
    """Variables of the process, set before it imports torch."""


def find_devices(given: Any, *, on_cpu: bool) -> list[Device]:
    """The devices that `devices` names; none if it is None. Without a GPU, or `on_cpu`, a number of processes is meant.

    ValueError for what is no device of this machine.
    """
    if given is None:
        return []
    wanted = _read(given)
    import torch

    num_gpus = 0 if on_cpu else torch.cuda.device_count()
    if not num_gpus:
        return _processes(wanted, given, torch.get_num_threads(), on_cpu=on_cpu)
    if isinstance(wanted, list):
        indices: Sequence[int] = wanted
    else:
        indices = range(wanted if isinstance(wanted, int) else num_gpus)
    missing = [index for index in indices if index >= num_gpus]
    if missing:
        visible = "GPU 0 alone is visible" if num_gpus == 1 else f"GPUs 0 to {num_gpus - 1} are visible"
        raise ValueError(f"devices={given!r} needs GPU {missing[-1]}, but {visible} here; name fewer, or set it to all")
    # A process may see a part of the machine's GPUs, which are then numbered anew.
    visible_names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = visible_names or [str(index) for index in range(num_gpus)]
    return [Device(f"GPU {index}", {"CUDA_VISIBLE_DEVICES": names[index]}) for index in indices]


def _read(given: Any) -> str | int | list[int]:
    """`all`, a number of devices or their indices. A text holds the same, `0,2` for indices."""
    value = given
    if isinstance(given, str) and given != "all":
        parts = given.strip("[]").split(",")
        if all(part.strip().isdecimal() for part in parts):
            value = int(given) if given.isdecimal() else list(map(int, parts))
    if value == "all" or (type(value) is int and value >= 1):
        return value
    indices = list(value) if isinstance(value, (list, tuple)) else []
    is_right = all(type(index) is int and index >= 0 for index in indices) and len(set(indices)) == len(indices)
    if not indices or not is_right:
        raise ValueError(f"devices={given!r} does not name devices, each once; {_FORMS}")
    return indices


def _processes(wanted: str | int | list[int], given: Any, num_threads: int, *, on_cpu: bool) -> list[Device]:
    if not isinstance(wanted, int):
        why = "the sweep trains on the CPU (use_cpu)" if on_cpu else "no GPU is visible"
        raise ValueError(f"devices={given!r} names GPUs, but {why}; set it to a number of worker processes")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted > cores:
        raise ValueError(f"devices={given!r} is more than the {cores} cores of this machine; set it to at most {cores}")
    # As many threads as this process has: another number could change the order of sums, and so bits.
    environment = {"OMP_NUM_THREADS": str(num_threads)}
    return [Device(f"process {number}", environment) for number in range(1, wanted + 1)]


LOST = WorkerDied, WorkerNotStarted
"""Errors of a turn whose process has ended; the arm can go on from its checkpoint."""

END_S = 30.0
"""Time for a worker process to end what libraries keep open, such as a tracker's run."""


class TurnsOfWorker:
    """The side of the worker process, which makes its `ArmTurns` when it is first called."""

    def __init__(self, folder: Path, content: bytes, num_workers: int):
        self._folder, self._content, self._num_workers = folder, content, num_workers
        self._turns: ArmTurns | None = None

    def __call__(self, log: Path, arm: Arm | None) -> None:
        """Trains an arm for a turn; without one it loads what the sweep trains."""
        if self._turns is None:
            _write_output_to(log)
            from groupgrad.apps.sweep.arm_turns import ArmTurns

            plan, factory = pickle.loads(self._content)
            self._turns = ArmTurns(plan, Store(self._folder), factory, self._num_workers)
        if arm is not None:
            self._turns.take(arm)  # a signal to this process alone ends a turn, and the arm goes on with its next one


def _write_output_to(path: Path) -> None:
    """Appends what this process prints from now on to a file: the progress of several arms would mix in a terminal."""
    with path.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(format="%(message)s", level=logging.WARNING)


@dataclass(slots=True, eq=False)
class _Worker:
    device: Device
    process: WorkerProcess
    log: Path
    arm: Arm | None = None
    """The arm of the turn in progress."""
    reply: futures.Future[Outcome] | None = None

    def call(self, arm: Arm | None) -> futures.Future[Outcome]:
        """Calls `TurnsOfWorker`."""
        return self.process.call(0, (self.log, arm))


class DeviceWorkers:
    """The worker processes, seen from the sweep's process. They end with the context, and with this process."""

    def __init__(self, plan: SweepPlan, folder: Path, factory: ArmFactory, devices: Sequence[Device]):
        folder = folder.resolve()
        turns = TurnsOfWorker(folder, cloudpickle.dumps((plan, factory)), len(devices))
        functions = [cloudpickle.dumps(turns), cloudpickle.dumps(atexit._run_exitfuncs)]
        self._workers: list[_Worker] = []
        for number, device in enumerate(devices, start=1):
            process = WorkerProcess(functions, name=f"groupgrad-sweep-{number}", environment=device.environment)
            self._workers.append(_Worker(device, process, folder / f"worker-{number}.log"))

    def __enter__(self) -> DeviceWorkers:
        """Starts the processes. Raises what keeps one from loading what the sweep trains."""
        try:
            for reply in [worker.call(None) for worker in self._workers]:
                if (error := reply.result().error) is not None:
                    raise error
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Ends the processes, in order unless an error or a second Ctrl-C has ended the sweep."""
        if kind is None or issubclass(kind, Stopped):
            running = [worker for worker in self._workers if worker.process.pid is not None]
            # What libraries do at the end of a process, which that of a worker leaves out.
            futures.wait([worker.process.call(1, ()) for worker in running], END_S)
        for worker in self._workers:
            worker.process.kill()

    @property
    def busy(self) -> set[int]:
        """The arms whose turns are in progress."""
        return {worker.arm.id for worker in self._workers if worker.arm is not None}

    def hand_out(self, ready: Sequence[Arm]) -> list[tuple[Arm, Device]]:
        """Gives each idle worker a turn of one of these arms, while there are some; the turns that were given."""
        left, given = [arm for arm in ready if arm.id not in self.busy], []
        for worker, arm in zip([worker for worker in self._workers if worker.arm is None], left):
            worker.arm, worker.reply = arm, worker.call(arm)
            given.append((arm, worker.device))
        return given

    def wait(self, seconds: float) -> list[tuple[Arm, BaseException | None]]:
        """The turns that have ended, with the error of each that its arm is not to blame for: at once if there are
        some or none is in progress, after at most so many seconds otherwise."""
        replies = [worker.reply for worker in self._workers if worker.reply is not None]
        done, ended = futures.wait(replies, seconds, return_when=futures.FIRST_COMPLETED).done, []
        for worker in self._workers:
            if worker.arm is None or worker.reply is None or worker.reply not in done:
                continue
            ended.append((worker.arm, worker.reply.result().error))
            worker.arm = worker.reply = None
        return ended

    def stop_turns(self) -> None:
        """Ends the turns in progress after a checkpoint of their last whole step. To be repeated until they have
        ended, since a process takes no notice while it makes a trainer."""
        for worker in self._workers:
            if worker.arm is not None and worker.process.pid is not None:
                with suppress(OSError):
                    os.kill(worker.process.pid, signal.SIGTERM)
