"""HTTP client for groupgrad's routes on a vLLM server: addresses, keys, and calls with a deadline on every wait.

A server and its trainers share a key: `VLLM_API_KEY`, or one that the server makes and stores in a file that only its
user can read, so trainers of the same user on the same machine need no setting.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import shlex
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupgrad.integrations.vllm.wire import FLAGS

POLL_S = 0.25
"""Seconds between two attempts to reach a server that is not up yet."""

LOOK_TIMEOUT_S = 10.0
"""Longest wait for the answer of one such attempt, in seconds."""

MISSING_KEY_STATUS = 401
"""Status of a refusal of a call without the server's key."""

VARIABLE = "VLLM_API_KEY"
"""Environment variable of vLLM's with the key, which both sides read first."""

GIVEN_UP = "sampling was given up, since training ends"


class ServerUnreachable(ConnectionError):
    """The server cannot be reached, or ended in the middle of an answer."""


class ServerTimeout(ConnectionError):
    """The server took the call and did not answer in time."""


class ServerRefused(RuntimeError):
    """The server answered with an error; the message is the server's own."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


@dataclass(slots=True, frozen=True)
class Address:
    """Address of a server."""

    host: str
    port: int
    secure: bool = False
    path: str = ""

    @classmethod
    def of(cls, base_url: str | None = None, host: str = "0.0.0.0", port: int = 8000) -> Address:
        """Parses a URL, or combines host and port. ValueError for an invalid URL."""
        if base_url is None:
            return cls("127.0.0.1" if host == "0.0.0.0" else host, port)
        url = urllib.parse.urlsplit(base_url)
        try:
            url_host, url_port = url.hostname, url.port
        except ValueError:  # an invalid port
            url_host = url_port = None
        if url.scheme not in ("http", "https") or not url_host:
            raise ValueError(
                f"vllm_server_base_url is {base_url!r}, which is no address; write it like 'http://localhost:8000'"
            )
        secure = url.scheme == "https"
        return cls(url_host, url_port or (443 if secure else 80), secure, url.path.rstrip("/"))

    @classmethod
    def all_of(cls, base_url: str | Sequence[str] | None, host: str = "0.0.0.0", port: int = 8000) -> list[Address]:
        """The addresses of one server or several. ValueError for an invalid URL, and for one that is given twice."""
        if isinstance(base_url, str):
            return [cls.of(base_url)]
        addresses = [cls.of(str(url)) for url in base_url] if base_url else [cls.of(None, host, port)]
        twice = [str(address) for number, address in enumerate(addresses) if address in addresses[:number]]
        if twice:
            raise ValueError(f"vllm_server_base_url has {', '.join(twice)} more than once; name each server once")
        return addresses

    def __str__(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.host}:{self.port}{self.path}"


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
        written = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        with open(written, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(key)
        written.replace(path)  # at once: a trainer that waits for this server may be about to read it
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


def call(
    address: Address,
    route: str,
    body: bytes | memoryview | Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, Any] | None = None,
    timeout_s: float,
) -> dict[str, Any]:
    """The answer of `/groupgrad/<route>`, called with POST if there is a body.

    Raises `ServerUnreachable`, `ServerTimeout` or `ServerRefused`.
    """
    lines = list(Stream(address, route, body, query=query, timeout_s=timeout_s))
    if not lines:  # every route answers with an object
        raise ServerUnreachable(f"{address} ended before its answer to /groupgrad/{route}")
    return lines[0]


class Stream:
    """A call whose answer has one JSON object per line. Parameters and errors are as in `call`."""

    def __init__(
        self,
        address: Address,
        route: str,
        body: bytes | memoryview | Mapping[str, Any] | None,
        *,
        query: Mapping[str, Any] | None = None,
        timeout_s: float,
    ):
        self._address, self._route, self._timeout_s = address, route, timeout_s
        connection_type = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
        self._connection = connection_type(address.host, address.port, timeout=timeout_s)
        key = find_key(address.host, address.port)
        self._headers = {"Authorization": f"Bearer {key[0]}"} if key else {}
        self._path = f"{address.path}/groupgrad/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        self._data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        self._is_closed = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Makes the call; yields the objects as they come."""
        address = self._address
        data, self._data = self._data, None  # a body with images is large, and is not needed once it is sent
        try:
            self._connection.request("GET" if data is None else "POST", self._path, body=data, headers=self._headers)
            del data
            response = self._connection.getresponse()
            if response.status != 200:
                is_keyless = response.status == MISSING_KEY_STATUS
                raise ServerRefused(response.status, _key_problem(address) if is_keyless else _reason(response.read()))
            if self._is_closed:  # before there was a connection to close
                return
            for line in response:
                yield json.loads(line)
        except TimeoutError:
            story = f"{address} did not answer /groupgrad/{self._route} within {self._timeout_s:g} s"
            raise ServerTimeout(story) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(f"{address} is not there: {type(error).__name__}: {error}") from None
        except json.JSONDecodeError as error:
            story = f"{address} ended in the middle of a line, or its answer to /groupgrad/{self._route} is no JSON"
            raise ServerUnreachable(f"{story}: {error}") from None
        except (AttributeError, ValueError) as error:  # another thread closed the connection meanwhile
            raise ServerUnreachable(f"the connection to {address} was closed: {error}") from None
        finally:
            self._connection.close()

    def close(self) -> None:
        """Closes the connection, from any thread; the server then stops its work for this call."""
        self._is_closed = True
        connected = self._connection.sock  # the thread that reads may take it away
        if connected is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def wait_until_up(
    address: Address, *, timeout_s: float, is_given_up: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """The answer of `/groupgrad/info`, as soon as there is one.

    TimeoutError, with the last failure, when the attempt that is under way after `timeout_s` has failed; ServerRefused
    for a server that is not groupgrad's; RuntimeError once `is_given_up` returns True.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call(address, "info", timeout_s=min(timeout_s, LOOK_TIMEOUT_S))
        except (ServerRefused, ConnectionError) as error:
            if isinstance(error, ServerRefused) and error.status in (404, 405):
                raise ServerRefused(
                    error.status,
                    f"a server answers at {address}, but it has no /groupgrad/info: it was not started by "
                    "`groupgrad vllm-serve`, or something else uses that port; `vllm serve` itself has to be given "
                    + shlex.join(FLAGS),
                ) from None
            if isinstance(error, ServerRefused) and error.status == MISSING_KEY_STATUS:
                raise
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no vLLM server came up at {address} within {timeout_s:g} s (last: {error}); start one with "
                    "`groupgrad vllm-serve --model NAME`, look into its output, or set vllm_server_base_url or "
                    "vllm_server_timeout"
                ) from None
        if is_given_up():
            raise RuntimeError(GIVEN_UP)
        time.sleep(POLL_S)


def _key_problem(address: Address) -> str:
    key = find_key(address.host, address.port)
    what = f"does not take the key in {key[1]}" if key else "wants a key, and this trainer has none"
    return (
        f"the vLLM server {address} {what}; set {VARIABLE} in the trainer's environment to the server's key, which "
        "`groupgrad vllm-serve` was given or has printed"
    )


def _reason(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:500] or "no reason given"
