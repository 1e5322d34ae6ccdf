"""The secret that a vLLM server and its trainers share: `VLLM_API_KEY`, or one that the server makes and stores.

A stored key is a file that only its user can read, so trainers of the same user on the same machine need no setting.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from pathlib import Path

VARIABLE = "VLLM_API_KEY"
"""Environment variable of vLLM's own, which both sides read first."""


def check_key(key: str, origin: str) -> str:
    """The key itself. ValueError, without the key, if it cannot be sent in a header."""
    if key and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise ValueError(
        f"the key in {origin} has {len(key)} characters, and is empty or has spaces or characters outside of ASCII, "
        "which no header carries; take one like that of `openssl rand -hex 32`"
    )


def key_file(port: int) -> Path:
    """The file that stores the key of this user's server at this port of this machine."""
    state = os.environ.get("XDG_STATE_HOME")
    folder = (Path(state) if state else Path.home() / ".local" / "state") / "groupgrad" / "vllm-keys"
    return folder / f"{socket.gethostname()}-{port}"


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    return host in ("localhost", "::1") or host.startswith("127.")


def store_new_key(port: int) -> tuple[str, OSError | None]:
    """A new key, and the error if it could not be stored for trainers of this user."""
    key, path = secrets.token_urlsafe(32), key_file(port)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the rights of a file that is there would stay as they are
        with open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(key)
    except OSError as error:
        return key, error
    return key, None


def forget_key(port: int) -> None:
    """Removes the key that an earlier server at this port has stored."""
    with contextlib.suppress(OSError):
        key_file(port).unlink(missing_ok=True)


def find_key(host: str, port: int) -> tuple[str, str] | None:
    """The key for the server at this address and where it comes from; None if there is none.

    ValueError for a key that cannot be sent. A stored key is only used for a server on this machine.
    """
    if key := os.environ.get(VARIABLE):
        return check_key(key, VARIABLE), VARIABLE
    if not is_loopback(host) and host != socket.gethostname():
        return None
    path = key_file(port)
    try:
        return check_key(path.read_text(encoding="ascii"), str(path)), str(path)
    except (OSError, UnicodeDecodeError):
        return None
