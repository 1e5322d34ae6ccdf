"""Writes a static report: the page and the data of some runs in one file that needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from groupgrad.cockpit import STATIC, views
from groupgrad.cockpit.reading import RunFolder
from groupgrad.cockpit.sweep_panel import SweepPanel
from groupgrad.telemetry.run_files import finite

_NAMES = ("dom", "source", "charts", "virtual", "tokens", "overview", "rollouts", "sweep", "app")
MODULES = tuple(f"{name}.js" for name in _NAMES)
"""The page's modules, each after those that it imports."""


def write_report(runs: Sequence[RunFolder], path: Path, sweeps: Sequence[SweepPanel] = ()) -> None:
    """Writes the report of runs and sweeps. Its policy lets the file run its own scripts and load nothing."""
    scripts = [(STATIC / "uPlot.iife.min.js").read_text(encoding="utf-8"), _joined_modules()]
    styles = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in ("uPlot.min.css", "app.css"))
    hashes = " ".join(_hash(script) for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src {_hash(styles)}; img-src data:; base-uri 'none'"
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
<style>{styles}</style>
</head>
<body>
<header id="top"></header>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="report">{data}</script>
<script>{scripts[0]}</script>
<script type="module">{scripts[1]}</script>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def _joined_modules() -> str:
    """All modules as one: their names differ, so imports and exports can be left out."""
    texts = []
    for name in MODULES:
        text = (STATIC / name).read_text(encoding="utf-8")
        text = re.sub(r"^import .*?;\n", "", text, flags=re.MULTILINE)
        texts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return "\n".join(texts)


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
