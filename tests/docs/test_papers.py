"""The project's own papers agree with the package: licence, citation, versions, images."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import groupgrad

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_licence_is_the_one_that_the_package_declares(project: dict[str, Any]) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert text.rstrip().endswith("limitations under the License.")
    # The page of runs ships uPlot, which is under the MIT licence.
    charts = "src/groupgrad/apps/view/static/uPlot.LICENSE"
    assert (project["license"], project["license-files"]) == ("Apache-2.0 AND MIT", ["LICENSE", charts])
    assert "MIT License" in (ROOT / charts).read_text(encoding="utf-8")


def test_the_citation_has_version_and_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (groupgrad.__version__, "Apache-2.0")
    assert f"\n## {groupgrad.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_classifiers_name_every_python_that_may_install_it(project: dict[str, Any]) -> None:
    first, below = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", project["requires-python"]).groups()
    named = [text.rsplit(".", 1)[1] for text in project["classifiers"] if re.search(r"3\.\d+$", text)]
    assert named == [str(minor) for minor in range(int(first), int(below))]


def test_the_images_install_extras_that_exist_from_files_that_are_sent(project: dict[str, Any]) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = {name for line in re.findall(r"ARG EXTRAS=(\S+)", text) for name in line.split(",")}
    assert extras and extras <= set(project["optional-dependencies"])
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line.startswith("!")]
    copied = [name for line in re.findall(r"COPY (.+)", text) for name in line.split()[:-1]]
    assert set(copied) == set(sent)
    assert all((ROOT / name).exists() for name in copied)


def test_the_index_of_the_cpus_wheels_is_one_beside_the_package_index() -> None:
    """It has few releases of other packages, and `constraints.txt` pins them. An extra such as `vlm` needs it, too:
    torchvision of the package index is compiled for CUDA."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    cpu = text.split("FROM base AS cpu")[1].split("FROM ")[0]
    assert "ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu\n" in cpu.split("RUN ")[0]
    assert "--index-url" not in text and "PIP_INDEX_URL" not in text
