"""The interface through which the page shows a sweep, and the commands that the page sends to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

KINDS = ("stop", "resume", "clone", "delete")


class SweepPanel(Protocol):
    """A sweep whose arms the page lists and gives commands to."""

    def table(self) -> dict[str, Any]:
        """Its arms, what it has cost and the last commands, as plain types for JSON."""
        ...

    def act(self, kind: str, arm: int, settings: Sequence[str], *, from_weights: bool) -> str:
        """Gives a command and returns the message for the user. `settings` are `KEY=VALUE`, the changes of a clone.
        ValueError, with the reason, if it is refused."""
        ...


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
