"""Recurrent layers by packages' kernels, which need a GPU.

For delta rules a stand-in has the kernels' arguments; Mamba-2's scan and convolutions run by transformers' functions
themselves, which lead to the packages where these are installed and have the same arguments in PyTorch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_rows import assert_same_gradients, gradients
from sample_checks import drained
from tiny_hybrids import CONFIGS, make_hybrid
from transformers import AutoModelForCausalLM

from groupgrad.engines.base import Request, SamplingOptions
from groupgrad.engines.native.engine import NativeEngine
from groupgrad.integrations.recurrent import recurrent_layers, recurrent_packages, recurrent_scans
from groupgrad.scoring import recurrence
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens

FUNCTIONS = {
    "qwen3_5": "torch_chunk_gated_delta_rule",
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "olmo_hybrid": "torch_chunk_gated_delta_rule",
}
MAMBA2 = ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "mamba2"]
OPTIONS = ForwardOptions(layout="shared")


def packaged(family: str, sizes: list[list[int]]) -> Any:
    """Computes rows that lie end to end by transformers' function in PyTorch, one after the other."""
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    original = inspect.unwrap(getattr(file, FUNCTIONS[family]))

    def function(
        *vectors: torch.Tensor, cu_seqlens: torch.Tensor, initial_state: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, finals, bounds = [], [], cu_seqlens.tolist()
        sizes.append([end - start for start, end in pairwise(bounds)])
        per_token = {name: named.pop(name) for name in ("g", "beta")}
        for row, (start, end) in enumerate(pairwise(bounds)):
            parts = [x[:, start:end] for x in vectors]
            of_row = {name: x[:, start:end] for name, x in per_token.items()}
            output, final = original(*parts, **of_row, initial_state=initial_state[row : row + 1], **named)
            outputs.append(output)
            finals.append(final)
        return torch.cat(outputs, dim=1), torch.cat(finals)

    return function


def use(patch: pytest.MonkeyPatch, family: str, sizes: list[list[int]], calls: list[str]) -> None:
    """Has layers computed by packages; notes the spans of delta rules, and the other functions that are called."""
    patch.setattr(recurrent_scans, "step_kernels", lambda *_: None)
    if family in MAMBA2:
        inner = recurrent_packages.by_package

        def recorded(function: Any, name: str, *args: Any, **options: Any) -> Any:
            calls.append(name)
            return inner(function, name, *args, **options)

        patch.setattr(recurrent_packages, "is_usable", lambda name, _: name in recurrent_packages._PACKAGES)
        patch.setattr(recurrent_packages, "by_package", recorded)
        return
    by_package = partial(recurrent_packages.by_package, packaged(family, sizes), FUNCTIONS[family])
    patch.setitem(recurrent_layers._COUNTERPARTS, FUNCTIONS[family], by_package)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", [*FUNCTIONS, *MAMBA2])
def test_log_probs_and_gradients_are_those_of_shared_prompts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, results, sizes, calls = make_hybrid(family), [], [], []
    prompts = [[3 + (5 * i + place) % 40 for place in range(length)] for i, length in enumerate((70, 1, 9))]
    lengths = (5, 90, 1, 33, 64, 2)
    rows = [[4 + (3 * i + place) % 40 for place in range(length)] for i, length in enumerate(lengths)]
    batch = build_batch(prompts, [0, 2, 0, 1, 2, 0], rows)
    weights = torch.linspace(-1, 2, batch.num_tokens)
    for is_packaged in (False, True):
        with monkeypatch.context() as patch:
            if is_packaged:
                use(patch, family, sizes, calls)
            logprobs = score_tokens(model, batch, OPTIONS).logprobs
            results.append({"logprobs": logprobs.detach(), **gradients(model, (weights * logprobs).sum())})
    own, by_package = results
    num_layers = sum(type(m).__name__.endswith(("DeltaNet", "Mixer", "MambaLayer")) for m in model.modules())
    if family in MAMBA2:
        assert sorted(calls) == ["causal_conv1d_fn"] * num_layers + ["mamba2_chunk_scan"] * num_layers
    else:
        assert len(sizes) == 2 * num_layers
        assert sorted(sizes[0]) == [1, 9, 70]  # each prompt once
        assert sorted(sizes[1]) == sorted(length - 1 for length in lengths if length > 1)  # a last token predicts none
    torch.testing.assert_close(by_package.pop("logprobs"), own.pop("logprobs"), rtol=0, atol=1e-5)
    assert_same_gradients(by_package, own, rtol=1e-5)


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", [*FUNCTIONS, *MAMBA2])
def test_prompts_and_replies_leave_their_states_to_decode_steps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, reply = make_hybrid(family), [3 + place % 40 for place in range(75)], [7, 8, 9]
    sizes: list[list[int]] = []
    calls: list[str] = []
    turns: list[list[int]] = []
    for is_packaged in (False, True):
        with monkeypatch.context() as patch:
            if is_packaged:
                use(patch, family, sizes, calls)
            with NativeEngine(model).session(SamplingOptions(max_new_tokens=8, top_k=1)) as session:
                context, last = prompt, None
                for turn in range(2):
                    ticket = session.submit(Request(context, turn, 8, keep=True, continues=last))
                    ended = drained(session)
                    turns.append(ended[ticket].ids)
                    context, last = [*context, *ended[ticket].ids, *reply], ticket
    assert turns[:2] == turns[2:]
    if family in MAMBA2:
        assert set(calls) == {"causal_conv1d_fn", "mamba2_chunk_scan"}
    else:
        assert [75] in sizes and all(75 + 8 not in lengths for lengths in sizes)


def test_half_precision_on_a_gpu_leads_to_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        is_cuda, dtype = True, torch.bfloat16

    name, tensor = FUNCTIONS["qwen3_5"], OnGPU()
    monkeypatch.setattr(recurrent_packages, "_is_installed", lambda package: package == "fla")
    assert recurrent_packages.is_usable(name, tensor)  # pyright: ignore
    assert not recurrent_packages.is_usable("mamba2_chunk_scan", tensor)  # pyright: ignore
    assert not recurrent_packages.is_usable("mamba_selective_scan", tensor)  # pyright: ignore
    tensor.dtype = torch.float32
    assert not recurrent_packages.is_usable(name, tensor)  # pyright: ignore
    assert not recurrent_packages.is_usable(name, torch.zeros(1, dtype=torch.bfloat16))


def test_a_package_that_cannot_be_imported_counts_as_missing(monkeypatch, tmp_path, caplog) -> None:
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not recurrent_packages._is_installed.__wrapped__("fla")
    assert "undefined symbol" in caplog.text
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text("")
    importlib.invalidate_caches()
    assert recurrent_packages._is_installed.__wrapped__("fla")
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]


def test_a_layer_calls_transformers_function_with_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that function refuses bounds."""
    monkeypatch.setattr(recurrent_packages, "is_usable", lambda name, _: name == FUNCTIONS["qwen3_5"])
    with pytest.raises(ValueError, match="packed sequences"):
        score_tokens(make_hybrid("qwen3_5"), build_batch([[3, 4]], [0], [[5, 6]]), OPTIONS)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_rectangles_hold_each_token_once_and_a_quarter_of_padding_at_most(lengths: list[int]) -> None:
    found = recurrence._rectangles(lengths, torch.device("cpu"))
    tokens = torch.cat([part.places.flatten() for part in found.parts])
    assert tokens[found.tokens].tolist() == list(range(sum(lengths)))
    rows = torch.cat([part.spans for part in found.parts])
    assert rows[found.order].tolist() == list(range(len(lengths)))
    for part in found.parts:
        assert part.is_token.sum(1).tolist() == [lengths[number] for number in part.spans]
        assert part.is_token.float().mean(1).min() >= 0.75


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_the_package_itself_gives_the_log_probs_of_pytorch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "mamba_ssm" if family in MAMBA2 else "fla"
    if not torch.cuda.is_available() or not recurrent_packages._is_installed(package):
        pytest.skip(f"no CUDA device with {package}")
    config = CONFIGS[family]()
    for name in ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"):
        if hasattr(config, name):
            setattr(config, name, 64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    rows = [[4 + (3 * i + place) % 40 for place in range(length)] for i, length in enumerate((5, 90, 1, 130))]
    batch = build_batch([[3 + place % 40 for place in range(70)], [3]], [0, 0, 1, 1], rows).to(torch.device("cuda"))
    results = []
    for is_packaged in (True, False):
        if not is_packaged:
            monkeypatch.setattr(recurrent_packages, "is_usable", lambda *_: False)
        model.zero_grad()
        logprobs = score_tokens(model, batch, OPTIONS).logprobs
        logprobs.sum().backward()
        gradients = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
        results.append((logprobs.detach(), gradients))
    assert float((results[0][0] - results[1][0]).abs().mean()) < 0.05
    assert float(torch.cosine_similarity(results[0][1], results[1][1], dim=0)) > 0.99
