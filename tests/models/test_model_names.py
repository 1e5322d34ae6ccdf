"""A path without a folder is refused at once; a name that may be on the hub is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupgrad.models.model_names import check_model_name, looks_like_path


@pytest.mark.parametrize("name", ["./x", "../x", "/x", "~/x", "runs/a/b", "runs/", "runs\\x", "."])
def test_paths_are_told_from_names(name: str) -> None:
    assert looks_like_path(name)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_names_of_the_hub_are_no_paths(name: str) -> None:
    assert not looks_like_path(name)
    check_model_name("--model", name)


def test_a_missing_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        check_model_name("--model", "./runs/model")
    text = str(error.value)
    assert text.startswith(f"--model='./runs/model': there is no such folder in {tmp_path}")
    assert text.endswith("a name on the hub")
    (tmp_path / "runs" / "model").mkdir(parents=True)
    check_model_name("--model", "./runs/model")
