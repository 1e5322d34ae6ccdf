"""Cheap checks of a checkpoint without a manifest, as transformers and TRL write them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

TRAINER_STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"

_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""File that transformers keeps in a checkpoint while it saves on a signal."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin")


def implausible(folder: Path) -> dict[str, str]:
    """The certainly damaged or missing files of a checkpoint without manifest, each with the reason.

    Archives are read in full, since they have checksums; of safetensors files only sizes are checked.
    """
    found: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        reason = _reason(path)
        if reason is not None:
            found[path.relative_to(folder).as_posix()] = reason
    if not (folder / TRAINER_STATE).is_file():
        found[TRAINER_STATE] = "is missing"
    has_weights = any(next(folder.rglob(pattern), None) for pattern in _WEIGHTS)
    if not has_weights and not any(path.is_dir() for path in folder.iterdir()):
        found["model.safetensors"] = "is missing, and no other weights are there"
    for name, other in ((OPTIMIZER, SCHEDULER), (SCHEDULER, OPTIMIZER)):
        if (folder / other).is_file() and not (folder / name).is_file() and not any(folder.glob("global_step*")):
            found[name] = f"is missing beside {other}"
    return found | _missing_shards(folder)


def _reason(path: Path) -> str | None:
    if path.name == _INCOMPLETE:
        return "says that its save was not finished"
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="np"):  # reads the header, which has to fit the size
                return None
        if path.suffix in (".pt", ".pth", ".bin"):
            return _archive(path)
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except SafetensorError as error:
        return f"has {path.stat().st_size} bytes that are no whole file of weights ({error})"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    except ValueError:
        return "is not JSON"
    return None


def _archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return "is cut off or damaged"
    return None if broken is None else f"is damaged: the checksum of {broken} is wrong"


def _missing_shards(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
        found |= {name: f"is missing, and {index.name} names it" for name in names if not (folder / name).is_file()}
    return found
