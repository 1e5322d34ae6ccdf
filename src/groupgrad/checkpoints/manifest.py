"""The manifest of a checkpoint: its last file, which lists all others with size and SHA-256."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from groupgrad.errors import CheckpointError

MANIFEST = "manifest.json"
"""Name of the manifest in a checkpoint's folder."""

TRAINER_STATE, OPTIMIZER, SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"
"""Files of a checkpoint by the names that transformers gives them. It writes the first of these last."""

_CHUNK_BYTES = 2**22


@dataclass(slots=True, frozen=True)
class FileDigest:
    """Size and content of one file."""

    size: int
    """In bytes."""
    sha256: str
    """64 hexadecimal digits."""


@dataclass(slots=True, frozen=True)
class Manifest:
    """The files of a checkpoint, and the run that wrote them."""

    step: int
    """Optimizer steps made."""
    world_size: int
    """Number of processes that wrote the checkpoint."""
    files: Mapping[str, FileDigest]
    """Keys are paths relative to the checkpoint's folder, written with `/`. The manifest does not list itself."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Releases of the libraries that took part, by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that decide results, as JSON values."""
    optimizer: str | None = None
    """Class of the optimizer whose state is saved; None without one."""
    prompts_used: int | None = None
    """Prompts of the data that the run has used; None if the run did not say."""
    trained: Mapping[str, str] | None = None
    """Dtype and shape of each trained parameter by name, such as `float32 64x32`, in the order in which the optimizer
    numbers them; None if the run did not say."""
    adapter: Mapping[str, Any] | None = None
    """Settings of the adapter; None without one."""
    reference: Mapping[str, str] | None = None
    """`name` and `digest` of the model that the KL divergence is measured from; None without a fixed one."""

    def write(self, folder: Path) -> None:
        """Writes the manifest, with a digest of itself, and syncs it to the disk."""
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        body["files"] = {name: asdict(found) for name, found in self.files.items()}
        text = json.dumps({**body, "digest": _digest_of(body)}, indent=1)
        path = folder / MANIFEST
        path.write_text(text, encoding="utf-8")
        sync(path)

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest of a checkpoint; None if it has none. CheckpointError if the manifest is damaged."""
        path = folder / MANIFEST
        if not path.is_file():
            return None
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            digest = body.pop("digest")
            intact = digest == _digest_of(body)
        except (ValueError, KeyError, TypeError, AttributeError):
            intact, body = False, {}
        if not intact:
            raise CheckpointError(f"{path} is damaged: its text does not have the digest that it was written with")
        files = {name: FileDigest(**entry) for name, entry in body.pop("files").items()}
        readable = {key: value for key, value in body.items() if key in cls.__dataclass_fields__}
        return cls(files=files, **readable)


def _digest_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def file_names(folder: Path) -> list[str]:
    """Paths of all files below `folder` but the manifest, with `/` between folders, sorted."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def digest(path: Path) -> FileDigest:
    """Reads a file once and returns its size and SHA-256. OSError if it cannot be read."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            size += len(chunk)
    return FileDigest(size, sha256.hexdigest())


def sync(path: Path) -> None:
    """Waits until a file or a folder is on the disk. OSError if the disk refuses."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without such a call
            raise
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """Waits until the entries of `folder` and of all folders below it are on the disk."""
    for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync(below)
    sync(folder)


def damage_of(folder: Path, expected: Mapping[str, FileDigest], names: Iterable[str]) -> dict[str, str]:
    """The reason by name for each of these files of a checkpoint that is not as it was written."""
    damage: dict[str, str] = {}
    for name in names:
        path, wanted = folder / name, expected[name]
        try:
            size = path.stat().st_size
            if size != wanted.size:
                damage[name] = f"has {size} bytes, {wanted.size} were written"
            elif digest(path).sha256 != wanted.sha256:
                damage[name] = "has other content than was written (SHA-256)"
        except FileNotFoundError:
            damage[name] = "is missing"
        except OSError as error:
            damage[name] = f"cannot be read ({error.strerror or error})"
    return damage
