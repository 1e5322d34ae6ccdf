"""The page of rollouts in a headless Chromium: the list, its search, tool calls and times."""

from __future__ import annotations

import json
import re
import time
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pyarrow.parquet as pq
import pytest
from pages import NEEDS_BROWSER, served, wait_until
from synthetic_run import change_columns, write_run

from groupgrad.apps.cli.main import main

pytestmark = NEEDS_BROWSER

ORDERS = ("", "ascending")


@pytest.mark.slow
def test_conversations_of_a_report_are_listed_and_searched_by_what_was_said(tmp_path, open_page):
    folder, report = write_run(tmp_path / "chat", steps=2, rows=8, tokens=8, turns=2), tmp_path / "report.html"
    called = json.dumps([{"role": "assistant", "content": '<tool_call>{"a": "\\\\frac", "b": 11}</tool_call>'}])
    change_columns(folder / "rollouts" / "step_000002.0.parquet", {"completion": {0: called}})
    assert main(["view", str(folder), "--export", str(report)]) == 0
    with served(folder) as address:
        listed = []
        for where in (address, report.as_uri()):
            page = open_page(where + "#/rollouts?run=chat&sort=seconds/correct")
            page.wait_for_selector(".item .chip")
            listed.append(page.locator(".item:has-text('1 · 0') .text").inner_text())
            assert '"role"' not in page.inner_text(".list")
            searches = {"assistant": 0, '"b": 11}</tool_call>': 1, '"role"': 0, "\\frac": 1, '{"text": ': 15}
            for text, found in searches.items():
                page.fill("[name=text]", text)
                page.keyboard.press("Enter")
                count = f"{found} rollout" if found == 1 else f"{found} rollouts"
                wait_until(page, f"document.querySelector('.count').innerText.split(' of ')[0] === '{count}'")
        assert listed[0] == listed[1]
        assert re.match(r"[\d.]+ m?s · ", listed[0]), "the number that the list is ordered by"


SEARCHES = {
    "be brief. What": 1,  # from one message of the prompt to the next one
    "What\tis\n\n2 + 2?": 1,
    "five. Add": 1,  # from the reasoning of a message to its content
    "first. calculator": 1,  # and to the call after it
    '{"expr": "2 + 2", "more"': 1,
    'say "4"': 1,
    "4\nFour": 1,  # from a reply of a tool to the answer
    "4 four. assistant": 0,
    "brief. first": 0,  # prompt and completion are two texts
    "null": 0,
    "STRASSE": 0,
    "stra\u1e9ee": 1,  # case by case: ß and ẞ are one letter in two cases
    "\u03a3\u03a3": 1,
    "a.c": 0,
    "[b] (c)|": 1,
}
"""Texts that are sought, and the number of rows of `conversation` that have them."""


def conversation(path: Path) -> None:
    """Makes the first row of a file of rollouts a conversation."""
    call = {"function": {"name": "calculator", "arguments": {"expr": "2 + 2", "more": {"a": [1]}, "text": 'say "4"'}}}
    again = {"function": {"name": "calculator", "arguments": None}}
    calls = {"tool_calls": [call, again]}
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is\n2 + 2?"}
    asked = {"role": "assistant", "content": "Add first.", "reasoning_content": "Not five.", **calls}
    last = {"role": "assistant", "content": [{"type": "text", "text": "Four. Straße \u03c3\u03c2 [b]  (c)|"}]}
    said = {"prompt": [system, question], "completion": [asked, {"role": "tool", "content": "4"}, last]}
    texts = {name: {0: json.dumps(messages, ensure_ascii=False)} for name, messages in said.items()}
    change_columns(path, {**texts, "is_messages": {0: True}})


@pytest.mark.slow
def test_page_report_and_terminal_find_the_same_texts(tmp_path, open_page, capsys):
    folder, report = write_run(tmp_path / "chat", steps=1, rows=8, tokens=8), tmp_path / "report.html"
    conversation(folder / "rollouts" / "step_000001.0.parquet")
    assert main(["view", str(folder), "--export", str(report)]) == 0
    capsys.readouterr()
    found = {}
    for text in SEARCHES:
        main(["rollouts", str(folder), "--search", text, "--json"])
        found[text] = len(capsys.readouterr().out.splitlines())
    assert found == SEARCHES, "in the terminal"
    with served(folder) as address:
        for where in (address, report.as_uri()):
            page = open_page(where + "#/rollouts?run=chat")
            for text, number in SEARCHES.items():
                place = "#/rollouts?" + urlencode({"run": "chat", "text": text})
                page.evaluate("document.querySelector('.count').innerText = ''")  # until the answer has come
                page.evaluate(f"location.hash = {json.dumps(place)}")
                wait_until(page, f"document.querySelector('.count')?.innerText.startsWith('{number} rollout')")


@pytest.mark.slow
def test_a_report_lists_rollouts_in_the_order_of_the_live_page(tmp_path, open_page):
    """Rows without the number that they are ordered by come last; evaluations of a step come after its training."""
    folder, report = write_run(tmp_path / "run", steps=2, rows=8, tokens=8, evaluated=[2]), tmp_path / "report.html"
    (held_out,) = (folder / "eval_rollouts" / "eval").iterdir()
    change_columns(held_out, {"seconds/correct": [None] * 8})
    assert main(["view", str(folder), "--export", str(report)]) == 0
    with served(folder) as address:
        listed: dict[tuple[str, str], list[list[str]]] = {}
        for where, sort, order in product((address, report.as_uri()), ("", "num_tokens", "seconds/correct"), ORDERS):
            query = urlencode({"run": "run", "sort": sort, "order": order})
            page = open_page(f"{where}#/rollouts?{query}", height=1600)
            page.wait_for_selector("#item-23 .chip")
            items = [page.inner_text(f"#item-{number}") for number in range(24)]
            listed.setdefault((sort, order), []).append(items)
            page.close()
    for (sort, order), (live, static) in listed.items():
        assert live == static, (sort, order)
    assert all("evaluation eval" in item for item in listed["seconds/correct", ""][0][16:])


@pytest.mark.slow
def test_tool_calls_of_a_rollout_show_their_arguments(tmp_path, open_page):
    folder = write_run(tmp_path / "chat", steps=1, rows=8, tokens=8, turns=2)

    def turn(num_answers: int, *arguments: Any) -> list[dict[str, Any]]:
        """A turn that calls `search` with each of the arguments, and the answers to its calls."""
        calls = [{"type": "function", "function": {"name": "search", "arguments": given}} for given in arguments]
        answer = {"role": "tool", "content": "56"}
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *[answer] * num_answers]

    use = {"name": "search", "failed": False, "timed_out": False, "seconds": 0.2}
    turns = [
        *turn(2, {"a": 1, "b": "<b>"}, {"a": "x" * 300}),
        *turn(2, {"a": 2}),  # one of its two calls could not be read
        *turn(0, '{"a": 3}'),  # its answer had no room
    ]
    changes = {"completion": {5: json.dumps(turns)}, "tool_calls": {5: [use] * 5}}
    change_columns(folder / "rollouts" / "step_000001.0.parquet", changes)
    with served(folder) as address:
        page = open_page(address + "#/rollouts?run=chat&step=1&group=0&row=5")
        page.click("summary:has-text('5 tool calls')")
        items = [item.inner_text() for item in page.locator("#row-5 li").all()]
    long = '{"a":"' + "x" * 194 + " ..."
    given = [' {"a":1,"b":"<b>"}', f" {long}", "", "", ' {"a": 3}']
    assert items == [f"search 200 ms{text}" for text in given]


def test_each_turn_of_a_rollout_has_its_rewards_and_its_advantage(tmp_path, open_page):
    folder = write_run(tmp_path / "chat", steps=1, rows=8, tokens=60, turns=2)
    with served(folder) as address:
        page = open_page(address + "#/rollouts?run=chat&step=1&group=0&row=5")
        page.wait_for_selector("#row-5 .turns")
        first, second = (item.inner_text() for item in page.locator("#row-5 .turns li").all())
        others = page.locator("#row-0 .turns").count()
        page.select_option("#shade", "advantage")
        page.wait_for_selector(".detail[data-shade=advantage] #row-5 .tokens")
        shades = {kind: page.locator(f"#row-5 .tokens [class^={kind}]").count() for kind in "np"}
    assert first.split() == ["short", "0.5", "advantage", "-0.25"]
    assert second.split()[:1] == ["correct"] and second.split()[-2:] == ["advantage", "+0.5"]
    assert shades["n"] == 5 and shades["p"] > 5, "the first turn has five tokens, and a negative advantage"
    assert others == 0, "a rollout of one turn has nothing to add"


def test_a_branch_is_marked_and_begins_a_turn(tmp_path, open_page):
    """A branch at the fourth of the first turn's five tokens: three tokens have its advantage, two the next one's."""
    folder = write_run(tmp_path / "run", steps=1, rows=8, tokens=60, turns=2)
    branches = {5: [{"start": 3, "context": [7] * 1234}]}
    change_columns(folder / "rollouts" / "step_000001.0.parquet", {"branches": branches})
    with served(folder) as address:
        page = open_page(address + "#/rollouts?run=run&step=1&group=0&row=5&shade=advantage")
        page.select_option("#shade", "advantage")
        page.wait_for_selector(".detail[data-shade=advantage] #row-5 .branch")
        said = [item.inner_text() for item in page.locator(".branch").all()]
        shades = {kind: page.locator(f"#row-5 .tokens [class^={kind}]").count() for kind in "np"}
    assert said == ["branch: continues 1,234 other tokens"]
    assert shades == {"n": 3, "p": 2}


SHORT_TIMES = {0.0: "0 ms", 2e-5: "<0.1 ms", 2.1e-4: "0.2 ms", 0.00996: "10 ms", 0.25: "250 ms", 0.9996: "1 s"}
"""Seconds, and how they are shown."""


@pytest.mark.slow
def test_a_short_time_is_not_shown_as_none(tmp_path, open_page):
    """Each row of a group has a time of its own."""
    folder = write_run(tmp_path / "run", steps=1, rows=8, tokens=8, turns=2)
    path = folder / "rollouts" / "step_000001.0.parquet"
    seconds = [*SHORT_TIMES, 1.0, 1.0]
    (call,) = pq.read_table(path)["tool_calls"].to_pylist()[5]
    calls = [[{**call, "seconds": number}] for number in seconds]
    change_columns(path, {"tool_calls": calls, "seconds/correct": seconds, "wait_s": seconds})
    with served(folder) as address:
        page = open_page(address + "#/rollouts?run=run&step=1&group=0&row=5&sort=seconds/correct&order=ascending")
        for row, text in enumerate(SHORT_TIMES.values()):
            page.click(f"#row-{row} summary:has-text('tool call')")
            page.click(f"#row-{row} summary:has-text('data and rewards')")
            card = page.inner_text(f"#row-{row}")
            assert f"calculator {text}, failed" in card
            assert f"1 tool call, {text} of waiting" in card and f"correct took {text} for" in card
            assert page.inner_text(f"#item-{row} .text").startswith(f"{text} · ")


@pytest.mark.slow
def test_a_row_that_is_chosen_before_it_has_come_is_opened_then(tmp_path, open_page):
    """By mouse or keyboard. Rows that could not be read are asked for again."""
    folder = write_run(tmp_path / "long", steps=15, rows=16, tokens=4)
    held: list[Any] = []

    def hold_later_rows(route: Any) -> None:
        if "offset=0" in route.request.url:
            route.continue_()
        else:
            held.append(route)

    with served(folder) as address:
        page = open_page(address)
        page.route("**/api/runs/0/rollouts*", hold_later_rows)
        page.goto(address + "#/rollouts")
        page.wait_for_selector("#item-0 .chip")
        page.evaluate("document.querySelector('.list').scrollTop = 44 * 150")
        page.click("#item-152:has-text('...')")
        wait_until(page, "document.querySelector('#item-152').ariaSelected === 'true'")
        assert page.inner_text(".detail").startswith("Choose a rollout")
        held.pop().abort("connectionrefused")
        page.locator(".list").press("ArrowDown")
        page.locator(".list").press("Enter")
        deadline = time.monotonic() + 20
        while not held:
            page.wait_for_timeout(50)
            assert time.monotonic() < deadline, "the rows are not asked for again"
        held.pop().continue_()
        page.wait_for_selector("#item-153 .chip")
        page.wait_for_selector(".card.chosen")
        place = page.inner_text("#item-153 .where")
        shown = page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.split('?')[1]))")
        assert place == f"{shown['step']} · {shown['row']}"
        assert page.get_attribute("#item-153", "aria-selected") == "true"


@pytest.mark.slow
def test_a_row_keeps_its_element_while_the_list_is_scrolled(tmp_path, open_page):
    """A browser drops a click whose button goes down and up over two elements."""
    folder = write_run(tmp_path / "long", steps=5, rows=16, tokens=4)
    with served(folder) as address:
        page = open_page(address + "#/rollouts")
        page.wait_for_selector("#item-0 .chip")
        page.evaluate("window.row = document.querySelector('#item-10'); row.text = row.innerText")
        for number in range(1, 11):
            page.evaluate(f"document.querySelector('.list').scrollTop = 44 * {number}")
            wait_until(page, f"!document.querySelector('#item-{number - 5}')")
            assert page.evaluate("row === document.querySelector('#item-10') && row.innerText === row.text"), number
        ids = page.evaluate("[...document.querySelectorAll('.item[id]')].map((node) => node.id)")
        assert len(ids) == len(set(ids)) == page.locator(".item:not([hidden])").count()


@pytest.mark.slow
def test_a_list_that_was_left_asks_for_nothing_more(tmp_path, open_page):
    """Neither for the rest of its rows, after an odd number of answers, nor for rows that could not be read."""
    folder, asked = write_run(tmp_path / "run", steps=1, rows=8, tokens=4), []

    def never_complete(route: Any) -> None:
        asked.append(route.request.url)
        if len(asked) % 2:
            route.fulfill(json=route.fetch().json() | {"complete": False})
        else:
            route.abort("connectionrefused")

    with served(folder) as address:
        page = open_page(address)
        page.clock.install()
        page.route("**/api/runs/0/rollouts*", never_complete)
        for num_answers in (3, 4):
            asked.clear()
            page.goto(address + "#/rollouts")
            deadline = time.monotonic() + 20
            while len(asked) < num_answers:
                page.clock.run_for(500)
                page.wait_for_timeout(50)
                assert time.monotonic() < deadline, "the rows are not asked for again"
            page.click("nav >> text=Overview")
            page.wait_for_selector(".chart")
            page.clock.run_for(6000)
            page.wait_for_timeout(200)
            assert len(asked) == num_answers
