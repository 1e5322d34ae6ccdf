"""Serves the page of some runs on this machine. It needs Starlette and uvicorn (extra `view`)."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.runs.selection import Selection
from groupgrad.apps.view import LOCAL_HOSTS, evaluations, page_files, views
from groupgrad.apps.view.views import SweepPanel
from groupgrad.run_folder.rollout_table import TRAINING
from groupgrad.run_folder.run_files import finite

FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "page.js": ("text/javascript", page_files.script),
    "page.css": ("text/css", page_files.styles),
    "icon.svg": ("image/svg+xml", lambda: page_files.text("icon.svg")),
    "index.html": ("text/html", lambda: page_files.text("index.html")),
}
"""Type and text of the files that are served, by name: nothing else of the disk is."""
KINDS = ("stop", "resume", "clone", "delete")
"""Commands for the arms of a sweep."""
COOKIE = "groupgrad_token"
QUIET_S = 0.8
"""Time after an answer in which the page probably asks for more, so that nothing else is read."""
MAX_WAIT_S = 0.5
"""Longest wait for such a pause before each file, so that all files are read in the end."""
MAX_ROWS = 500
"""Rows in one answer."""

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class OpenRequests:
    """Counts the requests that are being answered, so that work behind the page does not slow the page down."""

    def __init__(self) -> None:
        self._count, self._last_end = 0, 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one request while the body runs. For the thread of the event loop alone."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            self._last_end = time.monotonic()

    def wait_for_none(self) -> None:
        """Waits until `QUIET_S` have passed since the last request has ended, at most `MAX_WAIT_S`."""
        until = time.monotonic() + MAX_WAIT_S
        while (now := time.monotonic()) < until and (self._count or now < self._last_end + QUIET_S):
            time.sleep(0.02)


class Guard(BaseHTTPMiddleware):
    """Answers requests for known hosts, with the token if there is one; adds headers that forbid foreign content.

    A page of another site whose name is made to point to this machine sends its own name as `Host`.
    """

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], token: str | None, requests: OpenRequests):
        super().__init__(app)
        self._hosts, self._token, self._requests = frozenset(hosts), token, requests

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """The answer to a request, refused or not."""
        with self._requests.counted():
            response = self._refusal(request) or await call_next(request)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: Request) -> Response | None:
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname
            origin = urlsplit(request.headers.get("origin", "")).netloc
        except ValueError:  # no host has that name
            return PlainTextResponse("this address is not served here", status_code=421)
        if self._hosts and host not in self._hosts:
            return PlainTextResponse("this address is not served here", status_code=421)
        is_same_origin = "origin" not in request.headers or origin == request.headers["host"]
        if request.method not in ("GET", "HEAD") and not is_same_origin:  # of another site or port
            return PlainTextResponse("commands are taken from this page alone", status_code=403)
        if self._token is None:
            return None
        cookie = f"{COOKIE}_{request.url.port or 80}"  # browsers send cookies to all ports of a host
        given = request.query_params.get("token")
        if given is not None and self._is_right(given):
            answer = RedirectResponse(request.url.path, status_code=303)
            answer.set_cookie(cookie, given, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_right(request.cookies.get(cookie, "")) or self._is_right(bearer):
            return None
        return PlainTextResponse("open the address with ?token=... that `groupgrad view` has printed", status_code=401)

    def _is_right(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())


def make_app(
    find_runs: Callable[[], Sequence[RunFolder]],
    sweeps: Sequence[SweepPanel] = (),
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    token: str | None = None,
) -> Starlette:
    """The application that serves the page of some runs and sweeps.

    `find_runs` is asked again for runs that have begun since, which it adds at the end. `hosts` are the names that
    requests may use, without ports; empty for any. With a `token` every request needs it; without one no command for a
    sweep is taken, since any user of the machine could give it.
    """
    runs = list(find_runs())
    finding, requests = threading.Lock(), OpenRequests()

    def of_run(answer: Callable[[RunFolder, Request], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            number = request.path_params["run"]
            if number >= len(runs):
                return PlainTextResponse("there is no such run", status_code=404)
            try:
                return _json(answer(runs[number], request))
            except ValueError as error:
                return PlainTextResponse(str(error), status_code=400)

        return endpoint

    def image(request: Request) -> Response:
        number = request.path_params["run"]
        path = runs[number].image(request.path_params["name"]) if number < len(runs) else None
        return PlainTextResponse("no image", status_code=404) if path is None else FileResponse(path)

    def all_runs(request: Request) -> Response:
        with finding:
            runs.extend(find_runs()[len(runs) :])
        return _json([views.heading(run) for run in runs])

    threading.Thread(target=_read_all, args=(tuple(runs), requests), name="groupgrad-index", daemon=True).start()
    routes = [
        Route("/", lambda request: _static("index.html")),
        Route("/static/{name}", lambda request: _static(request.path_params["name"])),
        Route("/api/runs", all_runs),
        Route("/api/runs/{run:int}/summary", of_run(lambda run, request: views.summary(run))),
        Route(
            "/api/runs/{run:int}/metrics",
            of_run(lambda run, request: views.metrics(run, request.query_params.get("start", "0"))),
        ),
        Route("/api/runs/{run:int}/rollouts", of_run(_rollouts)),
        Route("/api/runs/{run:int}/group", of_run(_group)),
        Route("/api/runs/{run:int}/evaluations", of_run(partial(_evaluations, runs))),
        Route("/api/runs/{run:int}/images/{name}", image),
        Route("/api/sweeps", lambda request: _json([sweep.table() for sweep in sweeps])),
        Route("/api/sweeps/{sweep:int}/commands", _commands(sweeps, token), methods=["POST"]),
    ]
    guard = Middleware(Guard, hosts=hosts, token=token, requests=requests)  # pyright: ignore
    return Starlette(routes=routes, middleware=[guard])


def _commands(sweeps: Sequence[SweepPanel], token: str | None) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The endpoint that gives commands to sweeps."""

    async def command(request: Request) -> Response:
        number = request.path_params["sweep"]
        if number >= len(sweeps):
            return PlainTextResponse("there is no such sweep", status_code=404)
        if token is None:
            return PlainTextResponse("start `groupgrad view` with --token to give commands", status_code=403)
        try:
            given = read_command(request.headers.get("content-type", ""), await request.body())
        except ValueError as error:
            return PlainTextResponse(str(error), status_code=400)
        try:
            return _json({"text": await run_in_threadpool(sweeps[number].act, **given), "refused": False})
        except ValueError as error:
            return _json({"text": str(error), "refused": True})

    return command


def read_command(content_type: str, body: bytes) -> dict[str, Any]:
    """The arguments of `SweepPanel.act` for the command of a request. ValueError if it is no command, or if its content
    type is not JSON: pages of other sites can send other types without the browser asking this server first."""
    if content_type.partition(";")[0].strip() != "application/json":
        raise ValueError(f"a command is JSON, and this is {content_type or 'nothing'}; send application/json")
    given = json.loads(body)
    if not isinstance(given, dict) or given.get("kind") not in KINDS:
        raise ValueError(f"a command has one of the kinds {', '.join(KINDS)}")
    arm, settings = given.get("arm"), given.get("set", [])
    if type(arm) is not int or not isinstance(settings, list):
        raise ValueError(f"arm={arm!r}, set={settings!r}: a command has the number of an arm and a list of KEY=VALUE")
    return {"kind": given["kind"], "arm": arm, "settings": settings, "from_weights": bool(given.get("from_weights"))}


def _read_all(runs: Sequence[RunFolder], requests: OpenRequests) -> None:
    """Reads the rollouts of all runs, the newest of each first, while no request is answered."""
    for run in runs:
        run.refresh(limit=views.FILES_AT_ONCE)
    for run in runs:
        run.refresh(pause=requests.wait_for_none)


def _rollouts(run: RunFolder, request: Request) -> dict[str, Any]:
    query = request.query_params
    phase = query.get("chosen_phase", TRAINING)
    chosen = _number(request, "chosen_step", 0), _number(request, "chosen_row", 0), phase
    return views.rollouts(
        run,
        Selection.of(query),
        sort=query.get("sort", "step"),
        descending=query.get("order", "descending") != "ascending",
        offset=max(0, _number(request, "offset", 0)),
        limit=min(MAX_ROWS, max(1, _number(request, "limit", 100))),
        chosen=chosen if "chosen_row" in query else None,
    )


def _group(run: RunFolder, request: Request) -> dict[str, Any]:
    phase = request.query_params.get("phase", TRAINING)
    return {"rows": run.rows(_number(request, "step", 0), group=_number(request, "group", 0), phase=phase)}


def _evaluations(runs: Sequence[RunFolder], run: RunFolder, request: Request) -> list[dict[str, Any]]:
    """The evaluations of a run, compared with those of the run `against`, or with its own first ones."""
    if "against" not in request.query_params:
        return evaluations.compared(run)
    other = _number(request, "against", 0)
    if not 0 <= other < len(runs):
        raise ValueError(f"against={other} is the number of no run")
    return evaluations.compared(run, runs[other])


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, str(default))
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{name}={value!r} is no number") from error


def _static(name: str) -> Response:
    if name not in FILES:
        return PlainTextResponse("there is no such file", status_code=404)
    kind, read = FILES[name]
    return Response(read(), media_type=kind)


def _json(value: Any) -> Response:
    data = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"))
    return Response(data.encode("utf-8", errors="replace"), media_type="application/json")
