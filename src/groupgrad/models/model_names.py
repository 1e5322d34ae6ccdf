"""Names of models: folders, or names on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from groupgrad import compat

REMEDY = "set it to a folder with a config.json, or to a name on the hub"


def folder_as_text(model: Any) -> Any:
    """Returns a folder given as a path object as text, like a name; anything else as it is.

    What can be called is a function or a model, even if it has `__fspath__`, as mock objects do.
    """
    return os.fspath(model) if isinstance(model, os.PathLike) and not callable(model) else model


def model_source(model: Any) -> str:
    """Returns the name or folder that a model was loaded from, or `model` if it is a name; empty if unknown."""
    model = folder_as_text(model)
    return model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def check_model_name(setting: str, name: str) -> None:
    """ValueError for a path without a folder; names of the hub are looked up when the model is loaded."""
    why = missing_because(name)
    if why is not None:
        raise ValueError(f"{setting}={name!r}: {why}; {REMEDY}")


def check_gguf_file(setting: str, name: str, gguf_file: str | None) -> None:
    """ValueError for a GGUF file that is meant but not named; ImportError if one is named and cannot be read."""
    if gguf_file:
        compat.require("gguf", f"{setting}={name!r} with gguf_file={gguf_file!r}")
        return
    path = Path(name)
    found = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not found or any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        return
    file = found[0].name
    raise ValueError(
        f"{setting}={name!r} has its weights in a GGUF file; set {setting}={str(found[0].parent)!r} and "
        f"model_init_kwargs={{'gguf_file': {file!r}}} (for env and plan: --gguf-file {file})"
    )


def missing_because(name: str) -> str | None:
    """Returns why a name leads to no model, as the middle of a sentence; None if it may lead to one.

    transformers would look for a missing folder on the hub, and say that it is no name there.
    """
    if os.path.exists(name) or not looks_like_path(name):
        return None
    return "there is no such folder" + ("" if os.path.isabs(name) else f" in {os.getcwd()}")


def looks_like_path(name: str) -> bool:
    """True for a name that the hub does not have: names there are `model` or `owner/model`."""
    return name.startswith((".", "~", "/")) or name.endswith("/") or name.count("/") > 1 or "\\" in name
