"""`groupgrad view`: shows runs as a local page, or writes them into one file."""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from groupgrad.cli.command_parser import CommandParser, refuse
from groupgrad.cockpit import LOCAL_HOSTS
from groupgrad.cockpit.reading import NoRun, RunFolder
from groupgrad.sweep.store import FILE as SWEEP_FILE

INSTALL = "the page needs Starlette and uvicorn; install them with `pip install 'starlette>=0.40' 'uvicorn>=0.30'`"


def main(argv: Sequence[str]) -> int:
    """Serves the page of runs until it is interrupted. Returns 1 if a package is missing, 2 for no run."""
    arguments = parser().parse_args(argv)
    try:
        runs = _runs(arguments.runs)
        if arguments.export is not None:
            for flag, given in (("--host", arguments.host), ("--port", arguments.port), ("--token", arguments.token)):
                if given is not None:
                    raise ValueError(f"{flag} belongs to a served page, and --export writes a file; drop one of them")
            if not arguments.export.parent.is_dir():
                folder = arguments.export.parent
                raise NoRun(f"--export {str(arguments.export)!r}: there is no folder {str(folder)!r}; make it first")
            from groupgrad.cockpit.static_report import write_report

            write_report(runs, arguments.export)
            print(f"{arguments.export} holds {', '.join(run.name for run in runs)}; it needs no server")
            return 0
    except (ValueError, OSError) as error:
        return refuse("view", error)
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        print(f"groupgrad view: error: {INSTALL}", file=sys.stderr)
        return 1
    return _serve(runs, arguments.host or "127.0.0.1", arguments.port or 0, arguments.token)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "view",
        description="Show runs, finished or in progress, as a local page.",
        examples="groupgrad view out\ngroupgrad view runs/a runs/b\ngroupgrad view out --export report.html",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="*", default=["."], help="output_dir of a run or of a sweep, or a folder of them"
    )
    parser.add_argument("--host", help="address to serve at (default 127.0.0.1); another one needs a token")
    parser.add_argument("--port", type=_port, help="port (default: any that is free, from 8765 on)")
    parser.add_argument("--token", help="token of the address (default: a random one unless served at 127.0.0.1)")
    parser.add_argument("--export", metavar="FILE", type=Path, help="write a report that needs no server, and end")
    return parser


def _port(text: str) -> int:
    if not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; give 1 to 65535, or 0 for any that is free")
    return int(text)


def _runs(paths: Sequence[str]) -> list[RunFolder]:
    """The runs at paths, or in the folders there. NoRun if there are none; equal names are told apart by paths."""
    found: list[RunFolder] = []
    for path in paths:
        try:
            found.append(RunFolder(path))
        except NoRun:
            inside = [run for folder in _folders(Path(path)) for run in _run_or_arms(folder)]
            if not inside:
                raise
            found += inside
    names = [run.name for run in found]
    for run in found:
        if names.count(run.name) > 1:
            run.name = str(run.path)
    return found


def _folders(path: Path) -> list[Path]:
    """The folders in a folder of runs or of a sweep, by name."""
    folder = path / "arms" if (path / SWEEP_FILE).is_file() else path
    return sorted(child for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []


def _run_or_arms(folder: Path) -> list[RunFolder]:
    """The run of a folder, or the arms of the sweep there; nothing for another folder."""
    found: list[RunFolder] = []
    for place in _folders(folder) if (folder / SWEEP_FILE).is_file() else [folder]:
        with suppress(NoRun):
            found.append(RunFolder(place))
    return found


def _serve(runs: Sequence[RunFolder], host: str, port: int, token: str | None) -> int:
    import uvicorn

    from groupgrad.cockpit.server import make_app

    is_local = host in LOCAL_HOSTS
    if token is None and not is_local:
        token = secrets.token_urlsafe(24)
    is_any = host in ("0.0.0.0", "::", "")
    hosts = () if is_any else (*LOCAL_HOSTS, host)
    try:
        listener = _listen(host, port)
    except OSError as error:
        place = f"{host}, port {port}" if port else host
        print(
            f"groupgrad view: error: a page cannot be served at {place} ({error.strerror or error}); set --host to an "
            "address of this machine, or --port to a free port",
            file=sys.stderr,
        )
        return 1
    shown = socket.gethostname() if is_any else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/" + ("" if token is None else f"?token={token}")
    print(f"{', '.join(run.name for run in runs)} at {address} (Ctrl-C ends it)", flush=True)
    config = uvicorn.Config(make_app(runs, hosts=hosts, token=token), log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a port, or at the first free one of some if it is 0. OSError if there is none."""
    ports = [port] if port else [*range(8765, 8785), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError:
            listener.close()
            if number == ports[-1]:
                raise
    raise AssertionError("a port or an error was found")
