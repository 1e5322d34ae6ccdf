"""Makes the pictures of the page of `groupgrad view` in the documents: of a demo, an agent, a sweep and evaluations.

    groupgrad demo --output-dir runs/demo
    python bench/page_pictures.py runs/demo docs
    python examples/programs/openai_agents_sdk.py runs/smollm2 runs/agents max_steps=3
    python bench/page_pictures.py runs/agents docs agent
    python examples/programs/openai_client.py runs/smollm2 runs/client max_steps=3
    python bench/page_pictures.py runs/client docs turns
    python bench/page_pictures.py runs/rates docs sweep      while a sweep trains there
    python bench/page_pictures.py runs/second docs evaluations     docs/evaluation.md has the run's command

It needs Playwright and Chromium (`pip install playwright`, `apt-get install chromium`).
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

MESSAGES = 'summary:text-matches("as . messages")'
"""The line of a rollout that opens its messages."""

PICTURES: dict[str, dict[str, tuple[str, tuple[int, int], Any, str]]] = {
    "demo": {
        "view-overview.png": ("#/", (1280, 900), "light", ".chart canvas"),
        "view-rollouts.png": ("#/rollouts?run=0&step=200&group=0&row=1", (1280, 900), "light", ".tokens"),
        "view-phone.png": ("#/rollouts", (390, 780), "dark", ".item .chip"),
    },
    "agent": {"view-agent.png": ("#/rollouts?run=0&step=1&group=0&row=0", (1280, 720), "light", ".tokens")},
    "turns": {"view-turns.png": ("#/rollouts?run=0&step=1&group=0&row=0", (1280, 720), "light", MESSAGES)},
    "sweep": {"view-sweep.png": ("#/sweep", (1280, 560), "light", ".sweep")},
    "evaluations": {"view-evaluations.png": ("#/", (1280, 480), "light", ".evaluations table")},
}
"""Kind of run → file → place on the page, size, colours, and what has to be there."""


def main(run: Path, folder: Path, kind: str) -> None:
    """Writes the pictures of a run or a sweep into a folder."""
    pictures = PICTURES[kind]
    command = [sys.executable, "-u", "-m", "groupgrad", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            # With the token that the page of a sweep asks for.
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            with sync_playwright() as play:
                browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                for name, (where, size, scheme, wanted) in pictures.items():
                    page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
                    page.goto(address + where)
                    page.wait_for_selector(wanted)
                    page.wait_for_timeout(3000)  # until all rollouts are counted
                    if wanted == MESSAGES:
                        page.locator(MESSAGES).first.click()
                    page.locator(wanted).first.scroll_into_view_if_needed()
                    save(page.screenshot(), folder / name)
        finally:
            server.terminate()


def save(screenshot: bytes, path: Path) -> None:
    """Writes a picture with 256 colours, which keep the file small."""
    picture = Image.open(io.BytesIO(screenshot)).convert("RGB")
    picture.quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "demo")
