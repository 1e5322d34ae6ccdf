from __future__ import annotations

import subprocess
import sys
import threading
import time

import psutil
import pytest

from groupgrad.rewards import accuracy, accuracy_reward, reasoning_accuracy_reward
from groupgrad.rewards.accuracy import MathVerifier, Verdict

TOWER = r"the result is \boxed{9^{9^{9^{9}}}}"


CASES = [
    ("72", r"so it is \boxed{72}.", 1.0),
    ("#### 72", r"\boxed{72}", 1.0),
    ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n48+24 = <<48+24=72>>72.\n#### 72", r"\boxed{72}", 1.0),
    ("#### 1,234", r"\boxed{1234}", 1.0),
    (r"\boxed{72}", r"\boxed{72.0}", 1.0),
    ("$72$", r"The answer is $72$", 1.0),
    (r"$\frac{1}{2}$", r"\boxed{0.5}", 1.0),
    (r"\frac12", r"\boxed{\frac{2}{4}}", 1.0),
    ("x^2+1", r"\boxed{1 + x^2}", 1.0),
    (r"3\sqrt{2}", r"\boxed{3}", 0.0),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
    ("(1, 2)", r"\boxed{(1,2)}", 1.0),
    ("(1, 2)", r"\boxed{2}", 0.0),
    ("$5.50", r"\boxed{\$5.5}", 1.0),
    (72, r"\boxed{72}", 1.0),
    ("72", r"\boxed{72 \text{ cm}}", 1.0),
    ("72", r"first \boxed{70}, no: \boxed{72}", 0.0),
    ("72", "no formula: 72", 0.0),
    ("72", r"\boxed{27}", 0.0),
    ("72", "", 0.0),
    ("72", "\\boxed{", 0.0),
    ("nothing to parse", r"\boxed{72}", None),
    ("", r"\boxed{72}", None),
    ("?", r"\boxed{72}", None),
    (None, r"\boxed{72}", None),
]
"""Solution, completion and reward."""


def test_accuracy():
    solutions, completions, _ = map(list, zip(*CASES))
    rewards = accuracy_reward(completions=completions, solution=solutions, prompts=["p"] * len(CASES))
    assert [case for case, reward in zip(CASES, rewards) if reward != case[2]] == []


def test_many_rows_keep_their_order():
    count = 100
    completions = [rf"\boxed{{{i}}}" for i in range(count)]
    solutions = [str(i if i % 3 else i + 1) for i in range(count)]
    assert accuracy_reward(completions=completions, solution=solutions) == [float(i % 3 > 0) for i in range(count)]


def test_columns():
    columns = {}
    accuracy_reward(
        completions=[r"\boxed{\frac{1}{2}}", "none"],
        solution=["#### 5", "words only"],
        log_extra=columns.__setitem__,
        log_metric=lambda name, value: pytest.fail("no row timed out"),
    )
    assert columns == {
        "solution": ["#### 5", "words only"],
        "gold_parsed": ["5", None],
        "answer_parsed": [r"\frac{1}{2}", None],
    }


def test_a_conversation_is_judged_by_its_last_assistant_message():
    completion = [
        {"role": "assistant", "content": r"\boxed{1}"},
        {"role": "tool", "content": r"\boxed{3}"},
        {"role": "assistant", "content": r"\boxed{2}"},
    ]
    assert accuracy_reward(completions=[completion, completion], solution=["2", "1"]) == [1.0, 0.0]


def test_reasoning_accuracy():
    for completion, delimiters, expected in (
        (r"<think>\boxed{1}</think>\boxed{2}", None, 1.0),
        (r"<think>\boxed{2}</think>\boxed{1}", None, 0.0),
        (r"</think>\boxed{1}</think>\boxed{2}", None, 1.0),
        (r"\boxed{2}", None, 0.0),
        # the last of any delimiter, whatever the order of the list
        (r"</think>\boxed{1}</reason>\boxed{2}", ["</think>", "</reason>"], 1.0),
        (r"</reason>\boxed{1}</think>\boxed{2}", ["</think>", "</reason>"], 1.0),
        (r"</reason>\boxed{2}", ["</think>", "</reason>"], 1.0),
        (r"</reason>\boxed{2}", "</reason>", 1.0),
    ):
        rewards = reasoning_accuracy_reward([completion], ["2"], reasoning_delimiters=delimiters)
        assert rewards == [expected], completion
    assert reasoning_accuracy_reward(["no delimiter", r"</think>\boxed{1}"], ["words only"] * 2) == [None, None]


def test_solutions_must_match_completions():
    with pytest.raises(ValueError, match="argument 2 is longer than argument 1"):
        accuracy_reward(["a", "b"], ["2"])


class TowersInASecond(MathVerifier):
    """Has a second for a row with the tower, and a minute for any other, since the machine may be busy."""

    towers = 0

    def _ask(self, worker, gold, answer):
        is_tower = "9^{9^{9^{9}}}" in gold + answer
        self.towers += is_tower
        self.timeout_s = 1.0 if is_tower else 60.0
        return super()._ask(worker, gold, answer)


def test_a_pathological_formula_costs_its_row(monkeypatch, caplog):
    """It stays inside one C call, and a thread cannot use signals. As a solution it is asked once, and once alone."""
    verifier = TowersInASecond(max_workers=1)
    monkeypatch.setattr(accuracy, "_VERIFIER", verifier)
    results, metrics = [], {}

    def work():
        completions = [r"\boxed{1}", TOWER, r"\boxed{1}"]
        results.extend(accuracy_reward(completions, ["1"] * 3, log_metric=metrics.__setitem__))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(100)
    assert results == [1.0, 0.0, 1.0]
    assert metrics == {"accuracy_reward/timed_out": pytest.approx(1 / 3)}
    assert "for 1 of 3" in caplog.text and verifier.towers == 1
    verdicts = verifier.judge([r"$9^{9^{9^{9}}}$"] * 8, [r"\boxed{1}"] * 8)
    assert verdicts == [Verdict(None, timed_out=True)] * 8 and verifier.towers == 1 + 2


def test_a_process_that_dies_between_calls_is_replaced_and_ends_with_the_verifier():
    verifier = MathVerifier(max_workers=1)
    verifier.judge(["1"], ["x"])
    process = psutil.Process(verifier._workers[0].pid)
    process.kill()
    while process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert verifier.judge(["1"], [r"\boxed{1}"]) == [Verdict(True, gold="1", answer="1")]
    pid = verifier._workers[0].pid
    del verifier
    assert not psutil.pid_exists(pid)


def test_a_script_without_a_main_guard_works_and_leaves_no_process_behind(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from groupgrad.rewards import accuracy, accuracy_reward\n"
        "print(accuracy_reward([r'\\boxed{2}'], ['2']), accuracy._VERIFIER._workers[0].pid)\n"
    )
    out = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    rewards, pid = out.stdout.rsplit(" ", 1)
    assert rewards == "[1.0]"
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["kill", "-0", pid.strip()], check=True, capture_output=True)


def test_the_worker_does_not_import_torch():
    code = "import sys, groupgrad.rewards.math_worker; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
