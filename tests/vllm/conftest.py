"""A real vLLM and a small model for it. Everything here is skipped where vLLM cannot be imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_vllm import SIZES, Served, vary
from vllm_training import LARGE

HAS_VLLM = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(600))
            if not HAS_VLLM:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session", autouse=True)
def stored_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers make their keys and store them; trainers of these tests and of their processes find them there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_API_KEY", raising=False)
        patch.setitem(os.environ, "XDG_STATE_HOME", str(tmp_path_factory.mktemp("keys")))
        yield


@pytest.fixture(scope="session")
def folder(make_model: Any, make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that servers read from disk; no test samples from its weights."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(seed=99, **SIZES).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def serve(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Factory for servers of the model in `folder`, or in another; they are killed in the end."""
    made: list[Served] = []

    def make(*options: str, of: Path = folder) -> Served:
        made.append(Served(of, tmp_path_factory.mktemp("log") / "server.log", *options))
        return made[-1]

    yield make
    for served in made:
        served.kill()


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served]) -> Iterator[Served]:
    """One server for all tests of a module."""
    served = serve().start()
    yield served
    served.kill()


@pytest.fixture(scope="session")
def large_server(
    serve: Callable[..., Served], make_model: Any, make_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Served]:
    """The server that training tests share, started at first use and after a test has killed it."""
    folder = tmp_path_factory.mktemp("vllm") / "large"
    made: list[Served] = []

    def get() -> Served:
        if not made:
            make_model(seed=98, **LARGE).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            options = ["--max-model-len", "512", "--enable-lora", "--max-lora-rank", "8"]
            made.append(serve(*options, "--logprobs-mode", "raw_logprobs", of=folder))
        if made[0].process is None:
            made[0].start()
        return made[0]

    return get


@pytest.fixture
def policy(make_model: Any) -> Any:
    return vary(make_model(seed=1, **SIZES).eval(), 1)
