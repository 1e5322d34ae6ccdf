"""Workers shared by a file's tests, and environments that no test inherits from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from example_environments import Base

from groupgrad.concurrency.workers import Workers
from groupgrad.envs.environments import Environments


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(8)
    yield pool
    pool.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Environments]]:
    """Makes environments that are closed after the test."""
    made: list[Environments] = []

    def make(*arguments: Any, **options: Any) -> Environments:
        made.append(Environments(*arguments, **options))
        return made[-1]

    yield make
    for environments in made:
        environments.close()


@pytest.fixture(autouse=True)
def no_instances() -> Iterator[None]:
    """Each test begins without instances, and hanging methods end with it."""
    Base.made.clear()
    yield
    for instance in Base.made:
        instance.release.set()
