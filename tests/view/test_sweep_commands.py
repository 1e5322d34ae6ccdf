"""Commands that the page gives to a sweep: from whom they are taken, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from groupgrad.apps.cli.main import main
from groupgrad.apps.view.server import make_app

COMMANDS = "/api/sweeps/0/commands"


class Panel:
    """A sweep that notes its commands."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def table(self) -> dict[str, Any]:
        return {"name": "rates", "arms": []}

    def act(self, kind: str, arm: int, settings: Any, *, from_weights: bool) -> str:
        if kind == "resume":
            raise ValueError("there is nothing to resume")
        self.given.append((kind, arm, list(settings), from_weights))
        return f"{kind}: done"


@pytest.fixture
def panel() -> Panel:
    return Panel()


@pytest.fixture
def client(panel: Panel) -> TestClient:
    app = make_app(list, [panel], token="right")
    client = TestClient(app, base_url="http://127.0.0.1:8765", follow_redirects=False)
    client.get("/", params={"token": "right"})
    return client


def test_commands_reach_the_sweep(client, panel):
    assert client.get("/api/sweeps").json() == [{"name": "rates", "arms": []}]
    assert client.post(COMMANDS, json={"kind": "stop", "arm": 3}).json() == {"text": "stop: done", "refused": False}
    clone = {"kind": "clone", "arm": 2, "set": ["beta=0.1", "loss_type=grpo"], "from_weights": True}
    assert client.post(COMMANDS, json=clone, headers={"origin": "http://127.0.0.1:8765"}).status_code == 200
    assert panel.given == [("stop", 3, [], False), ("clone", 2, ["beta=0.1", "loss_type=grpo"], True)]
    refused = client.post(COMMANDS, json={"kind": "resume", "arm": 3})
    assert refused.json() == {"text": "there is nothing to resume", "refused": True}
    assert client.post("/api/sweeps/1/commands", json={"kind": "stop", "arm": 3}).status_code == 404


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "http://[", ""])
def test_another_page_gives_no_commands(client, panel, origin):
    answer = client.post(COMMANDS, json={"kind": "delete", "arm": 1}, headers={"origin": origin})
    assert answer.status_code in (403, 421) and panel.given == []


def test_who_has_no_token_gives_no_commands(client, panel):
    command = {"kind": "delete", "arm": 1}
    client.cookies.clear()
    assert client.post(COMMANDS, json=command).status_code == 401
    open_to_all = TestClient(make_app(list, [panel]), base_url="http://127.0.0.1:8765")
    assert open_to_all.post(COMMANDS, json=command).status_code == 403
    assert panel.given == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"kind": "train", "arm": 1}, "one of the kinds stop, resume, clone, delete"),
        ({"kind": "stop", "arm": "--help"}, "arm='--help', set=[]: a command has the number of an arm"),
        ({"kind": "clone", "arm": 1, "set": "beta=1"}, "a list of KEY=VALUE"),
        (["stop"], "one of the kinds"),
    ],
)
def test_what_is_no_command_is_named(client, panel, body, text):
    answer = client.post(COMMANDS, json=body)
    assert answer.status_code == 400 and text in answer.text
    assert panel.given == []


def test_a_command_is_json(client, panel):
    form = client.post(COMMANDS, content='{"kind": "stop", "arm": 1}', headers={"content-type": "text/plain"})
    assert form.status_code == 400 and "send application/json" in form.text
    torn = client.post(COMMANDS, content='{"kind":', headers={"content-type": "application/json"})
    assert torn.status_code == 400 and panel.given == []


def test_a_sweep_that_cannot_be_read_is_said(tmp_path, capsys):
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.sqlite").write_text("no data base")
    assert main(["view", str(tmp_path), "--export", str(tmp_path / "x.html")]) == 0
    assert "the sweep in" in capsys.readouterr().err
