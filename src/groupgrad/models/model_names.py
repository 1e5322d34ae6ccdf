"""Checks that a model's name resolves to a folder, the cache or the hub, before anything is loaded.

Loading asks the hub for several files, each with retries, so that a wrong name would take half a minute to fail.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

from groupgrad.spelling import nearest

REMEDY = "set it to a folder with a config.json, or to a name on the hub"

_FILES = ("config.json", "adapter_config.json")
"""Files of which a model on the hub has at least one."""


def folder_as_text(model: Any) -> Any:
    """Returns a folder given as a path object as text, like a name; anything else as it is.

    What can be called is a function or a model, even if it has `__fspath__`, as mock objects do.
    """
    return os.fspath(model) if isinstance(model, os.PathLike) and not callable(model) else model


def model_source(model: Any) -> str:
    """Returns the name or folder that a model was loaded from, or `model` if it is a name; empty if unknown."""
    model = folder_as_text(model)
    return model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")


def check_model_name(setting: str, name: str, kwargs: Mapping[str, Any] | None = None) -> None:
    """ValueError for a name that is no folder and cannot be on the hub, or that is asked for while the hub is away.

    `kwargs` are those of `from_pretrained`.
    """
    why = missing_because(name, kwargs)
    if why is not None:
        raise ValueError(f"{setting}={name!r}: {why}; {REMEDY}")


def missing_because(name: str, kwargs: Mapping[str, Any] | None = None) -> str | None:
    """Returns why a name leads to no model, as the middle of a sentence; None if it may lead to one."""
    if os.path.exists(name):
        return None
    if looks_like_path(name):
        return f"there is no such folder{_place(name)}{_hint(name)}"
    kwargs = kwargs or {}
    if _is_cached(name, kwargs):
        return None
    away = _hub_is_away(kwargs)
    if away is None:
        return None
    cache = kwargs.get("cache_dir") or constants.HF_HUB_CACHE
    return f"there is no such folder{_place(name)}{_hint(name)}, no copy from the hub in {cache}, and {away}"


def looks_like_path(name: str) -> bool:
    """True for a name that the hub does not have: names there are `model` or `owner/model`."""
    return name.startswith((".", "~", "/")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _place(name: str) -> str:
    return "" if os.path.isabs(name) else f" in {os.getcwd()}"


def _hint(name: str) -> str:
    """A folder beside the missing one that may have been meant."""
    whole = os.path.expanduser(name)
    if whole != name and os.path.exists(whole):
        return f" (~ stands for nothing here; did you mean {whole!r}?)"
    path = Path(whole)
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    similar = nearest(path.name, beside)
    return f" (did you mean {str(path.with_name(similar))!r}?)" if similar else ""


def _is_cached(name: str, kwargs: Mapping[str, Any]) -> bool:
    where = {key: kwargs[key] for key in ("cache_dir", "revision") if kwargs.get(key) is not None}
    files = [kwargs["gguf_file"]] if kwargs.get("gguf_file") else _FILES
    paths = [os.path.join(kwargs.get("subfolder") or "", file) for file in files]
    return any(isinstance(try_to_load_from_cache(name, path, **where), str) for path in paths)


def _hub_is_away(kwargs: Mapping[str, Any]) -> str | None:
    """Returns why nothing can be downloaded; None if it may be."""
    if constants.HF_HUB_OFFLINE or kwargs.get("local_files_only"):
        setting = "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "local_files_only"
        return f"{setting} forbids to download it"
    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or getproxies():  # a proxy looks the address up
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return f"{host} cannot be reached"
    return None
