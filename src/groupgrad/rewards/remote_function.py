"""Runs a reward function in a worker process, which imports this module; it imports neither torch nor transformers."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np


def call_logged(
    function: Callable[..., Any], arguments: dict[str, Any], loggers: list[str], seed: str
) -> tuple[Any, list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """Calls a reward function with `loggers` that record their calls.

    Returns the rewards, and the calls as (logger, arguments, keyword arguments). The random streams of Python, NumPy
    and, if loaded, PyTorch start at `seed`.
    """
    _set_seed(seed)
    logged: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    for logger in loggers:
        arguments[logger] = lambda *args, logger=logger, **kwargs: logged.append(
            (logger, copy.deepcopy(args), copy.deepcopy(kwargs))
        )
    returned = function(**arguments)
    if inspect.isawaitable(returned):  # a plain function, such as a lambda, around an async one
        returned = asyncio.run(_awaited(returned))
    return returned, list(logged)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _set_seed(text: str) -> None:
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    random.seed(number)
    np.random.seed(number)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)
