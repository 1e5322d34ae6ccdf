"""Writes checkpoints atomically: to a temporary folder, synced to disk, with a manifest, then renamed into place."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
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
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.ENOENT, errno.ENOTDIR),
}
_STORAGE_TEXTS = ("PytorchStreamWriter failed", "inline_container", "os error 27", "os error 28", "os error 122")
"""Messages of torch and safetensors that stand for an OSError when a write fails."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The half-written folder is removed and older checkpoints are as before."""


@dataclass(slots=True, frozen=True)
class _FolderView:
    """The ranks that share a file system for the run folder: all ranks, or the ranks of one machine."""

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
        target = run_folder / replaced.name.removeprefix(_REPLACED)
        if not target.exists():
            replaced.rename(target)
    shutil.rmtree(aside)
    logger.warning("removed %s, which an earlier process had not finished", aside)


def save(
    run_folder: Path,
    step: int,
    parts: Sequence[Callable[[Path], None]],
    describe: Callable[[], Mapping[str, Any]],
) -> Path:
    """Writes `checkpoint-<step>` into `run_folder` and returns its path. Collective.

    Each of `parts` puts files of this rank into the folder that it is given; the ranks meet between them. `describe`
    returns the manifest's fields beside step, ranks and files. On return every file is on the disk and the checkpoint
    has its name. SaveFailed, on all ranks, if one of them could not write; other exceptions of `parts` are raised on
    all ranks too.
    """
    target = run_folder / f"checkpoint-{step}"
    folder, view = run_folder / UNFINISHED / target.name, None
    try:
        view = _prepare(folder)
        for part in parts:
            with _agreed(folder):
                part(folder)
        digests = _digests(folder, view)
        with _agreed(folder):
            if view.leads:
                _finish(folder, target, Manifest(step, dist.world_size(), digests, **describe()))
    except Exception:  # whatever failed, no half checkpoint stays; the next start sweeps one of a killed process
        if view is None or view.leads:
            shutil.rmtree(folder.parent, ignore_errors=True)
        raise
    return target


def _prepare(folder: Path) -> _FolderView:
    """Makes an empty folder aside and finds out which ranks see the same one. Collective."""
    aside = folder.parent
    mark, here = dist.all_gather_objects((f".{uuid.uuid4().hex}", socket.gethostname()))[0]
    with _agreed(folder):
        if dist.is_main():
            _make(folder)
            (aside / mark).touch()
    shared = _is_visible(aside / mark, wait=here != socket.gethostname())
    machines = dist.all_gather_objects("" if shared else socket.gethostname())
    members = tuple(rank for rank, machine in enumerate(machines) if machine == machines[dist.rank()])
    view = _FolderView(members)
    with _agreed(folder):
        if view.leads and not shared:
            _make(folder)
    return view


def _make(folder: Path) -> None:
    sweep(folder.parent.parent)
    folder.mkdir(parents=True)


def _is_visible(mark: Path, *, wait: bool) -> bool:
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


def _finish(folder: Path, target: Path, manifest: Manifest) -> None:
    """Gives a written folder its manifest and its name. A checkpoint that has it is moved aside first, removed last."""
    manifest.write(folder)
    sync_folders(folder)
    if target.exists():
        target.rename(folder.parent / f"{_REPLACED}{target.name}")
    folder.rename(target)
    sync(target.parent)
    shutil.rmtree(folder.parent, ignore_errors=True)


@contextmanager
def _agreed(folder: Path) -> Any:
    """Raises an exception of the body on all ranks, as SaveFailed if a disk refused. Collective at its end."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = _as_failure(caught, folder)
    texts = dist.all_gather_objects(str(error) if isinstance(error, SaveFailed) else None)
    dist.raise_on_all_ranks(None if isinstance(error, SaveFailed) else error)
    refused = next((text for text in texts if text), None)
    if refused is not None:
        raise SaveFailed(refused) from error


def _as_failure(error: Exception, folder: Path) -> Exception:
    """SaveFailed for an exception that says that a disk refused; others as they are."""
    if isinstance(error, SaveFailed) or not is_storage_error(error):
        return error
    first = (str(error).splitlines() or [type(error).__name__])[0]
    space = _free_space(folder.parent.parent)
    failure = SaveFailed(
        f"{folder.name} could not be written ({type(error).__name__}: {first}){space}. Free space there, lower "
        "save_total_limit, or set save_only_model=True, which leaves the optimizer out"
    )
    failure.__cause__ = error
    return failure


def is_storage_error(error: BaseException) -> bool:
    """True for an exception that says that a disk refused: full, over quota, read-only, broken, not there."""
    if isinstance(error, SaveFailed) or (isinstance(error, OSError) and error.errno in _STORAGE_ERRNOS):
        return True
    if any(text in str(error) for text in _STORAGE_TEXTS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and is_storage_error(cause)


def _free_space(run_folder: Path) -> str:
    with contextlib.suppress(OSError):
        return f"; {run_folder} has {shutil.disk_usage(run_folder).free:,} bytes free"
    return ""


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
