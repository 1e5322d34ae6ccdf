"""Tools of real MCP servers: what the model is told of them, their results, and servers that fail, end or hang."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp.client.client", reason="the package mcp is not installed: `make check` installs it")

from example_tools import call_tool
from waiting import free_port, until

from groupgrad import compat
from groupgrad.chat import ToolCall
from groupgrad.concurrency.workers import Workers
from groupgrad.envs.tools import ToolOptions, make_tools
from groupgrad.integrations.mcp import connection, mcp_environment, mcp_tools

COMMAND = f"{sys.executable} {Path(__file__).parents[2] / 'helpers' / 'mcp_server.py'}"
HASTY = ToolOptions(timeout_s=0.5)
PATIENT = ToolOptions(timeout_s=8.0)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that do not answer count as hanging soon."""
    monkeypatch.setattr(connection, "HEALTH_S", 0.3)


@pytest.fixture(scope="module")
def shared() -> list[Any]:
    return mcp_tools(COMMAND)


def ask(workers: Workers, tools: Any, name: str, options: ToolOptions = PATIENT, **arguments: Any) -> str:
    return call_tool(workers, tools, ToolCall(name, arguments), options).content


def is_alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_names_descriptions_and_schemas_are_the_servers(shared: Any) -> None:
    tools = {tool.name: tool for tool in make_tools(shared)}
    assert {*tools} >= {"add", "who_is", "divide", "parts", "while_"}
    function = tools["add"].schema["function"]
    assert function["name"] == "add"
    assert function["description"] == "Adds to the count.\n\nIt is the server's own."
    assert function["parameters"]["properties"]["step"]["type"] == "integer"
    assert function["parameters"]["required"] == ["step"]
    assert tools["who_is"].defaults == {"verbose": False}
    assert [tool.name for tool in make_tools(mcp_tools(COMMAND, names=["divide", "who-is"]))] == ["divide", "who_is"]


def test_results(workers: Workers, shared: Any) -> None:
    assert ask(workers, shared, "parts", items=["a", "b"], row=1) == (
        "there is no argument 'row'. 'parts' takes: items (an array with a string at each place), "
        "table (an object or null, may be left out)"
    )
    assert ask(workers, shared, "parts", items=["a", "b"], table=None) == "a\nb"
    assert ask(workers, shared, "divide", a=1, b=4) == "0.25"
    picture = call_tool(workers, shared, ToolCall("picture", {}), PATIENT)
    assert [block["type"] for block in picture.content] == ["text", "image"]
    assert picture.content[1]["base64"].startswith("iVBOR")


def test_errors_are_failed_calls(workers: Workers, shared: Any) -> None:
    reply = call_tool(workers, shared, ToolCall("refuse", {"why": "it is late"}), PATIENT)
    assert reply.failed and not reply.timed_out
    assert reply.content == "Error: ToolError: Error executing tool refuse: it is late"
    wrong = call_tool(workers, shared, ToolCall("add", {"step": "many"}))
    assert wrong.failed and wrong.content == "the argument 'step' must be an integer, but is \"many\""
    # The server checks what only it knows.
    assert "greater than or equal to 1" in ask(workers, shared, "at_least_one", number=0)


def test_a_late_call_is_cancelled_and_others_go_on(workers: Workers, shared: Any, caplog: Any) -> None:
    pid = ask(workers, shared, "who_is")
    late = call_tool(workers, shared, ToolCall("slow", {"seconds": 9}), HASTY)
    assert late.timed_out and late.content == "Error: no answer within 0.5 seconds"
    assert ask(workers, shared, "who_is") == pid
    assert "hangs" not in caplog.text


def test_a_server_that_ends_fails_the_call_and_starts_again(workers: Workers, caplog: Any) -> None:
    tools = mcp_tools(COMMAND)
    pid = ask(workers, tools, "who_is")
    reply = call_tool(workers, tools, ToolCall("die", {}), PATIENT)
    assert reply.failed and not reply.timed_out and "Connection closed" in reply.content
    new = ask(workers, tools, "who_is")
    assert new.isdigit() and new != pid
    assert "has ended or hangs, and is started again by the next call" in caplog.text
    assert "I am ending" in caplog.text


def test_messages_of_a_server_fill_no_disk_and_the_last_ones_are_quoted() -> None:
    async def play() -> tuple[list[int], str]:
        held = connection.Connection(connection.Server(COMMAND))
        sizes = []
        for text, times in (("a", 2 * connection.MAX_MESSAGES), ("b", 10), ("c", 10)):
            await held.call("chatter", {"text": text, "times": times})
            sizes.append(os.fstat(held._held[0]._errors.fileno()).st_size)
        words = held._held[0].last_words()
        await held.close()
        return sizes, words

    sizes, words = connection.run_on_loop(play())
    assert sizes == [2 * connection.MAX_MESSAGES + 1, 11, 22]
    assert words == f". Its last messages:\n{'b' * 10}\n{'c' * 10}"


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_is_replaced(workers: Workers) -> None:
    tools = mcp_tools(COMMAND)
    pid = ask(workers, tools, "who_is")
    assert call_tool(workers, tools, ToolCall("hang", {}), HASTY).timed_out
    new = ask(workers, tools, "who_is")
    assert new.isdigit() and new != pid
    until(lambda: not is_alive(pid))


@pytest.mark.usefixtures("impatient")
def test_a_call_that_follows_a_late_one_at_once_waits_for_the_check_of_its_server() -> None:
    async def play() -> tuple[str, str]:
        held = connection.Connection(connection.Server(COMMAND))
        first = await held.call("who-is", {})
        late = asyncio.create_task(held.call("hang", {}))
        await asyncio.sleep(0.3)
        late.cancel()
        second = await asyncio.create_task(held.call("who-is", {}))
        await held.close()
        return first.content[0].text, second.content[0].text

    before, after = connection.run_on_loop(play())
    assert before.isdigit() and after.isdigit() and before != after


def test_a_rollout_that_lost_its_server_gets_no_other() -> None:
    environment = mcp_environment(COMMAND, names=["add", "die"])()

    async def play() -> list[str]:
        await environment.reset()
        said = [await environment._call("add", step=1)]
        for _ in range(2):
            with pytest.raises(Exception) as failed:
                await environment._call("die")
            said.append(str(failed.value))
        await environment.reset()
        said.append(await environment._call("add", step=1))
        await environment.close()
        return said

    first, ended, gone, again = asyncio.run(play())
    assert (first, again) == ("the count is 1", "the count is 1")
    assert ended == "Connection closed" and gone.startswith("the MCP server of this episode has ended")


def test_many_servers_start_a_few_at_a_time() -> None:
    made = mcp_environment(COMMAND, names=["add"])
    environments = [made() for _ in range(2 * connection.STARTS_AT_ONCE + 2)]
    starting = []

    async def watch() -> None:
        while True:
            starting.append(sum(not session._opened.is_set() for session in connection._OPEN))
            await asyncio.sleep(0.01)

    async def begin() -> None:
        await asyncio.gather(*(environment.reset() for environment in environments))
        await asyncio.gather(*(environment.close() for environment in environments))

    watching = connection._LOOP.submit(watch())
    asyncio.run(begin())
    watching.cancel()
    assert max(starting) == connection.STARTS_AT_ONCE


def test_the_server_ends_with_its_tools(workers: Workers) -> None:
    tools = mcp_tools(COMMAND)
    pid = ask(workers, tools, "who_is")
    assert is_alive(pid)
    del tools
    gc.collect()
    until(lambda: not is_alive(pid))


@pytest.mark.slow
def test_the_server_ends_with_the_interpreter_even_if_it_hangs() -> None:
    code = (
        "import sys\n"
        "from groupgrad.concurrency.workers import Workers\n"
        "from groupgrad.integrations.mcp import mcp_tools\n"
        "tools = {tool.__name__: tool for tool in mcp_tools(sys.argv[1])}\n"
        "workers = Workers()\n"
        "print(workers.call(tools['who_is'], {}, timeout_s=20).result().value)\n"
        "workers.call(tools['hang'], {}, timeout_s=0.2).result()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, COMMAND], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr and "never retrieved" not in ran.stderr
    assert not is_alive(ran.stdout.strip())


def test_variables_are_those_given(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "not for servers")
    assert ask(workers, mcp_tools(COMMAND, names=["secret"]), "secret") == "none"
    assert ask(workers, mcp_tools(COMMAND, names=["secret"], env={"SECRET": "abc"}), "secret") == "abc"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program --x", "could not be started: FileNotFoundError"),
        (f"{COMMAND} broken", "could not be started: (?s:.*)Its last messages:\nno such data base"),
        (f"{COMMAND} mute", "no answer within 0.5 seconds"),
        ("http://127.0.0.1:9/mcp", "could not be reached: ConnectError"),
    ],
)
def test_servers_that_cannot_be_used(command: str, said: str) -> None:
    with pytest.raises(ConnectionError, match=said):
        mcp_tools(command, start_timeout_s=0.5 if "mute" in command else 20)


def test_names_that_there_are_not_and_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no tool 'ad'; did you mean 'add'"):
        mcp_tools(COMMAND, names=["ad"])
    with pytest.raises(ValueError, match="has the tool 'reset', a name that only the trainer calls"):
        mcp_environment(COMMAND)
    monkeypatch.setattr(compat, "installed_version", lambda name: "1.30.0")
    with pytest.raises(ImportError, match=r"mcp 1\.30\.0 is older than 2, .*run `pip install 'groupgrad\[mcp\]'`"):
        mcp_tools(COMMAND)
    monkeypatch.setattr(compat, "is_available", lambda name: False)
    with pytest.raises(ImportError, match="needs 'mcp', which is not installed"):
        mcp_tools(COMMAND)


def test_a_server_by_its_address_fails_while_it_is_away(workers: Workers) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}/mcp"

    def serve() -> tuple[subprocess.Popen[bytes], Any]:
        process = subprocess.Popen([*COMMAND.split(), "http", str(port)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            try:
                return process, mcp_tools(address, headers={"Authorization": "Bearer abc"})
            except ConnectionError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.1)

    process, tools = serve()
    try:
        assert ask(workers, tools, "who_is") == str(process.pid)
        assert ask(workers, tools, "add", step=3) == "the count is 3"
        assert ask(workers, tools, "caller") == "Bearer abc"
        process.kill()
        process.wait()
        for _ in range(2):
            reply = call_tool(workers, tools, ToolCall("who_is", {}), PATIENT)
            assert reply.failed and not reply.timed_out
        process, _ = serve()
        assert ask(workers, tools, "who_is") == str(process.pid)
    finally:
        process.kill()
        process.wait()
    assert os.getpid() != process.pid
