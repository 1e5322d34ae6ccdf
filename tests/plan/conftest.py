"""Runs `groupgrad plan` on configurations whose models are counted once."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from groupgrad.apps.cli.main import main
from groupgrad.apps.plan import shapes
from groupgrad.apps.plan.shapes import model_shape, read_config


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mapping[str, Any], str], int]]:
    """`plan_of(config, words)`: the exit code of a plan. Counting a model is most of its time."""
    folder = tmp_path_factory.mktemp("models")
    measured = functools.cache(lambda name: model_shape(name, read_config(name)))

    @functools.cache
    def written(content: str) -> str:
        path = folder / str(len(list(folder.iterdir())))
        path.mkdir()
        (path / "config.json").write_text(content)
        return str(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "model_shape", lambda name, config: measured(name))
        yield lambda config, words: main(["plan", "--model", written(json.dumps(config)), *words.split()])


@pytest.fixture
def shown_plan_of(plan_of: Callable[[Mapping[str, Any], str], int], capsys: Any) -> Callable[..., Any]:
    """`shown_plan_of(config, words, code)`: what such a plan prints, which ends with this code; None: with any."""

    def shown(config: Mapping[str, Any], words: str, code: int | None) -> Any:
        assert plan_of(config, words) in (range(3) if code is None else (code,))
        return capsys.readouterr()

    return shown
