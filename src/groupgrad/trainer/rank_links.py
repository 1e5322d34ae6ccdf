"""Connections between rank 0 and the other ranks of a run, for short messages beside the process group.

The end of a connection shows within a moment that a process was killed. A message is a line: first a token that ranks
alone know, so that no stranger is listened to, then news as JSON.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from groupgrad import dist

logger = logging.getLogger(__name__)

CONNECT_S = 20.0
"""Longest time in which a rank connects to rank 0."""

LOST_S = 120
"""Time without an answer of the other machine after which the system gives a connection up."""

SEND_S = 1.0
"""Longest time that sending a message takes; the messages of a rank that reads none are dropped then."""


@dataclass(slots=True, frozen=True)
class News:
    """A message of one rank to the others."""

    kind: str
    """`works` or `waits` (a sign of life), `done`, `failed`, `hangs`, `silent` or `gone`."""
    rank: int
    """The rank that this is about."""
    text: str
    """The rank's present activity, or the reason for which it ends."""


@dataclass(eq=False)
class Link:
    """A connection to another rank."""

    socket: socket.socket
    rank: int = 0
    name: str = ""
    """Rank, process and host, for messages; empty until the other side has shown the token."""
    doing: str = ""
    """The last activity that the rank has told of."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """True if the rank has said that it ends, so that the end of the connection is no news."""
    _can_send: bool = True
    _unread: bytes = b""

    def __post_init__(self) -> None:
        self.socket.settimeout(SEND_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)

    def send(self, line: str) -> None:
        """Sends a line, unless the connection has ended or the other rank reads nothing."""
        if self._can_send:
            try:
                self.socket.sendall(line.encode() + b"\n")
            except OSError:
                self._can_send = False

    def read(self) -> list[str] | None:
        """The lines that have come; None at the connection's end. Call it when there is something to read."""
        try:
            received = self.socket.recv(2**16)
        except TimeoutError:
            return []
        except OSError:
            received = b""
        self.heard_at = time.monotonic()
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [line.decode(errors="replace") for line in lines] if received else None


class RankLinks:
    """The connections of this rank: to all other ranks on rank 0, to rank 0 on another rank, none for a single rank."""

    def __init__(self) -> None:
        """Collective. Connects this rank to rank 0, which listens on this machine alone if all ranks are there.

        A connection that cannot be made gives a warning.
        """
        self._links: list[Link] = []
        self._lock = threading.Lock()
        """Held while news is sent and while a link is added or dropped."""
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._early: list[tuple[Link, News | None]] = []
        """News that came before the first call of `receive`."""
        if not dist.is_active():
            return
        host, server = socket.gethostname(), None
        hosts = dist.all_gather_objects(host)
        with dist.errors_on_all_ranks():
            if dist.is_main():
                server = socket.create_server(("127.0.0.1" if len(set(hosts)) == 1 else "", 0), backlog=len(hosts))
                server.settimeout(SEND_S)
                self._sockets.append(server)
                self._selector.register(server, selectors.EVENT_READ)
        port = 0 if server is None else server.getsockname()[1]
        processes = dist.all_gather_objects((os.getpid(), port, secrets.token_hex(16)))
        self._names = [_name(rank, pid, hosts[rank]) for rank, (pid, _, _) in enumerate(processes)]
        _, port, self._token = processes[0]
        _all_links.add(self)
        if server is None:
            self._reach("127.0.0.1" if hosts[0] == host else os.environ.get("MASTER_ADDR", "127.0.0.1"), port)
        num_connected = sum(dist.all_gather_objects(len(self._links)))
        end = time.monotonic() + CONNECT_S
        while dist.is_main() and len(self._links) < num_connected and time.monotonic() < end:
            self._early = self.receive(SEND_S)

    @property
    def is_open(self) -> bool:
        """True as long as there is a connection to wait for."""
        return bool(self._selector.get_map())

    def __iter__(self) -> Iterator[Link]:
        """The ranks that are connected. For the thread that receives."""
        return iter(self._links)

    def send(self, news: News, *, but: Link | None = None) -> None:
        """Sends news to all ranks that are connected, `but` for one. For any thread."""
        line = json.dumps([news.kind, news.rank, news.text])
        with self._lock:
            for link in self._links:
                if link is not but:
                    link.send(line)

    def receive(self, seconds: float) -> list[tuple[Link, News | None]]:
        """Waits for news for `seconds` at most; None stands for the end of a connection."""
        received, self._early = self._early, []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):  # who has connected is gone again
                    self._open(self._sockets[0].accept()[0])
                continue
            link: Link = key.data
            lines = link.read()
            if lines and not link.name:
                lines = lines[1:] if self._greet(link, lines[0]) else None
            received += [(link, News(*json.loads(line))) for line in lines or ()]
            if lines is None:
                received += [(link, None)] if link.name else []
                self._drop(link)
        return received

    def close(self, reader: threading.Thread) -> None:
        """Closes the connections after the data already sent, and waits for the end of the thread that receives."""
        for opened in self._sockets:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # a selector that waits for it returns
        reader.join()
        for opened in self._sockets:
            opened.close()
        self._selector.close()

    def _reach(self, address: str, port: int) -> None:
        name = self._names[0]
        try:
            link = self._open(socket.create_connection((address, port), timeout=CONNECT_S))
        except OSError as error:
            logger.warning(
                "%s is not at %s:%d (%s): its end will show in collectives alone", name, address, port, error
            )
            return
        link.name = name
        link.send(f"{self._token} {dist.rank()}")
        self._links.append(link)

    def _open(self, connection: socket.socket) -> Link:
        link = Link(connection)
        self._sockets.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def _greet(self, link: Link, line: str) -> bool:
        """True if a new connection's first line has the token."""
        token, _, rank = line.partition(" ")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            return False
        link.rank, link.name = int(rank), self._names[int(rank)]
        with self._lock:
            self._links.append(link)
        return True

    def _drop(self, link: Link) -> None:
        self._selector.unregister(link.socket)
        with self._lock:
            self._links = [other for other in self._links if other is not link]


def _name(rank: int, pid: int, host: str) -> str:
    return f"rank {rank} (pid {pid} on {host})"


def rank_name() -> str:
    """This rank's name in messages."""
    return _name(dist.rank(), os.getpid(), socket.gethostname())


_all_links: weakref.WeakSet[RankLinks] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process does not keep the connections of a rank that is killed."""
    for links in _all_links:
        for opened in links._sockets:
            opened.close()


os.register_at_fork(after_in_child=_close_in_child)
