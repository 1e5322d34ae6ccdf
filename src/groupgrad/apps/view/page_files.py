"""Joins the page's scripts into one text and its styles into another, so that a browser makes fewer requests."""

from __future__ import annotations

import re

from groupgrad.apps.view import STATIC

_NAMES = ("dom", "source", "charts", "virtual", "tokens", "evaluations", "overview", "rollouts", "sweep", "app")
MODULES = tuple(f"{name}.js" for name in _NAMES)
"""The page's modules, each after those that it imports."""


def script() -> str:
    """The chart library and all modules as one module: their names differ, so imports and exports can be left out."""
    texts = [text("uPlot.iife.min.js")]
    for name in MODULES:
        module = re.sub(r"^import .*?;\n", "", text(name), flags=re.MULTILINE)
        texts.append(re.sub(r"^export ", "", module, flags=re.MULTILINE))
    return "\n".join(texts)


def styles() -> str:
    """All styles."""
    return "\n".join(map(text, ("uPlot.min.css", "app.css")))


def text(name: str) -> str:
    """One of the page's files."""
    return (STATIC / name).read_text(encoding="utf-8")
