"""A GPU that is not there: tensors that say they lie on one are computed on the CPU, by a GPU's rules.

Inside `pretended_gpu()` devices named "cuda" exist for tensors and modules. An operation over tensors of both devices
is an error as it is with a real one, and so is a look at memory from outside (`numpy`, `data_ptr`). `Graph` records
operations as CUDA graphs do: repeated are the very operations on the very tensors, with the numbers that Python gave
them at the time, and nothing that has to wait for the GPU may be recorded.

What speed, precision, streams and kernels of a real GPU do is not seen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers.utils import import_utils

from groupgrad.modeling import fused_modules as parts

GPU = torch.device("cuda", 0)

_MOVES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default})
_INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        torch.ops.aten._index_put_impl_.default,
    }
)
_WAITS = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})


class Pretended(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    inner: torch.Tensor
    device = property(lambda self: GPU)  # pyright: ignore
    is_cuda = property(lambda self: True)  # pyright: ignore
    is_cpu = property(lambda self: False)  # pyright: ignore
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Pretended:
        assert type(inner) is torch.Tensor, type(inner)
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="cpu"
        )
        made.inner = inner
        return made

    def __init__(self, inner: torch.Tensor):
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"Pretended({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Pretended:
        return Pretended(inner["inner"])

    def get_device(self) -> int:  # pyright: ignore
        return 0

    def data_ptr(self) -> int:
        raise RuntimeError("memory of a GPU is no memory of this process")

    def __reduce_ex__(self, protocol: Any) -> Any:  # pyright: ignore
        # What is saved is read on the CPU.
        return self.inner.__reduce_ex__(protocol)

    def storage(self) -> Any:
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def numpy(self, **_: Any) -> Any:  # pyright: ignore
        raise TypeError("can't convert a tensor of a GPU to numpy; copy it to host memory first")

    def tolist(self) -> Any:
        _wait("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_mixtures(func, args, kwargs)
        if func in _WAITS or (func in _INDEXING and _has_bool_index(args)):
            _wait(str(func))
        plain_args, plain_kwargs = tree_map_only(Pretended, lambda x: x.inner, (args, kwargs))
        if Graph.recording is not None and func in _MOVES and any(type(x) is torch.Tensor and x.dim() for x in args):
            _wait(f"{func} between devices")
        run = _ON_GPUS_ALONE.get(func, func)
        found = run(*plain_args, **plain_kwargs)
        if Graph.recording is not None:
            Graph.recording.calls.append((run, plain_args, plain_kwargs, found))
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(torch.Tensor, Pretended, found))


def _histogram(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ops.aten.histc.default(tensor.float(), *args, **kwargs).to(tensor.dtype)


def _wide_products(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert dtype == torch.float32 and first.dtype in (torch.float16, torch.bfloat16)
    return torch.bmm(first.to(dtype), second.to(dtype))


_ON_GPUS_ALONE = {
    torch.ops.aten.histc.default: _histogram,  # of whole numbers
    torch.ops.aten.bmm.dtype: _wide_products,
}


def _wait(what: str) -> None:
    if Graph.recording is not None:
        Graph.recording.is_broken = True
        raise RuntimeError(f"{what}: operation not permitted when stream is capturing")


def _refuse_mixtures(func: Any, args: Any, kwargs: Any) -> None:
    if func in _MOVES:
        return
    if func in _INDEXING:
        # Indices may lie on the CPU.
        args = (args[0], *args[2:])
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    strangers = [x for x in tensors if not isinstance(x, Pretended) and x.dim()]
    if strangers and len(strangers) < len(tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device; {strangers[0]!r} is on the CPU")


def _has_bool_index(args: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        _wait("a copy to the GPU")
        return Pretended(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return gradient.inner if isinstance(gradient, Pretended) else gradient


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Pretended) -> torch.Tensor:  # pyright: ignore
        _wait("a copy from the GPU")
        return tensor.inner.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return Pretended(gradient.detach())


class _Rules(TorchFunctionMode):
    """Makes and moves tensors where callers ask for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            return _move(func, args, kwargs)
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], Pretended):
            return _copied(*args)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        on_gpu = torch.device(device).type == "cuda"
        kwargs["device"] = "cpu"
        if args and isinstance(args[0], Pretended):
            # `new_zeros`, `zeros_like` and their like.
            found = func(*args, **kwargs)
            return found if on_gpu else found.inner
        found = func(*args, **kwargs)
        if not on_gpu or isinstance(found, Pretended):
            return found
        if func is torch.tensor or func is torch.as_tensor:
            _wait("a copy to the GPU")
        return Pretended(found.detach()).requires_grad_(found.requires_grad)


def _move(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, *rest = args
    if func is torch.Tensor.to:
        targets = [x for x in [*rest, *kwargs.values()] if isinstance(x, (torch.device, str, int, torch.Tensor))]
        targets = [x for x in targets if not isinstance(x, bool)]
        dtypes = [x for x in [*rest, *kwargs.values()] if isinstance(x, torch.dtype)]
        dtypes += [x.dtype for x in targets if isinstance(x, torch.Tensor)]
        found = tensor
        if dtypes and dtypes[0] != tensor.dtype:
            found = _cast(tensor, dtypes[0])
        if not targets:
            return found.clone() if found is tensor and kwargs.get("copy") else found
        target = targets[0].device if isinstance(targets[0], torch.Tensor) else torch.device(targets[0])
    else:
        found, target = tensor, GPU if func is torch.Tensor.cuda else torch.device("cpu")
    if target.type == "cuda" and not isinstance(found, Pretended):
        return _Upload.apply(found)
    if target.type == "cpu" and isinstance(found, Pretended):
        return _Download.apply(found)
    return found.clone() if found is tensor and kwargs.get("copy") else found


def _copied(tensor: Pretended, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        new = Pretended(tensor.inner.clone())
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return memo[id(tensor)]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.to(dtype)


class Graph:
    """What `torch.cuda.CUDAGraph` is: operations that are repeated as they were."""

    recording: Graph | None = None
    num_recorded = num_replayed = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.is_broken = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert Graph.recording is None
        assert Stream.current is not Stream.default, "the default stream cannot be captured"
        Graph.recording = self

    def capture_end(self) -> None:
        if Graph.recording is not self:
            raise RuntimeError("no capture is under way")
        Graph.recording = None
        if self.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        Graph.num_recorded += 1

    def replay(self) -> None:
        Graph.num_replayed += 1
        for func, args, kwargs, found in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0]):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    """Work on all streams is done at once and in order."""

    default: Stream
    current: Stream

    def __init__(self, device: Any = None):
        self.device = device

    def wait_stream(self, stream: Stream) -> None:
        assert Graph.recording is None


Stream.default = Stream.current = Stream(GPU)


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def to_gpu(module: nn.Module) -> nn.Module:
    """The module with all its tensors on the GPU, in place; what was tied stays tied."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(Pretended(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]  # pyright: ignore
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Pretended(buffer.detach())
    return module


def _autocast(kind: str) -> str:
    return "cpu" if kind == "cuda" else kind


@contextmanager
def pretended_gpu(free_bytes: int = 1 << 30) -> Iterator[None]:
    """Inside, there is a GPU with so much free memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _pretend(monkeypatch, free_bytes)
        _forget_answers()
        try:
            with _Rules():
                yield
        finally:
            Graph.recording, Stream.current = None, Stream.default
            _forget_answers()


def _forget_answers() -> None:
    """What transformers has found out about devices it does not ask again."""
    for name in dir(import_utils):
        forget = getattr(getattr(import_utils, name), "cache_clear", None)
        if forget is not None:
            forget()


def _pretend(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    answers: dict[str, Any] = {
        "mem_get_info": (free_bytes, free_bytes),
        "memory_reserved": 0,
        "memory_allocated": 0,
        "get_device_capability": (9, 0),
        "current_device": 0,
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "set_device": None,
        "synchronize": None,
        "graph_pool_handle": (0, 1),
        "empty_cache": None,
        "manual_seed_all": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    others: dict[str, Any] = {
        "is_current_stream_capturing": lambda: Graph.recording is not None,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": _on_stream,
        "current_stream": lambda device=None: Stream.current,
        "device": lambda device: nullcontext(),
    }
    for name, other in others.items():
        monkeypatch.setattr(torch.cuda, name, other)
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", lambda *_: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state, *_: None)
    enter = torch.autocast.__init__

    def enter_on_cpu(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(context, _autocast(device_type), *args, **kwargs)

    monkeypatch.setattr(torch.autocast, "__init__", enter_on_cpu)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        ask = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda kind="cuda", ask=ask: ask(_autocast(kind)))
    # Else these would be taken for tensors of somebody's own.
    monkeypatch.setattr(parts, "_OWN", (*parts._OWN, Pretended))
    run_backward = torch.autograd._engine_run_backward

    def run_by_the_rules(*args: Any, **kwargs: Any) -> Any:
        # They are suspended for whoever asked for the backward pass.
        with _Rules():
            return run_backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_by_the_rules)


def stirred(adapted: nn.Module) -> nn.Module:
    """The model under adapters of LoRA that are not at their starting point."""
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted
