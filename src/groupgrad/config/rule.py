"""`Rule`: a combination of settings that must not occur, or that deserves a warning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from groupgrad.config.settings import GRPOSettings


@dataclass(slots=True, frozen=True)
class Rule:
    """A combination of settings that must not occur, or that deserves a warning."""

    broken: Callable[[GRPOSettings], object]
    """Truthy if the rule is broken."""
    sentence: str
    """Message. `{c.NAME}` stands for the value of a setting, `{found}` for the result of `broken`."""
    warns: bool = False
    """The settings work, and the message is a warning."""

    def message(self, config: GRPOSettings) -> str | None:
        """Returns the rule's sentence if the config breaks it, else None."""
        found = self.broken(config)
        return self.sentence.format(c=config, found=found) if found else None
