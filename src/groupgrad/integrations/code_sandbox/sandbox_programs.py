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
_Parts = Callable[[Any], list[Any]]
FORMS: dict[str, tuple[str, _Parts, str]] = {
    **dict.fromkeys(("tuple", "set", "frozenset"), ("builtins", list, "")),
    "int": ("builtins", lambda value: [hex(value), 16], ""),  # those that JSON would round
    "complex": ("builtins", lambda value: [value.real, value.imag], ""),
    **dict.fromkeys(("bytes", "bytearray"), ("builtins", lambda value: [value.hex()], "fromhex")),
    "range": ("builtins", lambda value: [value.start, value.stop, value.step], ""),
    "deque": ("collections", lambda value: [list(value), value.maxlen], ""),
    **dict.fromkeys(("date", "time", "datetime"), ("datetime", lambda value: [str(value)], "fromisoformat")),
    "timedelta": ("datetime", lambda value: [value.days, value.seconds, value.microseconds], ""),
    "Decimal": ("decimal", lambda value: [str(value)], ""),
    "Fraction": ("fractions", lambda value: [str(value)], ""),
}
"""Types with a plain form beside those of JSON, by name: module, parts of a value, and what makes one of the parts ("":
the type). Where the parts are the items (`list`), they are one argument. Values of derived types have the same form."""
RESERVED = {*dir(builtins), *sys.stdlib_module_names}


def run_script(code: str) -> None:
    """Runs code as a script; its standard input and output are those of the process."""
    exec(_compiled(code, "solution.py"), _main_module("__main__"))


def serve_code(code: str) -> None:
    """Runs code, then answers requests for its names until the other side ends."""
    peer = Peer(_OPERATIONS)
    scope = _main_module("solution")
    try:
        exec(_compiled(code, "solution.py"), scope)
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
    """Runs each test and sends its verdict: {"passed": bool, "why": text}; "invalid" says why a test cannot be used."""
    import ast  # here and below, since a script shall not wait for what it does not use

    peer = Peer({name: _OPERATIONS[name] for name in ("call", "iter", "next", "len", "bool")})
    hello = peer.receive()
    if "failed" in hello:
        peer.send({"unusable": str(hello["failed"])})
        return
    peer.send({"loaded": True})
    for number, test in enumerate(tests):
        verdict: dict[str, Any] = {"passed": False}
        try:
            tree = ast.parse(test)
            program = _compiled(tree, f"<test {number}>")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = f"is no Python ({_describe(error)}), so that no code can pass it; repair the row"
            peer.send({**verdict, "why": why, "invalid": True})
            continue
        why = ""
        try:
            nodes = list(ast.walk(tree))
            if any(isinstance(node, ast.AsyncFunctionDef) or getattr(node, "id", "") == "asyncio" for node in nodes):
                raise NoTest("is asynchronous; write one that calls plain functions of the code")
            scope = _scope_of_test(tree, hello, peer)
            exec(program, scope)
            _run_uncalled_tests(tree, scope)
        except NoTest as error:
            why, verdict["invalid"] = str(error), True
        except SystemExit as error:  # a test that ends with unittest.main()
            why = f"SystemExit: {int(error.code) if isinstance(error.code, bool) else error.code}" if error.code else ""
        except BaseException as error:
            why = _describe(error) or "an error"
        if peer.is_closed:  # a test may have caught the error that says so
            why = "the process of the code has ended"
        peer.send({**verdict, "passed": not why, "why": why, "gone": peer.is_closed})
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
            name, text, arguments = message["error"]
            kind = getattr(builtins, str(name), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError)):
                raise RuntimeError(f"{name}: {text}")
            raise kind(*map(self.decode, arguments))
        return self.decode(message["value"])

    def answer(self, message: dict[str, Any]) -> None:
        try:
            value = self.operations[message["op"]](*map(self.decode, message["arguments"]))
            reply = {"value": self.encode(value)}
        except BaseException as error:
            if self.is_closed:
                raise
            reply = {"error": self._of_error(error)}
        self.send(reply)

    def _of_error(self, error: BaseException) -> list[Any]:
        """Name, text and arguments of an error. One of a class of the code has the name of its builtin base class."""
        base = next(kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
        kind = type(error) if base in (Exception, BaseException) else base
        text = str(error)[:1000]
        is_plain = all(argument is None or type(argument) in (bool, int, float, str) for argument in error.args)
        return [kind.__name__, text, list(map(self.encode, error.args)) if is_plain else [text]]

    def encode(self, value: Any) -> Any:
        """Encodes a value as JSON; objects without a plain form become numeric handles."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, float):
            return float(value)
        if isinstance(value, int) and abs(value) < 1 << 53:
            return int(value)
        if isinstance(value, list):
            return [self.encode(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if type(value) is Remote:
            return {"yours": object.__getattribute__(value, "_number")}
        for kind in type(value).__mro__:
            module, parts, _ = FORMS.get(kind.__name__, ("", list, ""))
            if module == kind.__module__:
                return {kind.__name__: [self.encode(part) for part in parts(value)]}
        if type(value).__module__ == "numpy" and (plain := getattr(value, "tolist", None)):
            return self.encode(plain())
        self.objects.append(value)
        return {"mine": len(self.objects) - 1}

    def decode(self, value: Any) -> Any:
        """The inverse. Whatever arrives, the result consists of plain values and `Remote`s."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "yours":
            return self.objects[content]
        if kind == "mine":
            return Remote(self, int(content))
        module, parts, method = FORMS[kind]
        made = getattr(importlib.import_module(module), kind)
        items = [self.decode(item) for item in content]
        return made(items) if parts is list else (getattr(made, method) if method else made)(*items)


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

    def __instancecheck__(self, instance: Any) -> bool:
        return type(instance) is Remote and self._ask("isinstance", instance)

    def __subclasscheck__(self, subclass: Any) -> bool:
        return type(subclass) is Remote and self._ask("issubclass", subclass)

    def __hash__(self) -> int:
        return object.__getattribute__(self, "_number")


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._ask(name, *arguments)


def _binary(name: str) -> Callable[[Remote, Any], Any]:
    def ask(self: Remote, other: Any) -> Any:
        if type(other) is not Remote:
            return False if name == "eq" else NotImplemented
        return self._ask(name, other)

    return ask


for _name in ("getitem", "setitem", "iter", "next", "len", "bool", "str", "repr"):
    setattr(Remote, f"__{_name}__", _forwarded(_name))
for _name in BINARY:
    setattr(Remote, f"__{_name.rstrip('_')}__", _binary(_name))
Remote.__doc__ = property(lambda self: self._ask("getattr", "__doc__"))  # pyright: ignore[reportAttributeAccessIssue]

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
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "str": str,
    "repr": repr,
}


class NoTest(Exception):
    """A text that cannot be used as a test; the message says why."""


def _run_uncalled_tests(tree: Any, scope: dict[str, Any]) -> None:
    """Runs test functions and test classes that a text has defined and never uses, as pytest and unittest would.

    Raises what they raise, AssertionError if one fails in another way. NoTest for a function that needs pytest, and for
    a text that defines other names and calls nothing, so that every code would pass.
    """
    import ast

    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    definitions = (ast.FunctionDef, ast.ClassDef)
    defined = [node.name for node in tree.body if isinstance(node, definitions)]
    tests = [scope[name] for name in defined if name not in used and _is_test(name, scope.get(name))]
    if defined and not tests and all(map(_is_declaration, tree.body)):
        names = " and ".join(defined)
        raise NoTest(f"defines {names} and calls nothing, so that every code passes it; end it with the call")
    for test in tests:
        if not isinstance(test, type):
            _call(test)
        else:
            import unittest

            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
            for case, trace in (*result.errors, *result.failures):
                raise AssertionError(f"{case.id()}: {trace.strip().splitlines()[-1]}")
            if result.unexpectedSuccesses:
                raise AssertionError(f"{result.unexpectedSuccesses[0].id()}: expected to fail, and passed")


def _is_test(name: str, value: Any) -> bool:
    """True for a test function and for a test case of unittest."""
    return hasattr(value, "assertEqual") if isinstance(value, type) else name.startswith("test") and callable(value)


def _call(function: Callable[[], Any]) -> None:
    import inspect

    # A decorator may fill arguments, as those of unittest.mock do.
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in (2, 4):  # *args, **kwargs
            raise NoTest(
                f"has {function.__name__}, whose argument {name!r} only pytest could fill; write a test without "
                "arguments"
            )
    function()


def _is_declaration(statement: Any) -> bool:
    """True for a statement that runs nothing: a definition, an import, or a name for a constant."""
    import ast

    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return not statement.decorator_list
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr)):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass))


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


def _compiled(code: Any, name: str) -> Any:
    """The program of a text, whose hints are evaluated as usual although this file's are not."""
    return compile(code, name, "exec", dont_inherit=True)


def _main_module(name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    return module.__dict__


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
