"""RMS norms of training passes: rounded once, with the gradient of the formula, and the model as before afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from noted_calls import note_calls
from simulated_cuda import SimulatedTensor, simulated_cuda, to_cuda
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP, Lfm2RMSNorm
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeMLP, Lfm2MoeRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm, NemotronHRMSNormGated
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridRMSNormGated
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5MLP, Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from groupgrad.kernels import library, status
from groupgrad.scoring.fused_modules import compiled_parts, restore_modules

KINDS: list[Any] = [LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm]
HALF_UNIT = 2.0**-24
"""Maximum relative error of rounding a number to float32 once."""


def make(kind: Any, width: int = 48) -> Any:
    torch.manual_seed(0)
    norm = kind(width, eps=1e-5)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    return nn.Sequential(norm)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight.double() * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_float64(kind: Any):
    model = make(kind)
    x = (3 * torch.randn(2, 70, 4, 48)).requires_grad_()
    wide, weight = x.detach().double().requires_grad_(), model[0].weight.detach().double().requires_grad_()
    grad_output = torch.randn_like(x)
    with compiled_parts(model):
        actual = model(x)
    expected = exact(wide, weight)
    assert ((actual.double() - expected).abs() <= 1.001 * HALF_UNIT * expected.abs()).all(), "rounded once"
    grads = torch.autograd.grad(actual, [x, model[0].weight], grad_output)
    wanted = torch.autograd.grad(expected, [wide, weight], grad_output.double())
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad.double(), want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))


GEMMA_PARTS: list[Any] = [GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, GemmaMLP, Gemma2MLP, Gemma3MLP]
HYBRID_PARTS: list[Any] = [
    *(Qwen3_5RMSNorm, Qwen3_5RMSNormGated, Qwen3_5MLP, OlmoHybridRMSNormGated),
    *(Lfm2RMSNorm, Lfm2MLP, Lfm2MoeRMSNorm, Lfm2MoeMLP),
    *(NemotronHRMSNorm, NemotronHRMSNormGated, BambaRMSNormGated),
]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kind", GEMMA_PARTS + HYBRID_PARTS)
def test_parts_of_layers_have_the_numbers_and_gradients_of_the_modules(kind: Any, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    if kind in (NemotronHRMSNormGated, BambaRMSNormGated):
        config = None
    elif kind.__name__.startswith("Lfm2"):
        config: Any = transformers.Lfm2Config(hidden_size=48, intermediate_size=40)
    elif kind in GEMMA_PARTS:
        config = transformers.Gemma2Config(hidden_size=48, intermediate_size=40)
        config.hidden_act = config.hidden_activation  # the first Gemma's name for it
    else:
        config = transformers.Qwen3_5TextConfig(hidden_size=48, intermediate_size=40)
    if kind.__name__.endswith("MLP"):
        module = kind(config) if kind is Lfm2MLP or kind in GEMMA_PARTS else kind(config, 40)
    elif config is None:
        module = kind(48, group_size=16 if kind is NemotronHRMSNormGated else 48, eps=1e-5)
    else:
        module = kind(48, eps=1e-5)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 2.0)
    inputs = [(3 * torch.randn(2, 70, 48)).requires_grad_() for _ in range(2 if "Gated" in kind.__name__ else 1)]
    leaves = [*inputs, *module.parameters()]
    expected = module(*inputs)
    grad_output = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, grad_output)
    with compiled_parts(module), monkeypatch.context() as patch:
        patch.setattr(kind, "forward", None)
        actual = module(*inputs)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * scale)
    for grad, want in zip(torch.autograd.grad(actual, leaves, grad_output), wanted):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.usefixtures("compiler")
def test_inputs_of_a_gated_norm_are_taken_by_their_names():
    norm, x, gate = Qwen3_5RMSNormGated(48), torch.randn(3, 48), torch.randn(3, 48)
    with compiled_parts(norm):
        expected = norm(x, gate)
        for named in ({"gate": gate, "hidden_states": x}, {"hidden_states": x, "gate": gate}):
            torch.testing.assert_close(norm(**named), expected)
        torch.testing.assert_close(norm(x, gate[:1]), norm(x, gate[:1].expand(3, 48)))


def test_only_what_needs_a_gradient_gets_one():
    model = make(Qwen3RMSNorm)
    x = torch.randn(5, 48)
    with compiled_parts(model):
        model(x).sum().backward()
    of_weight, model[0].weight.grad = model[0].weight.grad, None
    model[0].weight.requires_grad_(False)
    x.requires_grad_()
    with compiled_parts(model):
        model(x).sum().backward()
    assert of_weight is not None and of_weight.abs().sum() > 0
    assert x.grad is not None and x.grad.abs().sum() > 0 and model[0].weight.grad is None


def test_rotary_embeddings_keep_their_bits_and_gradients():
    if library() is None:
        pytest.skip(status())
    from transformers.models.qwen3 import modeling_qwen3

    original = modeling_qwen3.apply_rotary_pos_emb
    config = transformers.Qwen3Config(hidden_size=8, num_hidden_layers=1, vocab_size=9, intermediate_size=8)
    model = transformers.Qwen3ForCausalLM(config)
    torch.manual_seed(0)
    for width in (6, 16, 40):
        inputs = [torch.randn(1, 50, heads, width).transpose(1, 2).requires_grad_() for heads in (4, 2)]
        angles = torch.randn(1, 50, width)  # the two halves differ, as in no model
        tables = angles.cos(), angles.sin()
        plain = original(*inputs, *tables)
        with compiled_parts(model):
            assert modeling_qwen3.apply_rotary_pos_emb is not original
            with compiled_parts(model):
                found = modeling_qwen3.apply_rotary_pos_emb(*inputs, *tables)
            # Other shapes, as of padded rows, and types are left to the model's own function.
            wide = [x.double() for x in (*inputs, *tables)]
            assert modeling_qwen3.apply_rotary_pos_emb(*wide)[0].dtype == torch.float64
        assert modeling_qwen3.apply_rotary_pos_emb is original
        assert "Rotated" in str(found[0].grad_fn) and all(map(torch.equal, found, plain))
        grads = [torch.randn_like(x) for x in inputs]
        wanted = torch.autograd.grad(plain, inputs, grads)
        for gradient, want in zip(torch.autograd.grad(found, inputs, grads), wanted):
            torch.testing.assert_close(gradient, want, rtol=1e-6, atol=1e-6)


def test_gated_layers_take_long_rows_in_stretches(monkeypatch: pytest.MonkeyPatch):
    if library() is None:
        pytest.skip(status())
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2)
    model = nn.Sequential(LlamaMLP(config))
    x, sizes, found = torch.randn(1, 70, 16), [], []
    model[0].up_proj.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    for most in (100, 32):
        monkeypatch.setattr("groupgrad.memory.oom_retry.tokens_per_pass", lambda width, most=most: most)
        monkeypatch.setattr("groupgrad.scoring.fused_modules.STRETCH_TOKENS", most)
        with compiled_parts(model), torch.no_grad():
            found.append(model(x))
    assert sizes == [70, 32, 32, 6]
    assert torch.equal(*found), "a token's bits do not depend on the tokens beside it"


def test_modules_are_as_before_afterwards_also_on_errors():
    model, x = make(Qwen2RMSNorm), torch.randn(3, 48)
    before = model(x)
    with pytest.raises(ZeroDivisionError), compiled_parts(model):
        assert "forward" in model[0].__dict__
        raise ZeroDivisionError
    assert "forward" not in model[0].__dict__ and torch.equal(model(x), before)


def test_layers_that_are_computed_again_are_computed_alike():
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48)
    model.gradient_checkpointing = True
    with compiled_parts(model), torch.no_grad():
        expected = model(x)
    with compiled_parts(model):
        pass
    assert torch.equal(model(x), expected)
    with compiled_parts(model):
        pass
    restore_modules(model)
    assert "forward" not in model[0].__dict__


def test_a_pass_in_between_leaves_norms_that_are_computed_again_later():
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48)
    model.gradient_checkpointing = True
    with compiled_parts(model):
        kept = model[0].__dict__["forward"]
    with torch.no_grad(), compiled_parts(model):
        model(x)
    assert model[0].__dict__["forward"] is kept


@pytest.mark.parametrize("is_flagged", [False, True])
def test_checkpointing_by_other_code_computes_again_what_it_saved(is_flagged: bool):
    model, x = make(Qwen3RMSNorm), torch.randn(3, 48, requires_grad=True)
    model.gradient_checkpointing = is_flagged
    with compiled_parts(model):
        actual = checkpoint(model, x, use_reentrant=False)
    (grad,) = torch.autograd.grad(actual.square().sum(), x)
    restore_modules(model)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def compiled(model: Any) -> None:
    model.compile()


def half(model: Any) -> None:
    model.bfloat16()


def replaced(model: Any) -> None:
    model[0].forward = lambda hidden: hidden


def other_formula(model: Any) -> None:
    model[0] = Gemma4RMSNorm(48)


@pytest.mark.parametrize("change", [compiled, half, replaced, other_formula])
def test_unsupported_modules_are_left_alone(change: Any):
    model = make(Qwen3RMSNorm)
    change(model)
    before = model[0].__dict__.get("forward")
    with compiled_parts(model):
        assert model[0].__dict__.get("forward") is before


def test_mixed_precision_is_left_to_the_module_itself():
    model, x = make(LlamaRMSNorm), torch.randn(4, 48)
    expected = model(x)
    with compiled_parts(model), torch.autocast("cpu"):
        assert torch.equal(model(x), expected)
    with compiled_parts(model):
        assert not torch.equal(model(x), expected)


def test_other_numbers_than_float32_go_through_the_module_itself():
    model, x = make(LlamaRMSNorm), torch.randn(4, 48, dtype=torch.float64)
    expected = model(x)
    with compiled_parts(model):
        assert torch.equal(model(x), expected)


@pytest.fixture
def compiler() -> None:
    if library() is None:
        pytest.skip(status())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("width", [16, 128])
def test_inputs_of_another_width_are_an_error_as_ever(width: int):
    model = nn.Sequential(nn.Linear(64, 8))
    with compiled_parts(model), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(2, width))


@pytest.mark.usefixtures("compiler")
def test_weights_that_are_others_at_the_time_go_through_the_module_itself():
    model, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64)
    wide = {name: p.detach().double() for name, p in model.named_parameters()}
    with compiled_parts(model):
        actual = torch.func.functional_call(model, wide, (x.double(),))
    torch.testing.assert_close(actual, model.double()(x.double()))


@pytest.mark.usefixtures("compiler")
def test_a_model_can_be_copied_in_a_pass():
    model, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64)
    with compiled_parts(model):
        copied = copy.deepcopy(model)
        nn.init.zeros_(copied[0].weight)
        assert torch.equal(copied(x), copied[0].bias.expand(2, 8)) and not torch.equal(model(x), copied(x))


@pytest.mark.usefixtures("compiler")
def test_a_hooked_activation_is_called():
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    model, seen = nn.Sequential(LlamaMLP(config)), []
    with compiled_parts(model):
        model(torch.randn(2, 16))
        assert not seen
        model[0].act_fn.register_forward_hook(lambda *_: seen.append(True))
        model(torch.randn(2, 16))
    assert seen == [True]


@pytest.mark.usefixtures("compiler")
def test_a_patch_of_all_linear_layers_is_respected(monkeypatch: pytest.MonkeyPatch):
    model, x = nn.Sequential(nn.Linear(64, 8)), torch.randn(2, 64)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, input: torch.zeros(2, 8))
    with compiled_parts(model):
        assert torch.equal(model(x), torch.zeros(2, 8))


@pytest.fixture
def gpu() -> Iterator[None]:
    with simulated_cuda():
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_norms_are_fused_and_rounded_once(kind: Any, dtype: torch.dtype, gpu, monkeypatch):
    calls = note_calls(monkeypatch, F, "rms_norm")
    model, x = make(kind).to(dtype), (3 * torch.randn(70, 4, 48)).to(dtype)
    wide, weight = x.double().requires_grad_(), model[0].weight.detach().double().requires_grad_()
    expected, grad_output = exact(wide, weight), torch.randn_like(x)
    wanted = torch.autograd.grad(expected, [wide, weight], grad_output.double())
    model, x = to_cuda(model), SimulatedTensor(x).requires_grad_()
    with compiled_parts(model):
        actual = model(x)
    assert calls
    half_unit = torch.finfo(dtype).eps / 2
    # The CPU's stand-in for the kernel multiplies in float32, a few roundings of it on top.
    assert ((actual.inner.double() - expected).abs() <= half_unit * expected.abs() + 4e-7 * expected.abs()).all()
    for grad, want in zip(torch.autograd.grad(actual, [x, model[0].weight], SimulatedTensor(grad_output)), wanted):
        close = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(grad.inner.double(), want, rtol=close, atol=close * float(want.abs().max()))
    assert "forward" not in model[0].__dict__


def test_on_a_gpu_a_norm_of_two_types_and_in_mixed_precision_keeps_its_type(gpu, monkeypatch):
    """Weights and mixed precision as they are by default: queries and keys are bfloat16, weights are float32."""
    calls: set[torch.dtype] = set()
    fused = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, *a, **k: (calls.add(x.dtype), fused(x, *a, **k))[1])
    narrow = torch.randn(5, 48).bfloat16()
    for weights, inputs, result in (
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
    ):
        model = to_cuda(make(Qwen3RMSNorm).to(weights))
        given = SimulatedTensor(narrow.to(inputs))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            plain = model(given)
            with compiled_parts(model):
                actual = model(given)
        assert calls.pop() == weights and not calls
        assert actual.dtype == plain.dtype == result
        torch.testing.assert_close(actual.inner, plain.inner, rtol=0.01, atol=1e-6)


def test_on_a_gpu_a_norm_with_narrower_weights_is_the_modules_own(gpu, monkeypatch):
    monkeypatch.setattr(F, "rms_norm", None)
    model = to_cuda(make(Qwen3RMSNorm).bfloat16())
    with compiled_parts(model):
        assert model(SimulatedTensor(torch.randn(5, 48))).dtype == torch.float32
