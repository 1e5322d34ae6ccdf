"""The server of the page: what it answers to whom, and what the command serves."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from synthetic_run import HOSTILE, write_run

from groupgrad import compat
from groupgrad.apps.cli.main import main
from groupgrad.apps.runs.run_folder import RunFolder
from groupgrad.apps.view import STATIC, server, views
from groupgrad.apps.view.page_files import MODULES
from groupgrad.apps.view.server import make_app
from groupgrad.run_folder.advice import advice


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first", steps=12, rows=16, hostile=True)


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(make_app(lambda: [RunFolder(folder)]), base_url="http://127.0.0.1:8765", follow_redirects=False)


def test_the_page_and_its_data_are_served(client):
    assert "<title>groupgrad</title>" in client.get("/").text
    for name in re.findall(r'"/static/([^"]+)"', client.get("/").text):
        assert client.get(f"/static/{name}").status_code == 200, name
    assert client.get("/api/runs").json()[0]["name"] == "first"
    metrics = client.get("/api/runs/0/metrics").json()
    assert [line["step"] for line in metrics["lines"]] == list(range(1, 13)) and metrics["reset"]
    assert client.get("/api/runs/0/metrics", params={"start": metrics["next"]}).json()["lines"] == []
    summary = client.get("/api/runs/0/summary").json()
    assert summary["state"] == "ended" and summary["config"]["settings"]["loss_type"] == "dapo"
    while not (found := client.get("/api/runs/0/rollouts", params={"tool": "calculator", "limit": 5}).json())[
        "complete"
    ]:
        pass
    assert found["total"] == 12 and found["rows"][0]["row"] == 5
    rows = client.get("/api/runs/0/group", params={"step": 3, "group": 0}).json()["rows"]
    assert rows[0]["tokens"][0] == HOSTILE and len(rows) == 8


def test_a_policy_keeps_foreign_content_out(client):
    for address in ("/", "/static/page.js", "/api/runs", "/none"):
        headers = client.get(address).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "", "localhost@evil.example"])
def test_a_foreign_name_that_points_here_is_refused(client, host):
    assert client.get("/api/runs", headers={"host": host}).status_code == 421
    assert client.get("/api/runs", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    "address",
    [
        *("/static/..%2fserver.py", "/static/%2e%2e/server.py", "/static/../server.py", "/static/server.py"),
        *("/api/runs/0/images/..%2f..%2fconfig.json", "/api/runs/0/images/%2e%2e%2fconfig", "/api/runs/9/summary"),
    ],
)
def test_no_path_leads_out(client, address):
    assert client.get(address).status_code == 404


def test_a_bad_number_is_named(client):
    answer = client.get("/api/runs/0/rollouts", params={"min_reward": "<b>"})
    assert answer.status_code == 400 and "min_reward" in answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    assert client.get("/api/runs/0/metrics", params={"start": "x"}).status_code == 400


def test_a_token_is_needed_where_there_is_one(folder):
    app = make_app(lambda: [RunFolder(folder)], hosts=(), token="right")
    client = TestClient(app, base_url="http://machine:8765", follow_redirects=False)
    assert client.get("/").status_code == client.get("/api/runs", params={"token": "wrong"}).status_code == 401
    assert client.get("/api/runs", headers={"authorization": "Bearer right"}).status_code == 200
    first = client.get("/", params={"token": "right"})
    assert first.status_code == 303 and first.headers["location"] == "/"  # the token leaves the address
    assert {"HttpOnly", "SameSite=strict"} <= set(first.headers["set-cookie"].split("; "))
    assert client.get("/").status_code == 200  # by the cookie, which pages at other ports do not overwrite
    assert "groupgrad_token_8765=right" in first.headers["set-cookie"]


def test_what_cannot_be_shown_is_said(folder, tmp_path, capsys, monkeypatch):
    assert main(["view", str(tmp_path)]) == 2
    assert "output_dir of a run" in capsys.readouterr().err
    for flags in (["--port", "9000"], ["--host", "0.0.0.0"], ["--token", "x"]):
        assert main(["view", str(folder), "--export", str(tmp_path / "x.html"), *flags]) == 2
        assert f"{flags[0]} belongs to a served page, and --export writes a file" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()
    assert main(["view", str(folder), "--export", str(tmp_path / "none" / "x.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    monkeypatch.setattr(compat, "is_available", lambda name: name != "uvicorn")
    assert main(["view", str(folder)]) == 1
    assert (
        "the page needs 'uvicorn', which is not installed; run `pip install 'uvicorn>=0.30'`" in capsys.readouterr().err
    )


def test_a_report_is_one_file_that_loads_nothing(folder, tmp_path):
    path = tmp_path / "report.html"
    assert main(["view", str(folder), "--export", str(path)]) == 0
    text = path.read_text()
    assert HOSTILE not in text and "<script>window" not in text
    assert not re.search(r"(src|href)=[\"']?(https?:|/)", text.split("<script>")[0])
    policy = re.search(r'Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for script in re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    data = json.loads(re.findall(r'id="report">(.*?)</script>', text, re.DOTALL)[0])
    (run,) = data["runs"]
    assert len(run["metrics"]) == 12 and {row["step"] for row in run["rollouts"]} == set(range(1, 13))


def test_numbers_that_call_for_a_change_are_put_in_words():
    healthy = [{"loss": 0.0, "frac_reward_zero_std": 0.1, "entropy": 1.0, "grad_norm": 1.0, "reward": 0.5}] * 60
    assert advice(healthy) == []
    cases = {
        "frac_reward_zero_std": [{"frac_reward_zero_std": 0.73}] * 30,
        "completions/clipped_ratio": [{"completions/clipped_ratio": 0.4}] * 5,
        "entropy": [*[{"entropy": 1.0}] * 20, *[{"entropy": 0.05}] * 30],
        "clip_ratio/region_mean": [{"clip_ratio/region_mean": 0.5}],
        "grad_norm": [*[{"grad_norm": 1.0}] * 30, {"grad_norm": 90.0}],
        "nonfinite_steps": [{"nonfinite_steps": 2.0}],
        "sampling/sampling_logp_difference/mean": [{"sampling/sampling_logp_difference/mean": 0.2}],
        "time/rewards": [{"time/rewards": 4.0, "step_time": 10.0}],
        "tools/failure_frequency": [{"tools/failure_frequency": 0.6}],
    }
    for metric, lines in cases.items():
        (found,) = advice([{"loss": 0.0, **line} for line in lines])
        assert found["metric"] == metric and found["text"].endswith(".") and found["setting"]
    assert advice([{"loss": 0.0, "frac_reward_zero_std": 0.73}])[0]["text"].startswith(
        "73 % of groups have no variance"
    )


def test_advice_on_a_short_run_is_about_its_last_steps():
    """Of ten steps all count as the last twenty; the mean of the run says nothing of where it is."""
    for count in (10, 20, 40):
        falling = [
            {"loss": 0.0, "completions/clipped_ratio": share} for share in torch.linspace(1.0, 0.1, count).tolist()
        ]
        steady = [{"loss": 0.0, "completions/clipped_ratio": 0.1}] * 5
        assert advice([*falling, *steady]) == []
    (found,) = advice([*steady, {"loss": 0.0, "completions/clipped_ratio": 0.9}])
    assert found["text"].startswith("37 % of completions are truncated")


ADVISED = (
    *("reward", "frac_reward_zero_std", "completions/clipped_ratio", "entropy", "clip_ratio/region_mean", "grad_norm"),
    *("nonfinite_steps", "sampling/sampling_logp_difference/mean", "time/rewards", "step_time"),
    "tools/failure_frequency",
)


@given(st.lists(st.dictionaries(st.sampled_from(ADVISED), st.floats() | st.just(0.0)), max_size=60))
def test_no_numbers_keep_a_run_from_being_shown(lines):
    assert all(found["text"].endswith(".") for found in advice([{"loss": 0.0, **line} for line in lines]))


def test_steps_without_a_gradient_are_no_measure_of_spikes():
    norms = [*[0.0] * 40, *[1.0] * 20]
    assert advice([{"loss": 0.0, "grad_norm": norm} for norm in norms]) == []
    (found,) = advice([{"loss": 0.0, "grad_norm": norm} for norm in [*norms, 60.0]])
    assert "60 times its median" in found["text"]


@pytest.mark.parametrize("values", [[math.inf, -math.inf], [math.nan], [math.inf, 0.0]])
def test_numbers_that_are_not_finite_are_no_ground_for_advice(values):
    assert advice([{"loss": 0.0, "tools/failure_frequency": value} for value in values]) == []
    (found,) = advice([{"loss": 0.0, "tools/failure_frequency": value} for value in [*values, *[0.9] * 20]])
    assert "90 %" in found["text"]


def test_the_chart_library_has_its_licence():
    assert "MIT" in (STATIC / "uPlot.LICENSE").read_text()


def test_no_module_writes_markup_and_all_are_served(client):
    served = client.get("/static/page.js").text
    for path in STATIC.glob("*.js"):
        if not path.name.startswith("uPlot"):
            assert path.name in MODULES and "innerHTML" not in path.read_text()
            assert path.read_text().splitlines()[-1] in served


def test_a_report_holds_groups_of_evaluations_too(tmp_path):
    """An evaluation before the first step has no rollouts of training beside it."""
    run = RunFolder(write_run(tmp_path / "run", steps=3, rows=16, tokens=4, evaluated=[0, 3]))
    (held,) = views.report([run])["runs"]
    found = {(row["step"], row["phase"]): row["group"] for row in held["rollouts"]}
    assert found == {(1, "train"): 0, (2, "train"): 1, (3, "train"): 0, (0, "eval"): 0, (3, "eval"): 0}
    assert held["facets"]["phases"] == ["train", "eval"]


def prompts_of(run: RunFolder, step: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of an evaluation by prompt."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in run.rows(step, phase="eval"):
        found.setdefault(row["prompt"], []).append(row)
    return found


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def compared(*runs: RunFolder) -> Callable[..., Any]:
    """The answer on evaluations of one of these runs, perhaps against another one."""
    client = TestClient(make_app(lambda: runs), base_url="http://127.0.0.1:8765")
    return lambda run, **query: client.get(f"/api/runs/{run}/evaluations", params=query).json()


def test_the_last_evaluation_is_compared_with_the_first_by_prompt(tmp_path):
    """Means, differences and the sign-flip test of 3 prompts, whose 8 assignments of signs are all tried."""
    evaluations: dict[str, Any] = {"evaluated": [0, 5, 9], "eval_rows": 24, "settings": {"eval_k": [1, 4]}}
    run = RunFolder(write_run(tmp_path / "a", steps=9, tokens=9, seed=2, **evaluations))
    answer = compared(run)
    (found,) = answer(0)
    assert (found["phase"], found["there"], found["here"], found["prompts"]) == ("eval", 0, 9, 3)
    assert not found["rewards_differ"]
    rows = {row["name"]: row for row in found["rows"]}
    names = ["reward", "reward correct", "reward short", "pass@1", "pass@4", "best@4", "length", "truncated"]
    assert list(rows) == names
    first, last = prompts_of(run, 0), prompts_of(run, 9)
    for name, column in (("reward", "reward"), ("reward short", "reward/short"), ("length", "num_tokens")):
        before, after = ([mean(rows_of, column) for rows_of in part.values()] for part in (first, last))
        differences = [one - other for one, other in zip(after, before)]
        sums = [sum(s * d for s, d in zip(signs, differences)) for signs in itertools.product((1, -1), repeat=3)]
        assert rows[name]["there"]["mean"] == pytest.approx(sum(before) / 3)
        assert rows[name]["here"]["mean"] == pytest.approx(sum(after) / 3)
        assert rows[name]["difference"]["mean"] == pytest.approx(sum(differences) / 3)
        assert rows[name]["p"] == sum(abs(one) >= abs(sums[0]) - 1e-9 for one in sums) / 8
        for side in ("here", "there", "difference"):
            assert rows[name][side]["low"] <= rows[name][side]["mean"] <= rows[name][side]["high"]
    right = [sum(row["reward"] >= 1 - 1e-9 for row in rows_of) for rows_of in last.values()]
    passed = [1 - math.comb(8 - count, 4) / math.comb(8, 4) for count in right]
    assert rows["pass@4"]["here"]["mean"] == pytest.approx(sum(passed) / 3)
    assert rows["length"]["p"] == 0.75  # the signs of its differences are mixed
    assert answer(0) == [found]


def test_the_last_evaluations_of_two_runs_are_compared_on_the_prompts_of_both(tmp_path):
    one = RunFolder(write_run(tmp_path / "one", steps=4, evaluated=[4], eval_rows=32, tokens=9))
    two = RunFolder(write_run(tmp_path / "two", steps=6, evaluated=[2, 6], eval_rows=24, tokens=9, seed=1))
    answer = compared(one, two)
    assert answer(0) == []  # there is one evaluation
    (found,) = answer(1, against=0)
    assert (found["there"], found["here"], found["prompts"], found["rewards_differ"]) == (4, 6, 3, False)
    there, here = prompts_of(one, 4), prompts_of(two, 6)
    row = found["rows"][0]
    for side, rows in (("there", there), ("here", here)):
        assert row[side]["mean"] == pytest.approx(sum(mean(rows[prompt], "reward") for prompt in here) / 3)
    assert row["difference"]["mean"] == pytest.approx(row["here"]["mean"] - row["there"]["mean"])

    file = next((two.path / "eval_rollouts" / "eval").glob("*6*"))
    table = pq.read_table(file)
    strangers = table.set_column(table.column_names.index("prompt_id"), "prompt_id", [["other"] * table.num_rows])
    pq.write_table(strangers.rename_columns({"reward/short": "reward/brief"}), file)
    (found,) = answer(1, against=0)
    assert (found["prompts"], found["rows"], found["rewards_differ"]) == (0, [], True)
    client = TestClient(make_app(lambda: [one, two]), base_url="http://127.0.0.1:8765")
    for against in ("7", "-1", "first"):
        assert client.get("/api/runs/0/evaluations", params={"against": against}).status_code == 400


def test_the_page_is_asked_for_in_three_requests(client):
    """On a busy machine each further request takes some tenths of a second."""
    assert re.findall(r'"/static/([^"]+)"', client.get("/").text) == ["icon.svg", "page.css", "page.js"]


def test_what_is_read_behind_the_page_waits_for_its_answers(monkeypatch):
    monkeypatch.setattr(server, "QUIET_S", 0.2)
    requests, read = server.OpenRequests(), threading.Event()
    reader = threading.Thread(target=lambda: (requests.wait_for_none(), read.set()))
    with requests.counted():
        reader.start()
        assert not read.wait(0.1)
    assert not read.wait(0.1)  # the page may ask for more
    assert read.wait(5)
    with requests.counted():
        monkeypatch.setattr(server, "MAX_WAIT_S", 0.1)
        requests.wait_for_none()  # a request that never ends does not keep rollouts from being read
