"""A vLLM server for benchmarks, and a proxy that slows it down on purpose."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
LOGS = BENCH / ".logs"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    # Waiting threads that spin would take cores from working ones.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}
"""Defaults for all processes of these benchmarks."""

STARTS_IN_S = 300.0


def set_environment() -> None:
    """Apply `ENVIRONMENT` and a key for servers and trainers; call it before torch is imported."""
    for name, value in {**ENVIRONMENT, "VLLM_API_KEY": secrets.token_hex()}.items():
        os.environ.setdefault(name, value)


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_server(model: Path, name: str, *further: str) -> Iterator[str]:
    """URL of a server of the model in this folder, in float32 and with `further` options, while the context is open.

    Its output is in `.logs/<name>.log`. RuntimeError, with the end of that, if it exits before it is up.
    """
    from groupgrad.integrations.vllm.http import Address, wait_until_up

    port = free_port()
    command = [str(Path(sys.executable).parent / "groupgrad"), "vllm-serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *further]
    LOGS.mkdir(exist_ok=True)
    log = LOGS / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + STARTS_IN_S
        while True:
            try:
                wait_until_up(Address("127.0.0.1", port), timeout_s=2.0)
                break
            except TimeoutError:
                if process.poll() is not None or time.monotonic() > deadline:
                    end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                    raise RuntimeError(f"the vLLM server did not come up; the end of {log}:\n{end}") from None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


class SlowFront:
    """A proxy that forwards all calls to a server, those of `generate` after `delay()` seconds.

    It computes nothing, as if the server were another, slower machine. `delays` are the seconds that calls waited.
    """

    def __init__(self, port: int):
        self.delay: Callable[[], float] = lambda: 0.0
        self.delays: list[float] = []
        front, self._port = self, port

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                front._forward(self)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop accepting calls."""
        self._server.shutdown()
        self._server.server_close()

    def _forward(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if handler.path.endswith("/generate"):
            seconds = self.delay()
            self.delays.append(seconds)
            time.sleep(seconds)
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection), contextlib.suppress(OSError):  # the caller may have disconnected
            headers = {name: handler.headers[name] for name in ("Authorization",) if name in handler.headers}
            connection.request(
                handler.command, handler.path, body=body if handler.command == "POST" else None, headers=headers
            )
            response = connection.getresponse()
            # Without a content length the answer ends with the connection, and lines arrive as they are written.
            handler.send_response(response.status)
            handler.end_headers()
            while part := response.read1(65536):
                handler.wfile.write(part)
                handler.wfile.flush()
