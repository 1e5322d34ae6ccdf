"""The reward that runs code against tests. What code cannot do is in `test_code_reward_escapes.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sandbox_escapes

from groupgrad.errors import RewardError
from groupgrad.integrations.code_sandbox import sandbox as sandbox_module
from groupgrad.integrations.code_sandbox.sandbox import MECHANISMS, Sandbox, SandboxError
from groupgrad.rewards import code_reward
from groupgrad.rewards.reward_runner import RewardRunner

code_reward_module = sys.modules["groupgrad.integrations.code_sandbox.code_reward"]


@pytest.fixture(scope="module")
def reward() -> code_reward:
    return code_reward(extract="all", timeout_s=5, python=sandbox_escapes.holding("auto"))


def score(reward: code_reward, codes: list[Any], tests: list[Any]) -> tuple[list[float | None], list[str | None]]:
    """The rewards, and the first failure of each row."""
    shown: dict[str, list[Any]] = {}
    rewards = reward(prompts=codes, completions=codes, tests=tests, log_extra=shown.__setitem__)
    return asyncio.run(rewards), shown["code_failure"]


def processes_named(name: str) -> list[int]:
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().strip() == name:
                found.append(int(process))
    return found


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def test_functions_and_scripts_are_scored_as_part_of_a_run(make_rollouts):
    asserts = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]
    pairs = [["1 2\n", "3\n"], ["5 5\n", "10"], ["0 0\n", "1\n"]]
    script = [
        {"role": "assistant", "content": "So:\n```python\nprint(sum(map(int, input().split())), ' ')\n```\nDone."}
    ]
    completions = ["```py\ndef add(a, b):\n    return a + b\n```", script, "I do not know", script]
    reward = code_reward(tests="checks", python=sandbox_escapes.holding("auto"))
    rows = [{"prompt": "p", "checks": checks} for checks in (asserts, pairs, asserts, [])]
    runner = RewardRunner([reward])
    assert runner.missing_arguments(["prompt"]) == {"code_reward": ["checks"]}
    table = runner.score(make_rollouts(completions, rows))
    assert table.names == ["code_reward"]
    assert table.rewards[:3, 0].tolist() == pytest.approx([1 / 2, 2 / 3, 0])
    assert table.rewards[3].isnan().item()
    assert table.columns["code_failure"] == [
        "test 2: AssertionError: ",
        "test 3: wrote something else",
        None,
        None,
    ]
    assert table.metrics["code/no_code"].value == 0.25


@pytest.mark.slow
def test_a_test_gets_values_errors_and_objects_of_the_code(reward):
    code = """
import math
LIMIT = 3
class Box:
    def __init__(self, value): self.value = value
    def __add__(self, other): return Box(self.value + other.value)
    def __eq__(self, other): return self.value == other.value
    def items(self):
        while True:
            yield self.value
def same(value): return value
def apply(function, value): return function(value) + 1
def fail(): raise KeyError("gone")
def sum(a, b): return a * b
def f(x): return math.sqrt(x)
def half(x): return x / 2
"""
    tests = [
        "assert same([1, (2, {3}), {'a': b'x', 4: None}, 1j]) == [1, (2, {3}), {'a': b'x', 4: None}, 1j]",
        "assert same(7**4000) == 7**4000 and same(-(2**60)) == -(2**60)",
        "assert same(float('inf')) > 1e300 and type(same(2.0)) is float and same(True) is True",
        "assert apply(lambda x: x * 2, 4) == 9",
        "try:\n    fail()\n    assert False\nexcept KeyError:\n    pass",
        "assert Box(1) + Box(2) == Box(3) and not Box(1) == Box(2)",
        "box = Box(5)\nbox.value = 6\nassert box.value == 6",
        "from itertools import islice\nassert list(islice(Box(2).items(), 3)) == [2, 2, 2]",
        "assert sum(3, 4) == 12",
        "assert sum([f(4), f(9)]) == 5",
        "assert math.isclose(f(2) ** 2, 2)",
        "assert LIMIT == 3",
        "from fractions import Fraction\nassert half(Fraction(1, 3)) == Fraction(1, 6)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(4), 2)\nunittest.main()",
    ]
    assert score(reward, [code], [tests]) == ([1.0], [None])
    unclear = "def sum(x): return 0\ndef abs(x): return 0"
    rewards, (failure,) = score(reward, [unclear], [["assert abs(sum([1, 2]) - 3) < 1"]])
    assert rewards == [0.0]
    assert failure is not None and "the code redefines abs and sum" in failure


def test_arguments_and_results_of_many_types_reach_the_other_side(reward):
    code = """
import datetime, itertools
from collections import deque
def total(values): return sum(values)
def first(values): return list(itertools.islice(values, 3))
def day(date): return date.strftime("%A")
def later(moment): return moment + datetime.timedelta(days=1, microseconds=1)
def rotated(values):
    values = deque(values)
    values.rotate(1)
    return values
def numbers(n): return range(n)
def same(value): return value
"""
    tests = [
        "assert total(range(5)) == total(iter([4, 6])) == total(x for x in [10]) == total({4: 1, 6: 1}.keys()) == 10",
        "import itertools\nassert first(itertools.count()) == [0, 1, 2]",
        "import datetime\nassert day(datetime.date(2024, 1, 1)) == 'Monday'",
        "from datetime import datetime\nassert later(datetime(2024, 1, 1)) == datetime(2024, 1, 2, 0, 0, 0, 1)",
        "from datetime import *\nt = datetime(2024, 1, 1, tzinfo=timezone.utc)\nassert same(t) == t",
        "from datetime import *\nassert same([time(1, 2), timedelta(3, 4, 5)]) == [time(1, 2), timedelta(3, 4, 5)]",
        "from collections import deque\nassert rotated(deque([1, 2, 3], 3)) == deque([3, 1, 2])",
        "assert numbers(3) == range(3)",
    ]
    assert score(reward, [code], [tests]) == ([1.0], [None])


def test_classes_and_errors_of_the_code_are_known_to_a_test(reward):
    code = """
class Animal:
    "An animal."
class Dog(Animal): pass
class TooLow(ValueError):
    def __init__(self, need):
        super().__init__(f"need {need}")
class Own(Exception): pass
def fail(kind): raise {"low": TooLow(3), "key": KeyError("k"), "own": Own("o")}[kind]
"""
    caught = "try:\n    fail({!r})\n    assert False\nexcept {} as error:\n    assert error.args == ({!r},)"
    tests = [
        "assert isinstance(Dog(), Animal) and not isinstance(Animal(), Dog) and not isinstance(3, Dog)",
        "assert issubclass(Dog, Animal) and Animal.__doc__ == 'An animal.'",
        caught.format("low", "ValueError", "need 3"),
        caught.format("key", "KeyError", "k"),
        caught.format("own", "RuntimeError", "Own: o"),
    ]
    assert score(reward, [code], [tests]) == ([1.0], [None])


def test_type_hints_of_code_and_tests_are_evaluated(reward):
    function = "def f(x: int): return x\ndef g(): return f.__annotations__['x'] is int"
    test = "def h(x: int): return x\nassert g() and h.__annotations__['x'] is int"
    assert score(reward, [function, f"{function}\nprint(g())"], [[test], [["", "True"]]])[0] == [1.0, 1.0]


def test_unit_tests_are_run(reward):
    ends = ["unittest.main()", "if __name__ == '__main__':\n    unittest.main()"]
    head = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(half(4), 2)\n"
    second = "class Second(unittest.TestCase):\n    def test(self): self.assertEqual(half(6), 3)\n"
    codes = ["def half(x): return x // 2", "def half(x): return 2", "def half(x): return 7"]
    rewards, failures = score(reward, codes, [[head + ends[0], head + second + ends[1]]] * 3)
    assert rewards == [1.0, 0.5, 0.0]
    assert failures[0] is None and failures[1].startswith("test 2: SystemExit: 1") and failures[2].startswith("test 1:")


UNCALLED = [
    "def test_half():\n    assert half(4) == 2",
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.x = 4\n"
    "    def test(self): self.assertEqual(half(self.x), 2)",
    "import unittest\nclass Base(unittest.TestCase):\n    def test(self): assert half(4) == 2\nclass T(Base): pass",
    "from unittest import TestCase, mock\nclass T(TestCase):\n    @mock.patch('builtins.input')\n"
    "    def test(self, answer): self.assertEqual(half(4), 2)",
]


@pytest.mark.slow
def test_test_functions_and_classes_that_a_text_does_not_call_are_run(reward):
    right, wrong = "def half(x): return x // 2", "def half(x): return 7"
    rewards, failures = score(reward, [right], [UNCALLED])
    assert rewards == [1.0], failures
    assert score(reward, [wrong], [UNCALLED])[0] == [0.0]


@pytest.mark.slow
def test_a_text_that_calls_nothing_ends_the_run(reward):
    for text, problem in (
        ("LIMIT = 3\ndef check(candidate):\n    assert candidate(4) == 2", "defines check and calls nothing"),
        ("class TestHalf:\n    def test_half(self): assert half(4) == 2", "defines TestHalf and calls nothing"),
        ("import asyncio\nassert asyncio.run(half(4)) == 2", "is asynchronous; write one that calls plain"),
        ("async def test_half():\n    assert await half(4) == 2", "is asynchronous; write one that calls plain"),
        ("def test_half(value):\n    assert half(value) == 2", "has test_half, whose argument 'value' only pytest"),
        (
            "import pytest\n@pytest.mark.parametrize('x', [4])\ndef test_half(x):\n    assert half(x) == 2",
            "has test_half, whose argument 'x' only pytest",
        ),
    ):
        with pytest.raises(RewardError, match=f"code_reward: the test .* of the data set {problem}"):
            score(reward, ["def half(x): return 7"], [[text]])


@pytest.mark.slow
def test_code_that_ends_is_started_again_and_code_that_hangs_is_not(reward):
    code = "import os\ndef f(x):\n    while x == 9: pass\n    return os._exit(0) if x == 1 else x"
    tests = [f"assert f({x}) == {x}" for x in (0, 1, 2, 9, 3)]
    quick = code_reward(extract="all", timeout_s=1, mechanism=reward.mechanism, python=reward.python)
    (share,), (failure,) = score(quick, [code], [tests])
    assert share == 2 / 5
    assert failure == "test 2: the process of the code has ended"
    caught = ["try:\n    f(1)\nexcept Exception:\n    pass"]
    assert score(reward, [code, "def f(x): return 1 / 0", "def f("], [caught] * 3)[0] == [0.0, 1.0, 0.0]
    every = code_reward(extract="all", score="all", no_code=None, mechanism=reward.mechanism, python=reward.python)
    assert score(every, [code, code, " "], [tests[:3], tests[:1], tests])[0] == [0.0, 1.0, None]


def test_threads_files_and_packages_of_the_code(reward):
    code = """
import sys, threading
sys.setrecursionlimit(10**6)
def main():
    depth = lambda n: n and 1 + depth(n - 1)
    print(depth(5000))
threading.stack_size(64 << 20)
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    assert score(reward, [code], [[["", "5000"]]])[0] == [1.0]
    code = "open('a', 'a').write('x')\nprint(open('a').read())"
    assert score(reward, [code], [[["", "x"], ["", "x"]]])[0] == [1.0]


def test_equal_code_runs_once_and_some_completions_at_a_time(reward, monkeypatch):
    started: list[str] = []
    at_once = [0, 0]
    plain = Sandbox.run

    @contextlib.asynccontextmanager
    async def counting(self, entry, code, **limits):
        started.append(code)
        at_once[0] += 1
        at_once[1] = max(at_once)
        async with plain(self, entry, code, **limits) as process:
            yield process
        at_once[0] -= 1

    monkeypatch.setattr(Sandbox, "run", counting)
    two = code_reward(extract="all", max_concurrency=2, mechanism=reward.mechanism, python=reward.python)
    codes = [f"print({n % 4})" for n in range(8)]
    assert score(two, codes, [[["", "1"]]] * 8)[0] == [float(n % 4 == 1) for n in range(8)]
    assert sorted(started) == sorted(set(codes))
    assert at_once[1] == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\nthen\n```py\nb\n  ```\n", "b"),
        ("```python\na\n```\n```json\n{}\n```\n```\nout\n```", "a"),
        ("```\na\n```", "a"),
        ("```bash\na\n```", None),
        ("```python title='a.py'\na\n```", "a"),
        ("````python\n```\na\n````", "```\na"),
        ("~~~python\na\n~~~", "a"),
        ("```inline``` text\n```python\na\n```", "a"),
        ("1. So:\n   ```python\n   if a:\n       b\n\n   c\n   ```", "if a:\n    b\n\nc"),
        ("- So:\n\n\t```python\n\ta\n\t  b\nc\n\t```", "a\n  b\nc"),
        ("```python3.11\na\n```\n```Python:main.py\nb\n```", "b"),
        ("```{.python .numberLines}\na\n```", "a"),
        ("```pycon\n>>> a\n```", None),
        ("```python\r\na = 'b\u2028\x0cc'\r\n```\r\n", "a = 'b\u2028\x0cc'"),
        ("```python\na", None),
        ("a = 1", None),
    ],
)
def test_the_last_block_of_python_is_the_code(text, code):
    assert code_reward_module.last_code_block(text) == code


def test_white_space_behind_a_fence_takes_no_more_than_its_length_in_time() -> None:
    began = time.process_time()
    assert code_reward_module.last_code_block(f"```python{40_000 * ' '}x\n1\n```{40_000 * ' '}\n") == "1"
    assert code_reward_module.last_code_block("~~~a\n" * 40_000) is None
    assert code_reward_module.last_code_block(40_000 * "~" + "\n" + 40_000 * "`") is None
    # What an unclosed fence encloses is no block of its own.
    assert code_reward_module.last_code_block("```\nx = 1\n```\n````\n~~~\n~~~") == "x = 1"
    assert time.process_time() - began < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["auto", *MECHANISMS])
def test_code_ends_with_a_cancelled_call_and_with_its_trainer(mechanism):
    name = f"end{os.getpid()}"
    code = f"""
import ctypes, signal, time
ctypes.CDLL(None).prctl(15, b"{name}")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(300)
"""
    python = sandbox_escapes.holding(mechanism)
    patient = code_reward(extract="all", timeout_s=300, mechanism=mechanism, python=python)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    call = asyncio.run_coroutine_threadsafe(patient(prompts=[""], completions=[code], tests=[[["", ""]]]), loop)
    wait_for(lambda: processes_named(name))
    call.cancel()
    wait_for(lambda: not processes_named(name), 5)
    wait_for(lambda: not asyncio.all_tasks(loop), 5)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()

    script = "import asyncio, pickle, sys\nreward, code = pickle.load(sys.stdin.buffer)\n"
    script += "asyncio.run(reward(prompts=[''], completions=[code], tests=[[['', '']]]))"
    trainer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    assert trainer.stdin is not None
    trainer.stdin.write(pickle.dumps((patient, code)))
    trainer.stdin.close()
    wait_for(lambda: processes_named(name))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for(lambda: not processes_named(name), 5)


@pytest.mark.slow
def test_calls_leave_no_open_file(reward):
    for _ in range(2):
        score(reward, ["print(1)", "import os; os._exit(1)"], [[["", "1"]], ["assert f(1) == 1"]])
        count = len(os.listdir("/proc/self/fd"))
    score(reward, ["print(1)"] * 3, [[["x" * 100_000, str(n)]] for n in range(3)])
    assert len(os.listdir("/proc/self/fd")) <= count


def test_a_sandbox_that_does_not_hold_is_refused(reward, monkeypatch):
    source = sandbox_module._source
    weaker = {"_deny_calls": "new processes can be started", "_limit": "memory has no limit"}
    for function, message in weaker.items():
        broken = f"\n{function} = lambda *a: None\n" + 'if __name__ == "__main__":'
        monkeypatch.setattr(
            sandbox_module,
            "_source",
            lambda name, broken=broken: source(name).replace('\nif __name__ == "__main__":', broken),
        )
        with pytest.raises(
            SandboxError, match=f"no sandbox holds.*{reward.mechanism}: .*{message}.*install bubblewrap"
        ):
            code_reward(mechanism=reward.mechanism, python=reward.python)
    monkeypatch.undo()
    monkeypatch.setattr(sandbox_module.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"bubblewrap: it is not installed"):
        code_reward(mechanism="bubblewrap")
    with pytest.raises(SandboxError, match=r"python='/no/python' does not run"):
        code_reward(python="/no/python")


def test_a_sandbox_that_cannot_start_ends_the_run(reward, monkeypatch):
    monkeypatch.setattr(sandbox_module, "START_ATTEMPTS", 1)
    monkeypatch.setattr(Sandbox, "_command", lambda self: [sys.executable, "-c", "raise SystemExit('no memory')"])
    with pytest.raises(SandboxError, match=r"a sandbox did not start 1 times \(\w+\): no memory"):
        score(reward, ["print(1)"], [[["", "1"]]])


def test_it_can_be_pickled_and_bad_settings_and_tests_are_refused(reward):
    assert score(pickle.loads(pickle.dumps(reward)), ["print(1)"], [[["", "1"]]])[0] == [1.0]
    forms = [None, [], [{"input": "", "output": "1"}], {"inputs": [""], "outputs": ["1"]}]
    assert score(reward, ["print(1)"] * 4, forms)[0] == [None, None, 1.0, 1.0]
    for tests in ("assert f(1)", [["a"]], [1], [["1", 2]], {"x": 1}, ["assert 1", ["", ""]]):
        with pytest.raises(RewardError, match=r"the tests of a row are .* give a list of texts"):
            score(reward, ["print(1)"], [tests])
    with pytest.raises(RewardError, match=r"test 'assert f\(1' of the data set is no Python \(SyntaxError"):
        score(reward, ["f = len"], [["assert f(1"]])
    for settings, message in (
        ({"score": "some"}, "score='some' is not known"),
        ({"extract": "none"}, "extract='none' is not known"),
        ({"mechanism": "landlock"}, "mechanism='landlock' is not known; set it to bubblewrap, namespaces or auto"),
        ({"timeout_s": 0}, "timeout_s=0 lets no code run"),
        ({"max_concurrency": 0}, "max_concurrency=0 lets no code run"),
        ({"memory_mb": 8}, "memory_mb=8 is less than an interpreter needs"),
    ):
        with pytest.raises(ValueError, match=message):
            code_reward(**settings)  # type: ignore[arg-type]
