"""A sweep on the page of runs, in a headless Chromium: its table, and the commands that it is given."""

from __future__ import annotations

from typing import Any

import pytest
from pages import NEEDS_BROWSER, make_sweep_folder, served, wait_until
from synthetic_run import write_run

from groupgrad.apps.sweep.store import ArmTurn

pytestmark = NEEDS_BROWSER


@pytest.mark.slow
def test_the_table_of_a_sweep_can_be_read_at_any_width(tmp_path, open_page):
    """Each number has its heading, on a phone beside it; an arm that left the race is marked."""
    from groupgrad.run_folder.run_lock import locked

    store, panel = make_sweep_folder(tmp_path / "rates")
    store.add_arms([("03-beta=0.2", 0, {"beta": 0.2})])
    store.set_state(2, "stopped", "stopped by a command")
    folder = tmp_path / "rates"
    with locked(folder), locked(folder / "arms" / "03-beta=0.2"), served(folder, sweeps=[panel]) as address:
        for width in (1280, 390):
            page = open_page(address, width=width)
            page.click("text=Sweep")
            page.wait_for_selector(".sweep tbody tr")
            text = page.inner_text(".sweep table")
            heads = [text.count(head) for head in ("steps", "reward", "behind the best by")]
            assert heads == ([1, 1, 1] if width > 760 else [3, 3, 0])  # there no arm is behind another one
            states = [row.inner_text() for row in page.locator(".sweep .state").all()]
            assert states == ["waiting", "training", "stopped"]
            assert page.locator(".sweep tbody tr.out").count() == 1
            assert "provisional" not in page.inner_text(".sweep")
            page.close()
        store.set_state(2, "waiting")
        store.end_turn(2, ArmTurn(0, 3, train_s=3.0, switch_s=0.1), 20, {})
        page = open_page(address + "#/sweep")
        wait_until(page, "document.querySelector('.sweep').innerText.includes('race have made 3 to 5 steps')")


@pytest.mark.slow
def test_arms_of_a_sweep_are_given_commands_by_keyboard(tmp_path, open_page):
    store, panel = make_sweep_folder(tmp_path / "rates")
    with served(tmp_path / "rates", sweeps=[panel]) as address:
        page = open_page(address)
        assert "token" not in page.url
        page.click("text=Sweep")
        page.wait_for_selector(".sweep tbody tr")
        assert page.locator(".sweep tbody tr").count() == 2 and "5/20" in page.inner_text(".sweep")
        page.focus("button[aria-label='stop arm 2']")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('.said').innerText === 'stop: queued'")
        page.focus("button[aria-label='clone arm 1']")
        page.keyboard.press("Enter")
        page.fill("#changes", "beta=-1")
        page.keyboard.press("Tab")
        page.keyboard.press("Space")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('.said.bad')?.innerText === 'beta=-1 is negative'")
        # A refusal leaves the form with what was typed.
        wait_until(page, "document.querySelector('dialog [role=alert]').innerText === 'beta=-1 is negative'")
        assert page.input_value("#changes") == "beta=-1" and page.is_checked("#from-weights")
        page.fill("#changes", "beta=0.2\nlearning_rate=1e-5")
        page.click("dialog button[type=submit]")
        wait_until(page, "document.querySelector('.said').innerText === 'clone: queued'")
        wait_until(page, "!document.querySelector('dialog').open")
        assert page.evaluate("document.activeElement.ariaLabel") == "clone arm 1"
        page.click("button[aria-label='delete arm 1']")
        page.click("dialog >> text=Cancel")
        page.click("button[aria-label='clone arm 1']")
        page.fill("#changes", "beta=0.3")
        page.route("**/api/**", lambda route: route.abort("connectionrefused"))  # as if the server had ended
        page.click("dialog button[type=submit]")
        wait_until(page, "document.querySelector('dialog [role=alert]').innerText === 'Failed to fetch'")
        assert page.input_value("#changes") == "beta=0.3"
        page.click("dialog >> text=Cancel")
        page.unroute("**/api/**")
        assert [(given.kind, given.arm) for given in store.queued()] == [("stop", 2), ("clone", 1)]
        assert store.queued()[1].changes == {"beta": "0.2", "learning_rate": "1e-5"} and store.queued()[1].from_weights
        wait_until(page, "document.querySelector('.sweep .events').innerText.includes('beta=0.2')")

        store.set_state(2, "stopped", "stopped by a command")  # while the page is open
        write_run(tmp_path / "rates" / "arms" / "02-beta=0.1", steps=3, rows=8, tokens=8)
        page.wait_for_selector("button[aria-label='resume arm 2']")
        page.click("a:text('02-beta=0.1')")
        page.wait_for_selector(".item .chip")
        assert page.inner_text(".count").startswith("24 rollouts")


@pytest.mark.slow
def test_a_command_of_a_sweep_is_given_once_however_often_it_is_asked_for(tmp_path, open_page):
    store, panel = make_sweep_folder(tmp_path / "rates")
    held: list[Any] = []

    def hold(route: Any) -> None:
        """Lets a command wait for its answer."""
        held.append(route)

    with served(tmp_path / "rates", sweeps=[panel]) as address:
        page = open_page(address)
        page.click("text=Sweep")
        page.route("**/commands", hold)

        def answered() -> list[tuple[str, int]]:
            """The commands that the server got, once those that wait are sent."""
            page.wait_for_timeout(200)
            assert len(held) == 1
            held.pop().continue_()
            wait_until(page, "document.querySelector('.said').innerText.endsWith(': queued')")
            return [(given.kind, given.arm) for given in store.queued()]

        page.click("button[aria-label='clone arm 1']")
        assert page.inner_text("dialog [role=status]") == ""
        page.fill("#changes", "beta=0.2")
        page.focus("#from-weights")
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('dialog [role=status]').innerText === 'being checked ...'")
        page.keyboard.press("Enter")
        assert answered() == [("clone", 1)]
        wait_until(page, "!document.querySelector('dialog').open")
        page.focus("button[aria-label='stop arm 2']")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        assert answered() == [("clone", 1), ("stop", 2)]
