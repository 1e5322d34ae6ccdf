"""Flex attention: when it is used, what takes over when it fails, and, on a GPU, its numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_batches import random_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

from groupgrad.scoring import block_attention
from groupgrad.scoring import flex_attention as flex
from groupgrad.scoring.attention_layout import AttentionCall
from groupgrad.scoring.flex_attention import attend_flex, is_usable
from groupgrad.scoring.forward import ForwardOptions, build_batch, score_tokens
from groupgrad.scoring.layout import flat_layout

CPU = torch.device("cpu")
TRIED = flex._TRIED_TOKENS


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Isolates the trial results of each test."""
    monkeypatch.setattr(flex, "_failed", set())
    monkeypatch.setattr(flex, "_tried", set())


def make_layout(num_tokens: int = 17) -> Any:
    """Two prompts with rows behind them: `num_tokens` of at least 17."""
    flat = flat_layout(random_rows([3, 5], [(0, 6), (1, 2), (0, num_tokens - 13)]))
    assert len(flat.ids) == num_tokens
    return flat


def heads(num_tokens: int = 17, query_heads: int = 4, key_heads: int = 2, width: int = 16, **options: Any) -> Any:
    """Queries, keys and values as a model's layers give them: in memory a token's heads lie side by side."""
    stream = torch.Generator(options.get("device", "cpu")).manual_seed(0)
    counts = (query_heads, key_heads, key_heads)
    made = [torch.randn(num_tokens, count, width, generator=stream, **options) for count in counts]
    return [x.transpose(0, 1) for x in made]


class Scripted:
    """Replaces the compiled functions by a masked softmax that fails as its script says.

    `calls` keeps the tokens of each call and whether it had a gradient, `backwards` the tokens of each backward pass.
    """

    def __init__(self, forward: BaseException | None = None, backward: BaseException | None = None):
        self.forward, self.backward = forward, backward
        self.calls: list[tuple[int, bool]] = []
        self.backwards: list[int] = []

    def kernels(self) -> flex._Kernels:
        return flex._Kernels(self.attend, self.make_mask)

    @staticmethod
    def make_mask(rule: Any, size: int, device: torch.device) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        places = torch.arange(size, device=device)
        return rule(0, 0, places[:, None], places)

    def attend(self, query: Any, key: Any, value: Any, mask: Any, scale: float, score_mod: Any) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cpu")
        if self.forward is not None:
            raise self.forward
        self.calls.append((query.shape[2], torch.is_grad_enabled() and query.requires_grad))
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = scale * query @ key.transpose(2, 3)
        if score_mod is not None:
            scores = score_mod(scores, 0, 0, 0, 0)
        output = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value
        if output.requires_grad:
            output.register_hook(self.go_back)
        return output

    def go_back(self, gradient: torch.Tensor) -> None:
        self.backwards.append(gradient.shape[2])
        if self.backward is not None:
            raise self.backward


@pytest.fixture
def scripted(monkeypatch) -> Callable[..., Scripted]:
    """Makes `Scripted` functions those of every device, and flex attention usable for every call."""

    def make(**script: Any) -> Scripted:
        made = Scripted(**script)
        monkeypatch.setattr(flex, "_kernels", made.kernels)
        monkeypatch.setattr(block_attention, "is_usable", lambda *_: not flex._failed)
        return made

    return make


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_it_is_the_same_function(window, softcap, monkeypatch):
    """The functions that a GPU compiles, run uncompiled; their gradients exist on GPUs alone."""
    functions = flex._functions(lambda: None)
    monkeypatch.setattr(flex, "_kernels", lambda: functions)
    monkeypatch.setattr(flex, "_try_once", lambda *_: None)
    call = AttentionCall(layer=0, scale=0.3, softcap=softcap, window=window)
    sequence = [5, 6, 7, 8, 9]
    prefixes = build_batch([sequence, sequence[:2]], [0, 1, 1], [[1] * 6, [2] * 4, [3] * 5])
    for flat in (make_layout(), flat_layout(prefixes, shared_prefixes=True)):
        assert len(flat.ids) == 17
        actual = attend_flex(*heads(), flat.attention.places(CPU), call)
        assert actual is not None
        torch.testing.assert_close(actual, flat.attention.attend(*heads(), call), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------ when it is used


def test_what_is_known_to_be_refused_is_not_tried():
    kinds: list[Any] = []

    def usable(num_tokens: int = 300, width: int = 64, value_width: int = 64, **options: Any) -> bool:
        sinks = options.pop("sinks", None)
        options = {"device": "cuda", "dtype": torch.bfloat16, **options}
        call = AttentionCall(0, 1.0, sinks=sinks)
        with FakeTensorMode():
            shapes = ((4, num_tokens, width), (2, num_tokens, width), (2, num_tokens, value_width))
            inputs = [torch.empty(*shape, **options) for shape in shapes]
            kinds.append(flex._kind_of(*inputs, call))
            return is_usable(*inputs, call)

    assert usable()
    assert usable(129)
    assert not usable(128)
    assert usable(width=80, value_width=96)
    assert usable(width=16, value_width=16)
    assert not usable(width=8)
    assert not usable(value_width=15)
    assert usable(dtype=torch.float16)
    assert not usable(dtype=torch.float32)
    assert not usable(device="cpu")
    assert not usable(sinks=torch.zeros(4))
    assert usable()
    flex._failed.add(kinds[-1])
    assert not usable()
    assert usable(width=80)  # other heads of the same model


# ------------------------------------------------------------------------------------ the call before all others


def test_a_small_call_goes_first_forward_and_backward(scripted):
    made, places, call = scripted(), make_layout().attention.places(CPU), AttentionCall(0, 0.3)
    with torch.no_grad():
        for _ in range(2):
            assert attend_flex(*heads(), places, call) is not None
    assert made.calls == [(TRIED, True), (17, False), (17, False)]
    assert made.backwards == [TRIED]


def test_each_kind_of_call_is_tried_once(scripted):
    made, places = scripted(), make_layout().attention.places(CPU)
    plain, windowed = AttentionCall(0, 0.3), AttentionCall(1, 0.3, window=4)
    for call in (plain, windowed, plain, AttentionCall(2, 0.3, window=9), AttentionCall(3, 0.3, softcap=3.0)):
        attend_flex(*heads(), places, call)
    assert len(made.backwards) == 3
    for inputs in (heads(width=32), heads(key_heads=1), heads(dtype=torch.float64)):
        attend_flex(*inputs, places, plain)
    assert len(made.backwards) == 6


def test_an_error_of_the_backward_pass_is_found_before_training(scripted, caplog):
    made = scripted(backward=RuntimeError("no kernel image"))
    flat, call = make_layout(), AttentionCall(0, 0.3)
    inputs = [x.requires_grad_() for x in heads()]
    for _ in range(2):
        actual = flat.attention.attend(*inputs, call)
        gradients = torch.autograd.grad(actual.square().sum(), inputs)
    assert made.calls == [(TRIED, True)]
    assert caplog.text.count("flex attention cannot run here (RuntimeError: no kernel image)") == 1
    expected = make_layout().attention.attend(*inputs, call)
    assert torch.equal(actual, expected)
    for gradient, want in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs)):
        assert torch.equal(gradient, want)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_an_error(scripted, monkeypatch, caplog, number):
    made = scripted()
    monkeypatch.setattr(made, "attend", lambda query, key, value, *_: number * (query + key.sum() + value.sum()))
    assert attend_flex(*heads(), make_layout().attention.places(CPU), AttentionCall(0, 0.3)) is None
    assert "equal tokens that are not finite" in caplog.text


SHORTAGES = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", SHORTAGES)
def test_a_shortage_of_memory_is_the_callers(scripted, where, error):
    scripted(**{where: error})
    with pytest.raises(type(error), match="out of memory"):
        attend_flex(*heads(), make_layout().attention.places(CPU), AttentionCall(0, 0.3))
    assert not flex._failed
    assert not flex._tried


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_again_do_not_see_the_trial(scripted, use_reentrant):
    """Checkpointing requires a layer to save as many tensors the second time."""
    made, flat, call = scripted(), make_layout(), AttentionCall(0, 0.3)
    inputs = [x.requires_grad_() for x in heads()]

    def layer(*x: torch.Tensor) -> torch.Tensor:
        return flat.attention.attend(x[0], x[1], x[2], call).square()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = checkpoint(layer, *inputs, use_reentrant=use_reentrant)
    actual.sum().backward()
    assert made.backwards == [TRIED, 17]
    for x, want in zip(inputs, torch.autograd.grad(layer(*inputs).sum(), inputs)):
        torch.testing.assert_close(x.grad, want)


def test_a_checkpointed_layer_may_end_with_attention(scripted):
    """Computing it again then stops inside of the attention, by an exception that is no failure."""
    made, layout = scripted(), make_layout()
    inputs = [x.requires_grad_() for x in heads()]
    output = checkpoint(lambda *x: layout.attention.attend(*x, AttentionCall(0, 0.3)), *inputs, use_reentrant=False)
    output.sum().backward()
    assert made.backwards == [TRIED, 17]
    assert not flex._failed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_is_tried_with_gradients_in_any_mode(scripted, mode):
    made = scripted()
    with mode():
        make_layout().attention.attend(*heads(), AttentionCall(0, 0.3))
    assert made.backwards == [TRIED]
    assert not flex._failed


# ------------------------------------------------------------------------------------ what is compiled


class Recording:
    """A compiler backend that runs graphs unchanged, and records them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, _examples: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    def attentions(self) -> list[Any]:
        """The nodes of flex attention itself."""
        return [node for graph in self.graphs for node in graph.graph.nodes if "flex_attention" in str(node.target)]


@pytest.fixture
def recording(monkeypatch):
    """The functions as they are compiled for a GPU, by a recording compiler."""
    torch._dynamo.reset()
    made = Recording()
    kernels = flex._kernels.__wrapped__(made)
    monkeypatch.setattr(flex, "_kernels", lambda: kernels)
    yield made
    torch._dynamo.reset()


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1)
def test_few_variants_do_for_all_lengths_and_windows(recording):
    """One with a window and one without, and twice as many with gradients; never the kernel for short inputs.

    That torch allows one by itself does not matter.
    """
    seen = []
    for with_gradient, window, num_tokens in itertools.product((False, True), (None, 3, 9), (300, 141)):
        places, call = make_layout(num_tokens).attention.places(CPU), AttentionCall(0, 0.3, window=window)
        with torch.set_grad_enabled(with_gradient):
            actual = flex._attend(*heads(num_tokens), places, call)
        assert actual.shape == (num_tokens, 4, 16)
        seen.append(len(recording.graphs))
    assert seen == [2, 2, 4, 4, 4, 4, 5, 5, 6, 6, 6, 6]
    assert len(recording.attentions()) == 4
    assert all(node.args[6]["FORCE_USE_FLEX_ATTENTION"] is True for node in recording.attentions())


@pytest.mark.slow
def test_a_soft_cap_is_part_of_the_kernel(recording):
    """A variable soft cap would be a number on the CPU, for which torch compiles no kernel."""
    places, call = make_layout(141).attention.places(CPU), AttentionCall(0, 0.3, softcap=30.0)
    with torch.no_grad():
        flex._attend(*heads(141), places, call)
    inputs = [node.meta["example_value"] for node in recording.graphs[-1].graph.nodes if node.op == "placeholder"]
    floats = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert [x.dim() for x in floats] == [4, 4, 4]


@pytest.mark.slow
def test_the_trial_compiles_what_training_uses(recording, monkeypatch):
    """The first step compiles nothing. Gradients, which torch supports on GPUs alone, run uncompiled."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    inputs, places = [x.requires_grad_() for x in heads(300)], make_layout(300).attention.places(CPU)
    flex._try_once(*inputs, AttentionCall(0, 0.3))
    assert len(recording.graphs) == 2
    expected = make_layout(300).attention.attend(*inputs, AttentionCall(0, 0.3))
    actual = attend_flex(*inputs, places, AttentionCall(0, 0.3))
    assert actual is not None
    assert len(recording.graphs) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for x, want in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in (actual, expected))):
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["stance", pytest.param("limit", marks=pytest.mark.slow)])
def test_where_torch_does_not_compile_matrix_products_do(recording, monkeypatch, caplog, how):
    """Otherwise torch would run the function uncompiled, with all pairs of tokens in memory, and without a warning."""
    monkeypatch.setattr(flex, "_try_once", lambda *_: None)
    flat, call = make_layout(141), AttentionCall(0, 0.3)
    with contextlib.ExitStack() as stack, torch.no_grad():
        if how == "stance":
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        else:
            monkeypatch.setattr(flex, "_VARIANTS", 1)
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=1))
            assert attend_flex(*heads(141), flat.attention.places(CPU), call) is not None
        assert attend_flex(*heads(141, query_heads=2), flat.attention.places(CPU), call) is None
    assert "flex attention cannot run here" in caplog.text


# ------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 300])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (20, 3.0)])
def test_the_compiled_kernel_gives_the_numbers_of_matrix_products(num_tokens, window, softcap):
    """Four query heads to a key, in bfloat16 against float32; shorter and longer than a tile."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    flat, call = make_layout(num_tokens), AttentionCall(0, 0.125, softcap=softcap, window=window)
    exact = heads(num_tokens, 8, 2, 64, device="cuda")
    half = [x.bfloat16().requires_grad_() for x in exact]
    exact = [x.detach().float().requires_grad_() for x in half]
    expected = flat.attention.attend(*exact, call)
    actual = attend_flex(*half, flat.attention.places(torch.device("cuda")), call)
    assert actual is not None
    weights = torch.randn(expected.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    gradients = torch.autograd.grad((actual * weights).sum(), half)
    for x, want in zip((actual.detach(), *gradients), (expected.detach(), *wanted)):
        assert float((x - want).norm() / want.norm()) < 0.03


WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
DENSE = ForwardOptions(layout="dense", tiled_head=False, entropy_gradient=True)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [{}, WINDOW], ids=["all", "window"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_on_a_gpu_gives_the_dense_numbers_in_bfloat16(make_model, window, checkpointing):
    """Four query heads to a key; the layers behind the first have the window."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = make_model(**sizes, **window).cuda().bfloat16().train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = random_rows([40, 130], [(0, 60), (1, 20), (0, 4), (1, 200)]).to("cuda")
    gradients = []
    for way in (DENSE, ForwardOptions()):
        model.zero_grad()
        scores = score_tokens(model, batch, way)
        scores.logprobs.sum().backward()
        gradients.append((scores.logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]).float()))
    assert not flex._failed
    assert {kind.has_window for kind in flex._tried} == ({False, True} if window else {False})
    assert float((gradients[1][0] - gradients[0][0]).abs().mean()) < 0.02
    assert float((gradients[1][1] - gradients[0][1]).norm() / gradients[0][1].norm()) < 0.05
