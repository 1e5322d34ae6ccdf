"""A shell in a sandbox: files last from command to command, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from groupgrad.integrations.code_sandbox.sandbox import SandboxError
from groupgrad.integrations.code_sandbox.shell import SandboxedShell


@pytest.fixture
def shell() -> Callable[..., SandboxedShell]:
    def make(files: dict[str, str], **limits: float) -> SandboxedShell:
        try:
            return SandboxedShell(files, **limits)
        except SandboxError as error:
            pytest.skip(str(error))

    return make


def test_files_last_and_nothing_else_does(shell: Callable[..., SandboxedShell], tmp_path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    box = shell({"src/add.py": "def add(a, b):\n    return a - b\n"})
    assert box.run("cat src/add.py; cd src; export X=1").output == "def add(a, b):\n    return a - b\n"
    assert box.run("echo $X; sed -i s/-/+/ src/add.py; echo new > made.txt; exit 3") == (3, "\n")
    assert box.files == {"made.txt": "new\n", "src/add.py": "def add(a, b):\n    return a + b\n"}
    assert box.run("cd src && python3 -c 'import add; print(add.add(2, 3))'") == (0, "5\n")
    status, output = box.run(f"cat {outside}")
    assert status != 0 and "secret" not in output
    assert outside.read_text() == "secret"


def test_what_does_not_end_or_writes_too_much(shell: Callable[..., SandboxedShell]) -> None:
    box = shell({"a": "1"}, timeout_s=2.0, output_kb=16)
    assert box.run("echo 2 > a; sleep 30") == (124, "no end after 2 s")
    assert box.run("yes | head -c 100000").status == 125
    assert box.files == {"a": "1"}
    assert box.run("rm a") == (0, "") and box.files == {}
