"""Programs that run in a sandbox: a script, the process of a completion's code, and the process of its tests.

The source is run by `sandbox_confine`, so only the standard library is used. Code and tests live in two sandboxes. A
test calls functions of the code through messages, one JSON value a line, and gets plain values back. What a test
expects never reaches the process of the code, and nothing that the code does to its process reaches the test.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import os
import sys
import types
from collections.abc import Callable
from typing import Any

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "eq", "lt", "le")
EXACT = (("decimal", "Decimal"), ("fractions", "Fraction"))
"""Types of numbers that are sent as text."""
RESERVED = {*dir(builtins), *sys.stdlib_module_names}


def run_script(code: str) -> None:
    """Runs code as a script; its standard input and output are those of the process."""
    exec(compile(code, "solution.py", "exec"), _main_module("__main__"))


def serve_code(code: str) -> None:
    """Runs code, then answers requests for its names until the other side ends."""
    peer = Peer(_OPERATIONS)
    scope = _main_module("solution")
    try:
        exec(compile(code, "solution.py", "exec"), scope)
    except BaseException as error:
        peer.send({"failed": _describe(error)})
        return
    peer.objects.append(scope)
    modules = [name for name, value in scope.items() if isinstance(value, types.ModuleType)]
    names = [name for name in scope if not name.startswith("__") and name not in modules]
    peer.send({"names": names, "modules": modules})
    while True:
        peer.answer(peer.receive())


def run_tests(tests: list[str]) -> None:
    """Runs each test and sends its verdict: {"passed": bool, "why": text}, and "invalid" for a test with an error."""
    import ast  # here and below, since a script shall not wait for what it does not use

    peer = Peer({"call": _OPERATIONS["call"]})
    hello = peer.receive()
    if "failed" in hello:
        peer.send({"unusable": str(hello["failed"])})
        return
    peer.send({"loaded": True})
    for number, test in enumerate(tests):
        try:
            tree = ast.parse(test)
            program = compile(tree, f"<test {number}>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            peer.send({"passed": False, "why": _describe(error), "invalid": True})
            continue
        why = ""
        try:
            exec(program, _scope_of_test(tree, hello, peer))
        except SystemExit as error:  # a test that ends with unittest.main()
            why = f"SystemExit: {int(error.code) if isinstance(error.code, bool) else error.code}" if error.code else ""
        except BaseException as error:
            why = _describe(error) or "an error"
        if peer.is_closed:  # a test may have caught the error that says so
            why = "the process of the code has ended"
        peer.send({"passed": not why, "why": why, "gone": peer.is_closed})
        if peer.is_closed:
            return


class Peer:
    """One side of the conversation between code and tests. `operations` are those that the other side may ask for."""

    def __init__(self, operations: dict[str, Callable[..., Any]]):
        import json

        self.operations = operations
        self._dumps, self._loads = json.dumps, json.loads
        self.objects: list[Any] = []
        """Values without a plain form, which the other side names by their number."""
        self.is_closed = False
        self._input, self._output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)

    def send(self, message: dict[str, Any]) -> None:
        self._output.write(self._dumps(message).encode() + b"\n")
        self._output.flush()

    def receive(self) -> Any:
        line = self._input.readline()
        if not line.endswith(b"\n"):
            self.is_closed = True
            raise EOFError("the process of the code has ended")
        return self._loads(line)

    def ask(self, operation: str, *arguments: Any) -> Any:
        """The value of an operation on the other side, whose own requests are answered meanwhile."""
        self.send({"op": operation, "arguments": [self.encode(argument) for argument in arguments]})
        while "op" in (message := self.receive()):
            self.answer(message)
        if "error" in message:
            name, text = map(str, message["error"])
            kind = getattr(builtins, name, None)
            if not (isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)):
                raise RuntimeError(f"{name}: {text}")
            raise kind(text)
        return self.decode(message["value"])

    def answer(self, message: dict[str, Any]) -> None:
        try:
            value = self.operations[message["op"]](*map(self.decode, message["arguments"]))
            reply = {"value": self.encode(value)}
        except BaseException as error:
            if self.is_closed:
                raise
            reply = {"error": [type(error).__name__, str(error)[:1000]]}
        self.send(reply)

    def encode(self, value: Any) -> Any:
        """A value as JSON; what has no plain form becomes a number by which the other side may name it."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            return int(value) if abs(value) < 1 << 53 else {"int": hex(value)}
        if isinstance(value, float):
            return float(value)
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, (tuple, set, frozenset)):
            kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
            return {kind.__name__: [self.encode(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": value.hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if type(value) is Remote:
            return {"yours": object.__getattribute__(value, "_number")}
        if (type(value).__module__, type(value).__name__) in EXACT:
            return {type(value).__name__: str(value)}
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist())
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decode(self, value: Any) -> Any:
        """The inverse. Whatever arrives, the result consists of plain values and `Remote`s."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self.decode, content))
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "mine":
            return Remote(self, int(content))
        if kind == "yours":
            return self.objects[content]
        plain: dict[str, Callable[[Any], Any]] = {
            "int": lambda text: int(text, 16),
            "bytes": bytes.fromhex,
            "complex": lambda parts: complex(*parts),
            **{name: getattr(importlib.import_module(module), name) for module, name in EXACT if name == kind},
        }
        return plain[kind](content)


class Remote:
    """An object of the other process: it can be called and read there. Never equal to a plain value.

    Operators work between two such objects only: with a plain value on one side, the code would receive what a test
    expects, and could answer that it is right.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return object.__getattribute__(self, "_peer").ask(operation, self, *arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", list(arguments), keywords)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return self._ask("len")

    def __bool__(self) -> bool:
        return self._ask("bool")

    def __str__(self) -> str:
        return self._ask("str")

    def __repr__(self) -> str:
        return self._ask("repr")

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_number")


def _binary(name: str) -> Callable[[Remote, Any], Any]:
    def ask(self: Remote, other: Any) -> Any:
        if type(other) is not Remote:
            return False if name == "eq" else NotImplemented
        return self._ask(name, other)

    return ask


for _name in BINARY:
    setattr(Remote, f"__{_name.rstrip('_')}__", _binary(_name))

_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in BINARY},
    "global": operator.getitem,
    "getattr": getattr,
    "setattr": setattr,
    "call": lambda function, arguments, keywords: function(*arguments, **keywords),
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    # A list's or dict's iterator has no plain form, so that it is read one item at a time.
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def _scope_of_test(tree: Any, hello: dict[str, Any], peer: Peer) -> dict[str, Any]:
    """The names that a test finds: functions of the code, and modules of the standard library that the code imports.

    A name of a builtin or of such a module is the code's only where the test uses no other name of the code: code that
    redefines `abs` cannot change what a test computes from another function's result.
    """
    import ast

    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    taken = names.intersection(map(str, hello["names"]))
    if len(taken) > 1 and taken <= RESERVED:
        raise NameError(f"the code redefines {' and '.join(sorted(taken))}, and which of them is under test is unclear")
    if len(taken) > 1:
        taken -= RESERVED
    scope = _main_module("__main__")  # where unittest looks for test cases
    for name in names.intersection(map(str, hello["modules"]), sys.stdlib_module_names) - taken:
        scope[name] = importlib.import_module(name)
    code = Remote(peer, 0)
    for name in sorted(taken):
        scope[name] = peer.ask("global", code, name)
    return scope


def _main_module(name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    return module.__dict__


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
