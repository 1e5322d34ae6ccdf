"""Writes checkpoints: in a folder aside, synced to the disk, with a manifest, put in place by one rename."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupgrad import dist
from groupgrad.checkpoints.manifest import FileDigest, Manifest, digest, file_names, sync, sync_folders

logger = logging.getLogger(__name__)

UNFINISHED = "_groupgrad_unfinished"
"""Folder in a run's folder that holds what is being written or removed. Pushes to the hub leave out such names."""

CHECKPOINT = re.compile(r"checkpoint-(\d+)")

_REPLACED = "replaced-"
_STORAGE_ERRNOS = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS", "EACCES", "EPERM", "ESTALE", "ENOENT", "ENOTDIR")
    if hasattr(errno, name)
}
_STORAGE_TEXTS = ("PytorchStreamWriter failed", "inline_container", "os error 27", "os error 28", "os error 122")
"""Messages of torch and safetensors that stand for an OSError when a write fails."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The half-written folder is removed and older checkpoints are as before."""


@dataclass(slots=True, frozen=True)
class _FolderView:
    """The ranks that see the same run folder, all of them or those of one machine."""

    members: tuple[int, ...]

    @property
    def leads(self) -> bool:
        """True on the rank that changes the folder for all that see it."""
        return dist.rank() == self.members[0]

    def share(self, names: list[str]) -> list[str]:
        """The files that this rank reads for all that see the folder."""
        return names[self.members.index(dist.rank()) :: len(self.members)]


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, whole or not, by step; a folder that does not exist has none."""
    found = (path for path in folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name) and path.is_dir())
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def sweep(run_folder: Path) -> None:
    """Removes what a killed process left unfinished, and puts back a checkpoint that it was about to replace."""
    aside = run_folder / UNFINISHED
    if not aside.is_dir():
        return
    for replaced in aside.glob(f"{_REPLACED}checkpoint-*"):
        place = run_folder / replaced.name.removeprefix(_REPLACED)
        if not place.exists():
            replaced.rename(place)
    shutil.rmtree(aside)
    logger.warning("removed %s, which an earlier process had not finished", aside)


def save(run_folder: Path, step: int, write: Callable[[Path], None], describe: Callable[[], Mapping[str, Any]]) -> Path:
    """Writes `checkpoint-<step>` into `run_folder` and returns its path. Collective.

    `write` puts this rank's files into the folder that it is given. `describe` returns the manifest's fields beside
    step, ranks and files. On return every file is on the disk and the checkpoint has its name. SaveFailed, on all
    ranks, if one of them could not write; other exceptions of `write` are raised on all ranks too.
    """
    name = f"checkpoint-{step}"
    folder, view = run_folder / UNFINISHED / name, None
    try:
        view = _prepare(folder)
        with _agreed(folder):
            write(folder)
        digests = _digests(folder, view)
        with _agreed(folder):
            if view.leads:
                Manifest(step, dist.world_size(), digests, **describe()).write(folder)
                sync_folders(folder)
                _put_in_place(folder, run_folder / name)
    except BaseException as error:
        # What killed this process or another is not undone here: the next start sweeps it.
        if isinstance(error, Exception) and (view is None or view.leads):
            shutil.rmtree(run_folder / UNFINISHED, ignore_errors=True)
        raise
    return run_folder / name


def _prepare(folder: Path) -> _FolderView:
    """Makes an empty folder aside and finds out which ranks see the same one. Collective."""
    aside = folder.parent
    mark, here = dist.all_gather_objects((f".{uuid.uuid4().hex}", socket.gethostname()))[0]
    with _agreed(folder):
        if dist.is_main():
            sweep(aside.parent)
            folder.mkdir(parents=True)
            (aside / mark).touch()
    shared = _sees(aside / mark, wait=here != socket.gethostname())
    machines = dist.all_gather_objects("" if shared else socket.gethostname())
    members = tuple(rank for rank, machine in enumerate(machines) if machine == machines[dist.rank()])
    view = _FolderView(members)
    with _agreed(folder):
        if view.leads and not shared:
            sweep(aside.parent)
            folder.mkdir(parents=True)
    return view


def _sees(mark: Path, *, wait: bool) -> bool:
    """True if a file that rank 0 has just made is here; network file systems may show it a moment later."""
    for _ in range(5 if wait else 0):
        with contextlib.suppress(OSError):
            os.listdir(mark.parent.parent)
        if mark.exists():
            return True
        time.sleep(0.2)
    return mark.exists()


def _digests(folder: Path, view: _FolderView) -> dict[str, FileDigest]:
    """Syncs and reads all files of a folder, shared out among the ranks that see it. Collective."""
    mine: dict[str, FileDigest] = {}
    with _agreed(folder):
        for name in view.share(file_names(folder)):
            sync(folder / name)
            mine[name] = digest(folder / name)
    by_rank = dist.all_gather_objects(mine)
    return dict(sorted(item for rank in view.members for item in by_rank[rank].items()))


def _put_in_place(folder: Path, place: Path) -> None:
    """Gives a finished folder its name. A checkpoint that has it is moved aside first, and removed last."""
    if place.exists():
        place.rename(folder.parent / f"{_REPLACED}{place.name}")
    folder.rename(place)
    sync(place.parent)
    shutil.rmtree(folder.parent, ignore_errors=True)


@contextlib.contextmanager
def _agreed(folder: Path) -> Any:
    """Raises an exception of the body on all ranks, as SaveFailed if a disk refused. Collective at its end."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
        if is_storage_error(caught):
            error = SaveFailed(_text_of(caught, folder))
            error.__cause__ = caught
    texts = dist.all_gather_objects(str(error) if isinstance(error, SaveFailed) else None)
    dist.raise_on_all_ranks(None if isinstance(error, SaveFailed) else error)
    refused = next((text for text in texts if text), None)
    if refused is not None:
        raise SaveFailed(refused) from error


def is_storage_error(error: BaseException) -> bool:
    """True for an exception that says that a disk refused: full, over quota, read-only, broken, not there."""
    if isinstance(error, SaveFailed) or (isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS):
        return True
    if any(text in str(error) for text in _STORAGE_TEXTS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_storage_error(cause)


def _text_of(error: BaseException, folder: Path) -> str:
    if isinstance(error, SaveFailed):
        return str(error)
    free = free_bytes(folder)
    space = "" if free is None else f"; {folder.parent.parent} has {free:,} bytes free"
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{folder.name} could not be written ({type(error).__name__}: {first}){space}"


def free_bytes(folder: Path) -> int | None:
    """Free space where `folder` is or will be; None if the file system does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def check_space(run_folder: Path, step: int, num_bytes: int) -> None:
    """SaveFailed if a checkpoint of `num_bytes` does not fit where `run_folder` is. No collective."""
    free = free_bytes(run_folder)
    if free is not None and free < num_bytes:
        raise SaveFailed(
            f"checkpoint-{step} takes about {num_bytes:,} bytes and {run_folder} has {free:,} free; free space there, "
            "lower save_total_limit, or set save_only_model=True, which leaves the optimizer out"
        )


def rotate(run_folder: Path, limit: int | None, keep: Path, best: str | None) -> None:
    """Removes the oldest checkpoints until `limit` are left, but never `keep`, just written, nor `best`.

    The oldest is the one written first; steps decide between equal times. Each is moved aside before it is
    removed, so that a kill leaves none that is half there. What cannot be removed is named in a warning.
    """
    if limit is None or limit <= 0:
        return
    protected = {os.path.realpath(path) for path in (keep, best) if path is not None}
    checkpoints = sorted(checkpoints_in(run_folder), key=lambda path: (path.stat().st_mtime, step_of(path)))
    removable = [path for path in checkpoints if os.path.realpath(path) not in protected]
    for path in removable[: max(0, len(checkpoints) - max(limit, len(protected)))]:
        aside = run_folder / UNFINISHED
        try:
            aside.mkdir(exist_ok=True)
            path.rename(aside / f"removed-{path.name}")
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("%s could not be removed (%s); save_total_limit=%d", path, error, limit)
