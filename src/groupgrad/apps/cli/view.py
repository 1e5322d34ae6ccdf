"""`groupgrad view`: shows runs as a local page, or writes them into one file."""

from __future__ import annotations

import argparse
import secrets
import socket
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from groupgrad import compat
from groupgrad.apps.cli.command_parser import CommandParser, port_number, refuse
from groupgrad.apps.cli.sweep import CommandLinePanel
from groupgrad.apps.runs.run_folder import NoRun, RunFolder
from groupgrad.apps.sweep.store import FILE as SWEEP_FILE
from groupgrad.apps.view import LOCAL_HOSTS


def main(argv: Sequence[str]) -> int:
    """Serves the page of runs until it is interrupted. Returns 1 if a package is missing, 2 for no run."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.export is not None:
            for flag, given in (("--host", arguments.host), ("--port", arguments.port), ("--token", arguments.token)):
                if given is not None:
                    raise ValueError(f"{flag} belongs to a served page, and --export writes a file; drop one of them")
        paths = RunPaths(arguments.runs or ["."])
        sweeps = _panels(paths.sweeps)
        if arguments.export is not None:
            from groupgrad.apps.view.page_files import write_report

            write_report(paths.runs(), arguments.export, sweeps)
            print(f"{arguments.export} holds {_names(paths)}; it needs no server")
            return 0
    except (ValueError, OSError) as error:
        return refuse("view", error)
    try:
        for package in ("starlette", "uvicorn"):
            compat.require(package, "the page")
        return _serve(paths, sweeps, arguments.host or "127.0.0.1", arguments.port or 0, arguments.token)
    except (ImportError, OSError) as error:
        return refuse("view", error, 1)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of this command."""
    parser = CommandParser(
        "view",
        description="Show runs, finished or in progress, as a local page.",
        examples="groupgrad view runs/math\ngroupgrad view runs --port 8800\n"
        "groupgrad view runs/a runs/b --export report.html",
    )
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="*",
        help="output_dir of a run or of a sweep, or a folder of them (default: this folder)",
    )
    page = parser.add_argument_group("Page")
    page.add_argument("--host", help="address to serve at (default: 127.0.0.1); another one needs a token")
    page.add_argument("--port", type=port_number, help="port (default: any that is free, from 8765 on)")
    page.add_argument("--token", help="token of the address (default: a random one for a sweep or another --host)")
    report = parser.add_argument_group("Report")
    report.add_argument("--export", metavar="FILE", type=Path, help="write a report that needs no server, and end")
    return parser


def _panels(folders: Sequence[Path]) -> list[CommandLinePanel]:
    """The sweeps that can be read; a line on stderr for each other one."""
    found: list[CommandLinePanel] = []
    for folder in folders:
        try:
            panel = CommandLinePanel(folder)
            panel.table()
            found.append(panel)
        except (ValueError, OSError, sqlite3.Error) as error:
            print(f"groupgrad view: the sweep in {folder} cannot be read, its runs are shown: {error}", file=sys.stderr)
    return found


def _serve(paths: RunPaths, sweeps: Sequence[CommandLinePanel], host: str, port: int, token: str | None) -> int:
    import uvicorn

    from groupgrad.apps.view.server import make_app

    is_local = host in LOCAL_HOSTS
    if token is None and (sweeps or not is_local):
        token = secrets.token_urlsafe(24)
    is_any = host in ("0.0.0.0", "::", "")
    hosts = () if is_any else (*LOCAL_HOSTS, host)
    listener = _listen(host, port)
    shown = socket.gethostname() if is_any else f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/" + ("" if token is None else f"?token={token}")
    app = make_app(paths.runs, sweeps, hosts=hosts, token=token)
    config = uvicorn.Config(app, log_level="warning", access_log=False)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            # Only from here on does a signal end the page as it should.
            print(f"{_names(paths)} at {address} (Ctrl-C ends it)", flush=True)

    try:
        Server(config).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises it again once the page is closed
        print()
    return 0


def _names(paths: RunPaths) -> str:
    return ", ".join([run.name for run in paths.runs()] or [path.name for path in paths.sweeps])


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a port, or at the first free one of some if it is 0. OSError, with what to set, if there
    is none."""
    family, reason = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
    for number in [port] if port else [*range(8765, 8785), 0]:
        try:
            is_any = host == "::" and socket.has_dualstack_ipv6()
            return socket.create_server((host, number), family=family, backlog=64, dualstack_ipv6=is_any)
        except OSError as error:
            reason = str(error)
    raise OSError(
        f"no page can be served at {host}: {reason}; set --host to an address of this machine, or --port to a free port"
    )


class RunPaths:
    """Paths of runs, of sweeps, or of folders of them. Runs that begin later are found when they are looked for again.

    NoRun, which names the path, if a path holds neither a run nor a sweep.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths = [Path(path) for path in paths]
        self._known: dict[Path, RunFolder] = {}
        self.sweeps: list[Path] = []
        """Folders of sweeps, each once."""
        for path in self._paths:
            sweeps = [folder for folder in _with_inner(path) if (folder / SWEEP_FILE).is_file()]
            if not sweeps and not any(_runs_at(path)):
                RunFolder(path)  # which says what is missing
            places = {folder.resolve() for folder in self.sweeps}
            self.sweeps += [folder for folder in sweeps if folder.resolve() not in places]

    def runs(self) -> list[RunFolder]:
        """All runs; runs that are new since the last call come last. Runs with equal names get their paths as names."""
        for run in (run for path in self._paths for run in _runs_at(path)):
            self._known.setdefault(run.path.resolve(), run)
        runs = list(self._known.values())
        names = [path.name for path in self._known]
        for run, name in zip(runs, names):
            run.name = str(run.path) if names.count(name) > 1 else name
        return runs


def _with_inner(path: Path) -> list[Path]:
    """A folder and the folders in it, by name."""
    inner = sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []
    return [path, *inner]


def _runs_at(path: Path) -> Iterator[RunFolder]:
    """The run at a path, or else the runs in that folder and the arms of the sweeps there."""
    with suppress(NoRun):
        yield RunFolder(path)
        return
    for folder in _with_inner(path):
        is_sweep = (folder / SWEEP_FILE).is_file()
        for place in _with_inner(folder / "arms")[1:] if is_sweep else [folder]:
            with suppress(NoRun):
                yield RunFolder(place)
