"""A headless Chromium for the tests of the page of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

GONE = "ERR_CONNECTION_REFUSED"
"""In the message of a page that asks once more after its server has ended."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's event loop runs in this thread until the browser ends, and no other can be run beside it."""
    from pages import CHROMIUM, HOW, playwright  # which skips tests where there is no Playwright

    assert CHROMIUM is not None, HOW
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
        page.on(
            "console",
            lambda message: message.type == "error" and GONE not in message.text and errors.append(message.text),
        )
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert errors == []
