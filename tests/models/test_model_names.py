"""A model's name that leads nowhere is refused at once, with the reason; one that may lead somewhere is not."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from groupgrad.models.model_names import check_model_name, looks_like_path, missing_because


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "gsm8k-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that may be asked; the hosts that were looked up."""
    hosts: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("groupgrad.models.model_names.getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: hosts.append(host))
    return hosts


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "~/x", "runs/a/b", "runs/", "runs\\x", "."])
def test_paths_are_told_from_names(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_the_hub_are_no_paths(name: str) -> None:
    assert not looks_like_path(name)


@pytest.mark.parametrize("name", ["./runs/gsm8k-modle", "runs/gsm8k-modle"])
def test_a_missing_folder_is_named_with_the_one_that_was_meant(name: str) -> None:
    with pytest.raises(ValueError) as error:
        check_model_name("--model", name)
    text = str(error.value)
    assert text.startswith(f"--model={name!r}: there is no such folder in {Path.cwd()}")
    assert "did you mean 'runs/gsm8k-model'?" in text and text.endswith("a name on the hub")
    check_model_name("--model", name.replace("modle", "model"))


def test_a_path_is_never_looked_for_on_the_hub(online: list[str]) -> None:
    assert "there is no such folder" in str(missing_because("runs/not/here"))
    assert online == []


def test_a_name_may_be_on_a_hub_that_can_be_reached(online: list[str]) -> None:
    assert missing_because("gpt2") is None
    assert online == ["huggingface.co"]


def test_a_hub_without_an_address_is_not_asked(online: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: None) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert str(missing_because("gpt2")).endswith("and huggingface.co cannot be reached")
    monkeypatch.setattr("groupgrad.models.model_names.getproxies", lambda: {"https": "http://proxy:1"})
    assert missing_because("gpt2") is None


def test_without_a_network_downloaded_models_are_found(tmp_path: Path) -> None:
    """The layout of the hub's cache, with the branch of a revision."""
    assert str(missing_because("me/tiny")).endswith("and HF_HUB_OFFLINE forbids to download it")
    folder = tmp_path / "other" / "models--me--tiny"
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / revision).write_text(commit)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps({}))
    cache = {"cache_dir": str(tmp_path / "other")}
    assert missing_because("me/tiny", cache) is None
    assert missing_because("me/tiny", {**cache, "revision": "v1"}) is None
    assert str(tmp_path / "other") in str(missing_because("me/tiny", {**cache, "revision": "v2"}))
    assert missing_because("me/tiny") is not None


def test_local_files_only_is_named(online: list[str]) -> None:
    assert str(missing_because("gpt2", {"local_files_only": True})).endswith("local_files_only forbids to download it")
    assert online == []
