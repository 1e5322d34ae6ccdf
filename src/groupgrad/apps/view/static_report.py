"""Writes a static report: the page and the data of some runs in one file that needs no server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.view import page_files, views
from groupgrad.apps.view.sweep_panel import SweepPanel
from groupgrad.run_folder.run_files import finite


def write_report(runs: Sequence[RunFolder], path: Path, sweeps: Sequence[SweepPanel] = ()) -> None:
    """Writes the report of runs and sweeps. Its policy lets the file run its own scripts and load nothing."""
    script, styles = page_files.script(), page_files.styles()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data:; base-uri 'none'"
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
<style>{styles}</style>
</head>
<body>
<header id="top"></header>
<main id="main" tabindex="-1"></main>
<script type="application/json" id="report">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""
    path.write_text(page, encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
