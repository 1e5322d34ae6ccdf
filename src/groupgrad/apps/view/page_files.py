"""The files of the page, which are served, and a static report: the page and the data of some runs in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.view import STATIC, views
from groupgrad.apps.view.views import SweepPanel
from groupgrad.run_folder.run_files import finite

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


def write_report(runs: Sequence[RunFolder], path: Path, sweeps: Sequence[SweepPanel] = ()) -> None:
    """Writes the report of runs and sweeps. Its policy lets the file run its own scripts and load nothing."""
    scripts, style = script(), styles()
    policy = (
        f"default-src 'none'; script-src {_hash(scripts)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    )
    # In a script element only `</` and `<!--` mean something: JSON may write `<` otherwise.
    data = json.dumps(finite(views.report(runs, sweeps)), ensure_ascii=True).replace("<", "\\u003c")
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>groupgrad</title>
<style>{style}</style>
</head>
<body>
<header id="top"></header>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="report">{data}</script>
<script type="module">{scripts}</script>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
