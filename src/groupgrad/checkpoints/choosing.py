"""Chooses and verifies the checkpoint that a run resumes from."""

from __future__ import annotations

import fnmatch
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from groupgrad import dist
from groupgrad.checkpoints.manifest import MANIFEST, TRAINER_STATE, Manifest, damage_of
from groupgrad.checkpoints.saving import checkpoints_in
from groupgrad.errors import CheckpointError

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Value of `resume_from_checkpoint` that starts anew where there is no checkpoint."""

_ESSENTIAL = (TRAINER_STATE, "config.json", "adapter_config.json", "*.safetensors", "*.index.json", "*.bin", "*/*")
_NOT_ESSENTIAL = ("training_args.bin",)
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""File that transformers keeps in a checkpoint while it saves on a signal."""


@dataclass(slots=True, frozen=True)
class ResumePoint:
    """A checkpoint that was verified."""

    folder: Path
    manifest: Manifest | None
    """None for a checkpoint of transformers or TRL."""
    damage: Mapping[str, str] = field(default_factory=dict)
    """Damaged or missing files that the run starts without, with reasons; only by `allow_partial_resume`."""

    @property
    def world_size(self) -> int:
        """Number of processes that wrote the checkpoint; the present number if it has no manifest."""
        return dist.world_size() if self.manifest is None else self.manifest.world_size


def choose(
    run_folder: Path, request: str | os.PathLike[str] | bool | None, *, allow_partial: bool = False
) -> ResumePoint | None:
    """The verified checkpoint that `request` means, or None for a start without one. Collective.

    `request` is a path, True for the newest valid checkpoint in `run_folder` (ValueError without one), "auto" for the
    same or else a new start; None, False and an empty text start anew. CheckpointError, with the file and the way out,
    if the checkpoint is damaged; with `allow_partial` only if weights or the step count are.
    """
    if isinstance(request, str) and request.lower() in ("true", "false", AUTO):
        request = {"true": True, "false": False}.get(request.lower(), AUTO)
    if not request:
        return None
    if request is not True and request != AUTO:
        return _verified(Path(request), allow_partial=allow_partial)
    found = dist.all_gather_objects([path.name for path in checkpoints_in(run_folder)])[0]
    if not found and request == AUTO:
        return None
    if not found:
        raise CheckpointError(
            f"No valid checkpoint found in output directory ({run_folder}); set resume_from_checkpoint='auto' to start "
            "anew where there is none"
        )
    return _newest_valid([run_folder / name for name in reversed(found)], allow_partial=allow_partial)


def _newest_valid(candidates: list[Path], *, allow_partial: bool) -> ResumePoint:
    skipped: list[str] = []
    partial: ResumePoint | None = None
    for folder in candidates:
        point = _examine(folder)
        if not point.damage:
            if skipped:
                _say("skipped %s; resuming from %s", "; ".join(skipped), folder)
            return _with_remark(point)
        skipped.append(f"{folder.name}: {_listed(point.damage)}")
        if partial is None and not _lost(point):
            partial = point
    if partial is not None and allow_partial:
        _say("no checkpoint in %s is whole: %s", candidates[0].parent, "; ".join(skipped))
        return _with_remark(partial)
    remedy = "set allow_partial_resume=True to go on without these files, or " if partial is not None else ""
    raise CheckpointError(
        f"No valid checkpoint found in output directory ({candidates[0].parent}): {'; '.join(skipped)}; {remedy}remove "
        "the folders to start anew"
    )


def _verified(folder: Path, *, allow_partial: bool) -> ResumePoint:
    if not any(dist.all_gather_objects(folder.is_dir())):
        raise CheckpointError(
            f"resume_from_checkpoint is {str(folder)!r}, but there is no such folder; set it to the folder of a "
            "checkpoint, or to True for the newest valid one in output_dir"
        )
    point = _examine(folder)
    if not point.damage:
        return _with_remark(point)
    checkpoints = dist.all_gather_objects([path.name for path in checkpoints_in(folder)])[0]
    if checkpoints and TRAINER_STATE in point.damage:
        raise CheckpointError(
            f"resume_from_checkpoint is {str(folder)!r}, which has checkpoints and is none; set it to "
            f"{str(folder / checkpoints[-1])!r}, the newest, or to True for the newest valid one in output_dir"
        )
    lost = _lost(point)
    if allow_partial and not lost:
        return _with_remark(point)
    way = "" if lost else ", and allow_partial_resume=True goes on without what is damaged"
    raise CheckpointError(
        f"{folder} is damaged: {_listed(point.damage)}; resume_from_checkpoint=True takes the newest valid one in "
        f"output_dir{way}"
    )


def _examine(folder: Path) -> ResumePoint:
    """Verifies all files of a checkpoint, shared out among the ranks of each machine. Collective."""
    machines = dist.all_gather_objects(socket.gethostname())
    here = [rank for rank, machine in enumerate(machines) if machine == machines[dist.rank()]]
    manifest, damage = None, {}
    try:
        if not folder.is_dir():
            raise CheckpointError(f"the folder is missing on {socket.gethostname()}")
        manifest = Manifest.read(folder)
        if manifest is not None:
            names = sorted(manifest.files)[here.index(dist.rank()) :: len(here)]
            damage = damage_of(folder, manifest.files, names)
        elif dist.rank() == here[0]:
            damage = _unfinished(folder)
    except CheckpointError as error:
        damage = {MANIFEST: str(error)}
    except OSError as error:
        damage = {MANIFEST: f"cannot be read ({error.strerror or error})"}
    everywhere = {name: reason for part in dist.all_gather_objects(damage) for name, reason in part.items()}
    return ResumePoint(folder, manifest, dict(sorted(everywhere.items())))


def _unfinished(folder: Path) -> dict[str, str]:
    """Signs of a checkpoint that transformers or TRL did not finish: its last file is missing, or a file says so."""
    found = {TRAINER_STATE: "is missing"} if not (folder / TRAINER_STATE).is_file() else {}
    return found | ({_INCOMPLETE: "says that its save was not finished"} if (folder / _INCOMPLETE).is_file() else {})


def _lost(point: ResumePoint) -> list[str]:
    """Damaged files that no run can start without."""
    return [
        name
        for name in point.damage
        if name == MANIFEST
        or (name not in _NOT_ESSENTIAL and any(fnmatch.fnmatch(name, pattern) for pattern in _ESSENTIAL))
    ]


def _with_remark(point: ResumePoint) -> ResumePoint:
    if point.manifest is None:
        _say(
            "%s has no %s: an earlier release, transformers or TRL wrote it, and files that were damaged "
            "since cannot be told from intact ones",
            point.folder,
            MANIFEST,
        )
    return point


def _listed(damage: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {reason}" for name, reason in damage.items())


def _say(text: str, *values: object) -> None:
    if dist.is_main():
        logger.warning(text, *values)
