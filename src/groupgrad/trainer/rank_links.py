"""Connections between rank 0 and the other ranks of a run, for short messages."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import time
import weakref
from dataclasses import dataclass, field

from groupgrad import dist

logger = logging.getLogger(__name__)

CONNECT_S = 20.0
"""Time in which all ranks connect to rank 0."""

HELLO_BYTES = 64
"""Length of the first message, which shows that no stranger has connected."""

HELLO_S = 2.0
"""Time that a connection has for its first message."""

LOST_S = 120
"""Time without an answer of the other machine after which the system gives a connection up."""

SEND_S = 1.0
"""Longest time that sending a message takes; the messages of a rank that reads none are dropped then."""


@dataclass(slots=True, frozen=True)
class News:
    """A message of one rank to the others."""

    kind: str
    """`lives`, `busy`, `done`, `failed`, `hangs`, `silent` or `gone`."""
    rank: int
    """The rank that this is about."""
    text: str
    """The rank's present phase, or the reason for which it ends."""


@dataclass(eq=False)
class Link:
    """A connection to another rank."""

    rank: int
    name: str
    """Rank, process and host, for messages."""
    socket: socket.socket
    doing: str = ""
    """The last activity that the rank has told of."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """True if the rank has said that it ends, so that the end of the connection is no news."""
    is_closed: bool = False
    _can_send: bool = True
    _unread: bytes = b""

    def fileno(self) -> int:
        """The socket's file descriptor, which selectors need."""
        return self.socket.fileno()

    def send(self, news: News) -> None:
        """Sends a message, unless the connection has ended or the other rank reads nothing."""
        if not self._can_send:
            return
        line = json.dumps([news.kind, news.rank, news.text]) + "\n"
        try:
            self.socket.sendall(line.encode())
        except OSError:
            self._can_send = False

    def read(self) -> list[News]:
        """The messages that have come; `is_closed` after the last one. Call it when there is something to read."""
        try:
            received = self.socket.recv(2**16)
        except TimeoutError:
            return []
        except OSError:
            received = b""
        self.is_closed, self.heard_at = not received, time.monotonic()
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [News(*json.loads(line)) for line in lines]

    def end(self) -> None:
        """Closes the connection after the data already sent; a selector that waits for it on another thread returns."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the connection in this process."""
        with contextlib.suppress(OSError):
            self.socket.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process does not keep the connections of a rank that is killed."""
    for link in _links:
        link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def name_of(rank: int, pid: int, host: str) -> str:
    """A rank's name in messages."""
    return f"rank {rank} (pid {pid} on {host})"


def connect() -> list[Link]:
    """Collective. The connections of this rank: to all other ranks on rank 0, to rank 0 on another.

    Rank 0 listens on this machine alone if all ranks are there. A connection that cannot be made gives a warning.
    """
    host, token = socket.gethostname(), secrets.token_hex(16)
    hosts = dist.all_gather_objects(host)
    server = None
    with dist.errors_on_all_ranks():
        if dist.is_main():
            server = socket.create_server(("127.0.0.1" if len(set(hosts)) == 1 else "", 0), backlog=len(hosts))
    own = (os.getpid(), 0 if server is None else server.getsockname()[1], token)
    processes = dist.all_gather_objects(own)
    names = [name_of(rank, pid, hosts[rank]) for rank, (pid, _, _) in enumerate(processes)]
    _, port, token = processes[0]
    if server is not None:
        with server:
            links = _accept(server, names, token)
    else:
        links = _reach(_address(hosts[0] == host), port, names[0], token)
    _links.update(links)
    return links


def _address(is_here: bool) -> str:
    """Address at which rank 0 listens."""
    return "127.0.0.1" if is_here else os.environ.get("MASTER_ADDR", "127.0.0.1")


def _accept(server: socket.socket, names: list[str], token: str) -> list[Link]:
    links: dict[int, Link] = {}
    end = time.monotonic() + CONNECT_S
    while len(links) < len(names) - 1 and (left_s := end - time.monotonic()) > 0:
        server.settimeout(left_s)
        try:
            connection, _ = server.accept()
            said, _, rank = _hello(connection, min(left_s, HELLO_S)).strip().partition(b" ")
        except OSError:
            continue
        if hmac.compare_digest(said, token.encode()):
            _prepare(connection)
            links[int(rank)] = Link(int(rank), names[int(rank)], connection)
        else:
            connection.close()
    for rank, name in enumerate(names):
        if rank and rank not in links:
            logger.warning("%s has not connected to rank 0: its end will show in collectives alone", name)
    return [links[rank] for rank in sorted(links)]


def _hello(connection: socket.socket, seconds: float) -> bytes:
    """Reads the first message; returns fewer bytes if the connection ends early."""
    end, received = time.monotonic() + seconds, b""
    while len(received) < HELLO_BYTES:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        piece = connection.recv(HELLO_BYTES - len(received))
        if not piece:
            break
        received += piece
    return received


def _reach(address: str, port: int, name: str, token: str) -> list[Link]:
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_S)
        connection.sendall(f"{token} {dist.rank()}".encode().ljust(HELLO_BYTES))
    except OSError as error:
        logger.warning("%s is not at %s:%d (%s): its end will show in collectives alone", name, address, port, error)
        return []
    _prepare(connection)
    return [Link(0, name, connection)]


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SEND_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
