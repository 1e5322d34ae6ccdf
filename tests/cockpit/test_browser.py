"""The page in a headless Chromium: what it shows, what it keeps from running, how fast it is.

Skipped where Chromium or Playwright is missing (`apt-get install chromium`, `pip install playwright`).
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from synthetic_run import HOSTILE, write_run

from groupgrad.cli.main import main
from groupgrad.cli.view import _listen
from groupgrad.cockpit.reading import RunFolder
from groupgrad.cockpit.server import make_app
from groupgrad.telemetry.run_files import LineFile

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")

MAX_OPEN_S, MIN_FRAMES, MAX_MIB = 2.0, 30.0, 300.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a page of its own; an error on a page fails the test."""
    contexts, errors = [], []

    def open_(address: str, *, width: int = 1280, height: int = 800, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []


def wait_until(page: Any, condition: str, *, timeout_s: float = 20.0) -> None:
    """Waits for a JavaScript condition; the page's policy forbids Playwright's own way, which evaluates a text."""
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of a server of these runs."""
    listener = _listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app([RunFolder(folder) for folder in folders]), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(10)


def test_a_run_is_shown_and_nothing_of_it_runs(tmp_path, open_page):
    folder = write_run(tmp_path / "first", steps=8, rows=16, tokens=20, hostile=True, ended=False, evaluated=True)
    with served(folder) as address:
        page = open_page(address)
        assert page.locator(".chart").count() >= 10 and page.locator("canvas").count() >= 10
        assert "step 8 of 8" in page.inner_text(".tiles")
        assert "<script>" in page.inner_text(".events")  # a warning with markup is text

        LineFile(folder / "metrics.jsonl").append({"step": 9, "loss": 0.0, "reward": 7.5})  # while it is shown
        wait_until(page, "document.querySelector('.tiles').innerText.includes('7.5')")

        page.click("text=Rollouts")
        page.wait_for_selector(".item .chip")
        assert page.inner_text(".count").startswith("136 rollouts")
        page.select_option("[name=phase]", "train")
        wait_until(page, "document.querySelector('.count').innerText.startsWith('128 rollouts')")
        page.locator(".list").press("Home")
        page.locator(".list").press("Enter")  # the first row, by keyboard alone
        page.wait_for_selector(".tokens")
        assert page.locator(".card.rollout").count() == 8
        assert HOSTILE in page.inner_text(".card.chosen .tokens")
        page.locator(".card.chosen .tokens").press("ArrowRight")
        assert "log-prob -" in page.inner_text(".readout")
        shades = {"entropy": ".s2", "advantage": ":is([class^=n], [class^=p])", "gradient_shares": "[class^=p]"}
        for by, shade in shades.items():
            page.select_option("#shade", by)
            page.wait_for_selector(f".detail[data-shade={by}] .tokens {shade}")
        page.locator(".card.chosen .tokens").press("ArrowRight")
        assert "gradient share" in page.inner_text(".readout") and "taught" in page.inner_text(".card.chosen header")
        assert page.evaluate("location.hash").endswith("row=0")  # a link to the rollout
        page.select_option("[name=phase]", "eval")
        wait_until(page, "document.querySelector('.count').innerText.startsWith('8 rollouts')")
        page.locator(".item").first.click()
        wait_until(page, "document.querySelector('.detail h2')?.innerText.endsWith('evaluation eval')")
        assert page.locator("#shade option[value=gradient_shares]").count() == 0  # an evaluation has no gradient
        page.select_option("[name=phase]", "")
        page.select_option("[name=tool]", "calculator")
        wait_until(page, "document.querySelector('.count').innerText.startsWith('9 rollouts')")
        page.click("button:text('Clear')")
        page.fill("[name=text]", "onerror")
        page.press("[name=text]", "Enter")
        wait_until(page, "document.querySelector('.count').innerText.startsWith('8 rollouts')")
        assert page.evaluate("window.hacked") is None


@pytest.mark.slow
def test_runs_are_compared_and_a_report_shows_the_same(tmp_path, open_page):
    first = write_run(tmp_path / "first", steps=60, rows=16, tokens=20, hostile=True)
    second = write_run(tmp_path / "second", steps=40, rows=16, seed=2, tokens=20, settings={"learning_rate": 5e-6})
    report = tmp_path / "report.html"
    assert main(["view", str(first), str(second), "--export", str(report)]) == 0
    with served(first, second) as address:
        for where in (address, report.as_uri()):
            page = open_page(where)
            text = page.inner_text("main")
            assert "What the configurations differ in" in text and "0.000005" in text and "5e-06" not in text
            assert "of groups have no variance" in text
            page.goto(where + "#/rollouts")
            page.wait_for_selector(".item .chip")
            page.locator(".item").first.click()
            page.wait_for_selector(".tokens")
            page.click("text=in second")
            wait_until(page, "document.querySelector('.pills [aria-current]').innerText === 'second'")
            page.wait_for_selector(".item .chip")
            assert page.evaluate("window.hacked") is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_it_fits_and_can_be_read(tmp_path, open_page, size, scheme):
    """Nothing sticks out sideways, and text has a contrast of at least 4.5 to its background."""
    folder = write_run(tmp_path / "first", steps=50, rows=16, tokens=20)
    with served(folder) as address:
        page = open_page(address, width=size[0], height=size[1], scheme=scheme)
        for where in ("#/", "#/rollouts?step=5&group=0&row=5"):
            page.goto(address + where)
            page.wait_for_selector(".chart, .tokens")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0], where
            assert page.evaluate(CONTRASTS) >= 4.5, where
            shots = os.environ.get("GROUPGRAD_SCREENSHOTS")
            if shots:
                name = f"{'overview' if where == '#/' else 'rollouts'}-{size[0]}-{scheme}.png"
                page.screenshot(path=str(Path(shots) / name))


def seconds_to_open(open_page: Callable[..., Any], address: str, until: str) -> float:
    """Seconds from asking for an address to an element of it, in a page of its own without a cache."""
    started = time.perf_counter()
    page = open_page(address)
    page.wait_for_selector(until)
    seconds = time.perf_counter() - started
    page.close()
    return seconds


@pytest.mark.slow
def test_a_thousand_steps_open_and_scroll_fast(tmp_path, open_page, capsys):
    """1,000 steps of 64 rollouts: open in 2 s (the best of three: the machine may have other work), more than 30 frames
    a second in scrolling, less than 300 MiB."""
    folder = write_run(tmp_path / "long", steps=1000)
    with served(folder) as address:
        rows_s = min(seconds_to_open(open_page, address + "#/rollouts", ".item .chip") for _ in range(3))
        charts_s = min(seconds_to_open(open_page, address, ".chart canvas") for _ in range(3))
        page = open_page(address)
        page.goto(address + "#/rollouts")
        page.wait_for_selector(".item .chip")
        wait_until(page, "document.querySelector('.count').innerText === '64,000 rollouts'")
        page.wait_for_timeout(600)
        frames = page.evaluate(SCROLL)
        assert page.locator(".item:not([hidden])").count() < 60
        page.locator(".list").press("End")
        wait_until(page, "document.querySelector('.list').innerText.includes('1 · 63')")
        mebibytes = page.evaluate("(gc(), performance.memory.usedJSHeapSize / 2 ** 20)")
    with capsys.disabled():
        print(f"\nrows after {rows_s:.2f} s, charts {charts_s:.2f} s, {frames:.0f} frames/s, {mebibytes:.0f} MiB")
    assert max(rows_s, charts_s) < MAX_OPEN_S
    assert frames > MIN_FRAMES
    assert mebibytes < MAX_MIB


SCROLL = """
async () => {
  const list = document.querySelector(".list");
  let frames = 0;
  const started = performance.now();
  while (performance.now() - started < 3000) {
    await new Promise(requestAnimationFrame);
    list.scrollTop += 130;
    frames += 1;
  }
  return (1000 * frames) / (performance.now() - started);
}
"""

CONTRASTS = """
() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    const over = (below, [r, g, b, a = 1]) => below.map((value, i) => value * (1 - a) + [r, g, b][i] * a);
    return layers.reverse().reduce(over, [255, 255, 255]);
  };
  let worst = 99;
  for (const node of document.querySelectorAll("main *, #top *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility() || node.tagName === "OPTION") continue;
    const [one, two] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    worst = Math.min(worst, (one + 0.05) / (two + 0.05));
  }
  return worst;
}
"""
