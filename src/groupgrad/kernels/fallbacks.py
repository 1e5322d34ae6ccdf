"""What runs in a slower way in this process than it could, and why: said once each, and told in the run's records."""

from __future__ import annotations

import logging

_found: dict[str, str] = {}


def fall_back(logger: logging.Logger, what: str, why: str) -> None:
    """Warns that `what` (a clause that names the slower way) runs because of `why`; once for both."""
    if _found.get(what) != why:
        _found[what] = why
        logger.warning("%s: %s", what, why)


def fallbacks() -> dict[str, str]:
    """What falls back -> the last reason."""
    return dict(_found)
