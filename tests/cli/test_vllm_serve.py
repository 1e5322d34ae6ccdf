"""Arguments of `groupgrad vllm-serve`, and the command that it runs."""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from groupgrad.apps.cli import vllm_serve
from groupgrad.apps.cli.vllm_serve import main
from groupgrad.integrations.vllm.http import find_key, key_file
from groupgrad.integrations.vllm.serve_command import check_port, vllm_arguments

ADDED = ["--api-server-count", "1", "--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1"]


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No key in the environment; returns the folder of stored keys."""
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.delenv("VLLM_API_KEY")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "groupgrad" / "vllm-keys"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("--model m --port 8001", "m --port 8001"),
        ("--model=m", "m"),
        ("m", "m"),
        ("m --tensor_parallel_size 8", "m --tensor-parallel-size 8"),
        ("m --vllm-model-impl transformers", "m --model-impl transformers"),
        ("m --log_level=error -x", "m --uvicorn-log-level=error -x"),
        (
            "m --served-model-name my_name --speculative-config {a_b:1}",
            "m --served-model-name my_name --speculative-config {a_b:1}",
        ),
        ("m --hf-overrides.rope_theta 1e6", "m --hf-overrides.rope_theta 1e6"),
        ("m --hf_overrides.rope_scaling.rope_type=yarn", "m --hf-overrides.rope_scaling.rope_type=yarn"),
    ],
)
def test_the_model_comes_first_and_other_options_pass_through(given: str, passed: str) -> None:
    """Older names are known. Values are left alone, and so are keys behind a point."""
    assert vllm_arguments(given.split()) == [*passed.split(), *ADDED]


def test_the_way_of_telling_log_probs_may_be_chosen() -> None:
    raw = ["--logprobs-mode", "raw_logprobs"]
    assert vllm_arguments(["m", *raw]) == ["m", *raw, *ADDED[:2], *ADDED[4:]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "1"], "no model is given; add --model"),
        (["--model"], "--model has no value"),
        (["--model", "m", "--api_server_count=2"], "--api-server-count is set by groupgrad"),
        (["--model", "m", "--weight-transfer-config", "{}"], "--weight-transfer-config is set by groupgrad"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_without_vllm_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--model", "m"]) == 2
    assert "run `pip install 'groupgrad[vllm]'`" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--port", "{}"], ["--port={}"], ["--host", "127.0.0.1", "--port", "{}"]])
def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "execv", lambda path, command: pytest.fail("it was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["--model", "m", *(word.format(port) for word in form)]) == 2
    assert f"error: a server cannot listen at port {port} of 127.0.0.1: " in capsys.readouterr().err


def test_ports_that_are_free_and_hosts_that_are_not_ours() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    check_port(["m", "--host", "127.0.0.1", "--port", port])
    assert check_port(["m", "--uds", "/tmp/x", "--port", port]) is None
    for where in (["--port", "many"], ["--port=65536"], ["--host=192.0.2.1"]):
        with pytest.raises(ValueError, match=r"a server cannot listen at port \w+ of .*; see --host and --port"):
            check_port(["m", *where])


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], str]]:
    """`serve(*options)`: the command that would run, and the key in its environment."""
    ran: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "execv", lambda path, command: ran.append([path, *command]) or 0)

    def run(*options: str) -> tuple[list[str], str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        before = os.environ.get("VLLM_API_KEY")
        assert main(["--model", "m", "--port", str(port), *options]) == 0
        key = os.environ.pop("VLLM_API_KEY")
        if before is not None:
            os.environ["VLLM_API_KEY"] = before
        return ran[-1], key

    return run


def port_of(command: list[str]) -> int:
    return int(command[command.index("--port") + 1])


def test_the_process_becomes_vllms_server(serve: Callable[..., Any]) -> None:
    command, _ = serve()
    assert command == [
        *(sys.executable, sys.executable, "-m", "groupgrad.integrations.vllm.serve_command", "serve"),
        *("m", "--port", str(port_of(command)), *ADDED),
        *("--weight-transfer-config", '{"backend": "groupgrad"}'),
        *("--middleware", "groupgrad.integrations.vllm.server.Routes"),
    ]


def test_without_a_key_one_is_made_printed_and_stored_for_this_user(
    serve: Callable[..., Any], capsys: pytest.CaptureFixture[str], keys: Path
) -> None:
    command, key = serve()
    said = capsys.readouterr().err
    assert len(key) > 40 and said.count(key) == 1 and key not in " ".join(command) and "warning" not in said
    path = key_file(port_of(command))
    assert path.read_text() == key and stat.S_IMODE(path.stat().st_mode) == 0o600 and list(keys.iterdir()) == [path]
    assert path.parent == keys and stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert find_key("127.0.0.1", port_of(command)) == (key, str(path)) == find_key("localhost", port_of(command))
    assert find_key("node-5", port_of(command)) is None
    assert serve()[1] != key


def test_a_key_that_is_given_is_neither_printed_nor_stored(
    serve: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, keys: Path
) -> None:
    command, key = serve("--api-key", "mine")
    assert key == "mine" and "mine" not in command and "--api-key" not in command
    monkeypatch.setenv("VLLM_API_KEY", "of-the-shell")
    assert serve()[1] == "of-the-shell" and serve("--api-key=mine")[1] == "mine"
    assert capsys.readouterr().err == "" and not keys.exists()
    monkeypatch.delenv("VLLM_API_KEY")
    command, _ = serve()
    assert key_file(port_of(command)).exists()
    monkeypatch.setattr(vllm_serve, "check_port", lambda arguments: ("127.0.0.1", port_of(command)))
    serve("--api-key", "mine")  # makes the stored one go
    assert not key_file(port_of(command)).exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_are_served_only_if_asked_for(
    host: str, serve: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve()[0].count("127.0.0.1") == 1
    capsys.readouterr()
    command, _ = serve("--host", host)
    assert command.count("--host") == 1 and command[command.index("--host") + 1] == host
    warned = capsys.readouterr().err
    assert f"warning: it listens at {host}" in warned and "set VLLM_API_KEY to one key on both sides" in warned
    serve("--host", host, "--api-key", "mine")
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_written_is_a_warning(
    serve: Callable[..., Any], capsys: pytest.CaptureFixture[str], keys: Path
) -> None:
    keys.parent.write_text("no folder")
    serve()
    assert "warning: it was not stored" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", "with space", "ümlaut", "two\nlines"])
def test_a_key_that_no_header_carries_is_refused(key: str, capsys: pytest.CaptureFixture[str], serve: Any) -> None:
    assert main(["--model", "m", "--api-key", key]) == 2
    said = capsys.readouterr().err
    assert f"the key in --api-key has {len(key)} characters" in said and (not key or key not in said)


@pytest.mark.parametrize(("value", "status"), [("1", 2), ("0", 0), ("", 0)])
def test_the_mode_whose_routes_change_weights_unseen_is_refused(
    value: str, status: int, serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", value)
    monkeypatch.setattr(vllm_serve, "check_port", lambda arguments: ("127.0.0.1", 8000))
    assert main(["--model", "m"]) == status
    refusal = f"VLLM_SERVER_DEV_MODE is {value!r}: in that mode vLLM has routes that change weights"
    assert (refusal in capsys.readouterr().err) == (status == 2)


def test_vllms_own_file_of_options_is_read(serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("host: 0.0.0.0\n")
    command, _ = serve("--config", str(path))
    assert "--host" not in command and "it listens at 0.0.0.0" in capsys.readouterr().err
    path.write_text("api_key: mine\n")
    assert main(["--model", "m", "--config", str(path)]) == 2
    assert "has a key, which groupgrad's routes do not read there; set VLLM_API_KEY" in capsys.readouterr().err
    assert main(["--model", "m", "--config", str(tmp_path / "none")]) == 2


def test_a_server_without_a_port_needs_a_key(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m", "--uds", "/tmp/x"]) == 2
    assert "a server without a port needs a key; set VLLM_API_KEY" in capsys.readouterr().err
