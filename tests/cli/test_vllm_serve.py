"""Arguments of `groupgrad vllm-serve`, and the command that it runs."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from groupgrad.cli import vllm_serve
from groupgrad.cli.vllm_serve import check_port, main, vllm_arguments

ADDED = ["--api-server-count", "1", "--logprobs-mode", "processed_logprobs"]


@pytest.mark.parametrize("argv", [["--model", "m"], ["--model=m"], ["m"]])
def test_the_model_comes_first(argv: list[str]) -> None:
    assert vllm_arguments([*argv, "--port", "8001"]) == ["m", "--port", "8001", *ADDED]


def test_options_pass_through_and_older_names_are_known() -> None:
    argv = [
        "--tensor_parallel_size",
        "8",
        "--model",
        "m",
        "--vllm-model-impl",
        "transformers",
        "--log_level=error",
        "-x",
    ]
    assert vllm_arguments(argv) == [
        "m",
        *["--tensor-parallel-size", "8", "--model-impl", "transformers", "--uvicorn-log-level=error", "-x"],
        *ADDED,
    ]


def test_values_are_left_alone() -> None:
    argv = ["--model", "m", "--served-model-name", "my_name", "--speculative-config", '{"a_b": 1}']
    assert vllm_arguments(argv) == ["m", *argv[2:], *ADDED]


def test_keys_behind_a_point_are_values() -> None:
    argv = ["--model", "m", "--hf-overrides.rope_theta", "1e6", "--hf_overrides.rope_scaling.rope_type=yarn"]
    expected = ["--hf-overrides.rope_theta", "1e6", "--hf-overrides.rope_scaling.rope_type=yarn"]
    assert vllm_arguments(argv) == ["m", *expected, *ADDED]


def test_the_way_of_telling_log_probs_may_be_chosen() -> None:
    expected = ["--logprobs-mode", "raw_logprobs"]
    assert vllm_arguments(["--model", "m", *expected]) == ["m", *expected, "--api-server-count", "1"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "1"], "no model is given; add --model"),
        (["--model"], "--model has no value"),
        (["--model", "m", "--api_server_count=2"], "--api-server-count is set by groupgrad"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--tensor-parallel-size" in capsys.readouterr().out


def test_without_vllm_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_serve.importlib.util, "find_spec", lambda name: None)
    assert main(["--model", "m"]) == 2
    assert "pip install vllm" in capsys.readouterr().err


def test_the_process_becomes_vllms_server(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(vllm_serve.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "execv", lambda path, command: called.append([path, *command]))
    monkeypatch.setattr(vllm_serve, "check_port", lambda arguments: None)

    main(["--model", "m"])

    (command,) = called
    assert command[:5] == [sys.executable, sys.executable, "-m", "groupgrad.engines.vllm.server_launch", "serve"]
    assert command[5:] == [
        "m",
        *ADDED,
        *["--worker-extension-cls", "groupgrad.engines.vllm.worker.WeightReceiver"],
        *["--middleware", "groupgrad.engines.vllm.server.Routes"],
    ]


@pytest.mark.parametrize("form", [["--port", "{}"], ["--port={}"], ["--host", "127.0.0.1", "--port", "{}"]])
def test_a_port_that_is_taken_is_an_error_before_anything_is_loaded(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_serve.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(os, "execv", lambda path, command: pytest.fail("it was started"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["--model", "m", *(word.format(port) for word in form)]) == 2
    assert f"error: port {port} is in use by another program; end it, or give another" in capsys.readouterr().err


def test_ports_that_are_free_and_hosts_that_are_not_ours() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    check_port(["m", "--host", "127.0.0.1", "--port", port])
    check_port(["m", "--uds", "/tmp/x", "--port", port])
    check_port(["m", "--port", "many"])
    with pytest.raises(ValueError, match=r"a server cannot listen at 192\.0\.2\.1, port"):
        check_port(["m", "--host=192.0.2.1"])
