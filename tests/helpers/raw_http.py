"""HTTP as an attacker writes it: bytes over a connection of its own."""

from __future__ import annotations

import json
import socket
import urllib.parse
from typing import Any


def request(path: str, body: bytes = b"", key: str | None = None, *, length: int | None = None, **query: Any) -> bytes:
    """The bytes of a request; without a body it is a GET."""
    target = path + (f"?{urllib.parse.urlencode(query)}" if query else "")
    lines = [f"{'POST' if body or length else 'GET'} {target} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"Content-Length: {len(body) if length is None else length}"] if body or length else []
    lines += [f"Authorization: Bearer {key}"] if key is not None else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def raw_exchange(port: int, *parts: bytes, timeout_s: float = 5.0) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer to bytes that are sent over a connection of their own; status 0 for no answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            while chunk := connection.recv(65536):
                answer += chunk
        except (TimeoutError, ConnectionError):
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, json.loads(body) if body.startswith(b"{") else {}
