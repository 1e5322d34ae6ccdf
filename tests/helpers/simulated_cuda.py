"""Simulates a CUDA device for tests: tensors report device "cuda" and are computed on the CPU under a GPU's rules.

Inside `simulated_cuda()`, tensors and modules can be created on and moved to "cuda". An operation that mixes tensors of
both devices raises, as on a real GPU, and so does direct access to memory (`numpy`, `data_ptr`). `Graph` simulates CUDA
graphs: a replay repeats the recorded operations on the recorded tensors with the Python numbers of the recording, and
operations that synchronise with the device must not be recorded.

Speed, precision, streams and kernels of a real GPU are not simulated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only
from transformers.utils import import_utils

from groupgrad.engines.native import cuda_graphs
from groupgrad.scoring import block_attention
from groupgrad.scoring import flex_attention as flex
from groupgrad.scoring import fused_modules as parts

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
_UNORDERED = frozenset({torch.ops.aten.cumsum.default})
"""Refused under deterministic algorithms for floating-point numbers (`torch.use_deterministic_algorithms`)."""
_SYNCHRONISING = frozenset({torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default})


class _Allocation:
    """Lives as long as the tensor that it belongs to, to which torch may allow no weak reference."""

    alive: ClassVar[WeakSet[_Allocation]] = WeakSet()

    def __init__(self, inner: torch.Tensor):
        self.inner = inner
        self.alive.add(self)


def memory_in_use(*_: Any) -> int:
    """Bytes of the device's tensors; those that graphs alone keep do not count."""
    storages = [allocation.inner.untyped_storage() for allocation in list(_Allocation.alive)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class SimulatedTensor(torch.Tensor):
    """A tensor that reports device "cuda"; its values are in `inner`, on the CPU."""

    inner: torch.Tensor
    device = property(lambda self: GPU)  # pyright: ignore
    is_cuda = property(lambda self: True)  # pyright: ignore
    is_cpu = property(lambda self: False)  # pyright: ignore
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimulatedTensor:
        assert type(inner) is torch.Tensor, type(inner)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="cpu"
        )
        tensor.inner = inner
        return tensor

    def __init__(self, inner: torch.Tensor):
        super().__init__()
        self.allocation = _Allocation(inner)

    def __repr__(self, **_: Any) -> str:  # pyright: ignore
        return f"SimulatedTensor({self.inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> SimulatedTensor:
        return SimulatedTensor(inner["inner"])

    def get_device(self) -> int:  # pyright: ignore
        return 0

    def data_ptr(self) -> int:
        raise RuntimeError("the memory of a GPU is not addressable from this process")

    def __reduce_ex__(self, protocol: Any) -> Any:  # pyright: ignore
        # Saved tensors are loaded on the CPU.
        return self.inner.__reduce_ex__(protocol)

    def storage(self) -> Any:
        return self.inner.storage()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def numpy(self, **_: Any) -> Any:  # pyright: ignore
        raise TypeError("can't convert a tensor of a GPU to numpy; copy it to host memory first")

    def tolist(self) -> Any:
        _synchronise("tolist")
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _check_devices(func, args, kwargs)
        if func in _UNORDERED and args[0].is_floating_point() and torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(f"{func} does not have a deterministic implementation on CUDA")
        if func in _SYNCHRONISING or (func in _INDEXING and _has_bool_index(args)):
            _synchronise(str(func))
        plain_args, plain_kwargs = _mapped(SimulatedTensor, _inner, (args, kwargs))
        if Graph.recording is not None and func in _MOVES and any(type(x) is torch.Tensor and x.dim() for x in args):
            _synchronise(f"{func} between devices")
        run = _CUDA_ONLY_OPS.get(func, func)
        if Graph.recording is not None:
            Graph.recording.keep_written(func, plain_args, plain_kwargs)
        output = run(*plain_args, **plain_kwargs)
        if Graph.recording is not None:
            Graph.recording.calls.append((run, plain_args, plain_kwargs, output))
        if _returns_its_first_argument(func):
            return args[0]
        output = _mapped(torch.Tensor, SimulatedTensor, output)
        return return_and_correct_aliasing(func, args, kwargs, output) if _shares_memory(func) else output


# Torch's own functions of trees take most of the time of a test.


def _mapped(kind: type, change: Any, tree: Any) -> Any:
    """`tree_map_only`; `tree` is made of lists, tuples and dictionaries, as arguments and results of operations are."""
    own = type(tree)
    if own is tuple or own is list:
        return own([_mapped(kind, change, x) for x in tree])
    if own is dict:
        return {key: _mapped(kind, change, x) for key, x in tree.items()}
    if isinstance(tree, (tuple, list, dict)):
        return tree_map_only(kind, change, tree)
    return change(tree) if isinstance(tree, kind) else tree


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves of such a tree, in the order of `tree_flatten`."""
    own = type(tree)
    if own is dict:
        tree = tree.values()
    elif own is not tuple and own is not list:
        return tree_flatten(tree)[0] if isinstance(tree, (tuple, list, dict)) else [tree]
    return [leaf for x in tree for leaf in _leaves(x)]


def _inner(tensor: SimulatedTensor) -> torch.Tensor:
    return tensor.inner


@functools.cache
def _shares_memory(func: Any) -> bool:
    """True of operations whose results are views of arguments, or arguments themselves."""
    return any(result.alias_info is not None for result in func._schema.returns)


@functools.cache
def _returns_its_first_argument(func: Any) -> bool:
    """True of operations in place, but for those that change a shape."""
    return func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags and _shares_memory(func)


@functools.cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Places and names of the arguments that an operation writes to."""
    return [
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _histogram(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.ops.aten.histc.default(tensor.float(), *args, **kwargs).to(tensor.dtype)


def _wide_products(first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    assert dtype == torch.float32 and first.dtype in (torch.float16, torch.bfloat16)
    return torch.bmm(first.to(dtype), second.to(dtype))


_CUDA_ONLY_OPS = {
    torch.ops.aten.histc.default: _histogram,  # of whole numbers
    torch.ops.aten.bmm.dtype: _wide_products,
}


waits: Counter[str] = Counter()
"""Operations for which the host has waited for the device."""


def _synchronise(operation: str) -> None:
    waits[operation] += 1
    if Graph.recording is not None:
        Graph.recording.is_broken = True
        raise RuntimeError(f"{operation}: operation not permitted when stream is capturing")


def _check_devices(func: Any, args: Any, kwargs: Any) -> None:
    if func in _MOVES:
        return
    if func in _INDEXING:
        # Index tensors may be on the CPU.
        args = (args[0], *args[2:])
    tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    cpu_tensors = [x for x in tensors if not isinstance(x, SimulatedTensor) and x.dim()]
    if cpu_tensors and len(cpu_tensors) < len(tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device; {cpu_tensors[0]!r} is on the CPU")


def _has_bool_index(args: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, waits_for_it: bool) -> torch.Tensor:
        if waits_for_it:
            _synchronise("a copy to the GPU")
        return SimulatedTensor(tensor.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore
        return gradient.inner if isinstance(gradient, SimulatedTensor) else gradient, None


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: SimulatedTensor) -> torch.Tensor:  # pyright: ignore
        _synchronise("a copy from the GPU")
        return tensor.inner.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return SimulatedTensor(gradient.detach())


_MOVERS = frozenset({torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu})


class _DeviceMode(TorchFunctionMode):
    """Creates tensors on the simulated device, and moves them between devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVERS:
            return _move(func, args, kwargs or {})
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], SimulatedTensor):
            return _copied(*args)
        if func is torch.Tensor.pin_memory:
            pinned: Any = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if not kwargs:
            return func(*args)
        kwargs = dict(kwargs)
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("attn_mask"), CausalBias):  # it would make its mask outside of this mode
            kwargs["attn_mask"] = SimulatedTensor(kwargs["attn_mask"]._materialize())
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        on_gpu = torch.device(device).type == "cuda"
        kwargs["device"] = "cpu"
        if args and isinstance(args[0], SimulatedTensor):
            # `new_zeros`, `zeros_like` and similar functions.
            result = func(*args, **kwargs)
            return result if on_gpu else result.inner
        result = func(*args, **kwargs)
        if not on_gpu or isinstance(result, SimulatedTensor):
            return result
        if func is torch.tensor or func is torch.as_tensor:
            _synchronise("a copy to the GPU")
        return SimulatedTensor(result.detach()).requires_grad_(result.requires_grad)


def _move(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, *rest = args
    if func is torch.Tensor.to:
        targets = [x for x in [*rest, *kwargs.values()] if isinstance(x, (torch.device, str, int, torch.Tensor))]
        targets = [x for x in targets if not isinstance(x, bool)]
        dtypes = [x for x in [*rest, *kwargs.values()] if isinstance(x, torch.dtype)]
        dtypes += [x.dtype for x in targets if isinstance(x, torch.Tensor)]
        result = tensor
        if dtypes and dtypes[0] != tensor.dtype:
            result = _cast(tensor, dtypes[0])
        if not targets:
            return result.clone() if result is tensor and kwargs.get("copy") else result
        target = targets[0].device if isinstance(targets[0], torch.Tensor) else torch.device(targets[0])
    else:
        result, target = tensor, GPU if func is torch.Tensor.cuda else torch.device("cpu")
    if target.type == "cuda" and not isinstance(result, SimulatedTensor):
        is_pinned = getattr(tensor, "is_pinned_here", False) and kwargs.get("non_blocking")
        return _Upload.apply(result, bool(result.dim()) and not is_pinned)
    if target.type == "cpu" and isinstance(result, SimulatedTensor):
        return _Download.apply(result)
    return result.clone() if result is tensor and kwargs.get("copy") else result


def _copied(tensor: SimulatedTensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        new = SimulatedTensor(tensor.inner.clone())
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
    return memo[id(tensor)]


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.to(dtype)


class Graph:
    """Simulates `torch.cuda.CUDAGraph`: records operations and replays them on the same tensors."""

    recording: Graph | None = None
    num_recorded = num_replayed = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that recorded operations have written to, and what they held before."""
        self.is_broken = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert Graph.recording is None
        assert Stream.current is not Stream.default, "the default stream cannot be captured"
        Graph.recording = self
        Generator.default.is_captured = True

    def keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keeps what an operation is about to overwrite, since a GPU does not run what it records."""
        for index, name in _written_arguments(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                self._written.append((value, value.clone()))

    def capture_end(self) -> None:
        if Graph.recording is not self:
            raise RuntimeError("no capture is under way")
        Graph.recording = None
        for tensor, before in reversed(self._written):
            tensor.copy_(before)
        self._written = []
        if self.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        Graph.num_recorded += 1
        Generator.default.is_captured = False

    def replay(self) -> None:
        Graph.num_replayed += 1
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                for old, new in zip(_leaves(result), _leaves(again)):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Generator:
    """Simulates the random stream of the device before torch 2.13: after a failed capture it counts as captured."""

    default: Generator
    is_captured = False

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, state: Generator) -> None:
        self.is_captured = state.is_captured


Generator.default = Generator()


class Stream:
    """Simulates `torch.cuda.Stream`; work on all streams runs immediately and in order."""

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


def to_cuda(module: nn.Module) -> nn.Module:
    """Moves all tensors of a module to the simulated device, in place. Tied parameters stay tied."""
    moved: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(SimulatedTensor(parameter.detach()), parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]  # pyright: ignore
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = SimulatedTensor(buffer.detach())
    return module


def _autocast(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


@contextmanager
def simulated_cuda(free_bytes: int = 1 << 30) -> Iterator[None]:
    """Simulates one CUDA device with `free_bytes` of free memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _patch_torch(monkeypatch, free_bytes)
        _clear_device_caches()
        try:
            with _DeviceMode():
                yield
        finally:
            Graph.recording, Stream.current = None, Stream.default
            Generator.default.is_captured = False
            _clear_device_caches()


@contextmanager
def trainers_on_simulated_cuda(free_bytes: int = 1 << 30) -> Iterator[None]:
    """The same, with a device that trainers made inside choose by themselves."""
    with pytest.MonkeyPatch.context() as patch, simulated_cuda(free_bytes):
        patch.setattr(flex, "is_usable", lambda *_: False)  # its kernel cannot be compiled here
        patch.setattr(block_attention, "is_usable", lambda *_: False)
        patch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:0")
        _forget_devices()
        try:
            yield
        finally:
            _forget_devices()


def _forget_devices() -> None:
    """accelerate chooses a device once in a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def _clear_device_caches() -> None:
    """Clears the cached device queries of transformers."""
    for name in dir(import_utils):
        cache_clear = getattr(getattr(import_utils, name), "cache_clear", None)
        if cache_clear is not None:
            cache_clear()


def _patch_torch(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    results: dict[str, Any] = {
        "mem_get_info": (free_bytes, free_bytes),
        "get_device_capability": (9, 0),
        "get_device_name": "simulated",
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
    for name, result in results.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    replacements: dict[str, Any] = {
        "memory_allocated": memory_in_use,
        "memory_reserved": memory_in_use,
        "is_current_stream_capturing": lambda: Graph.recording is not None,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": _on_stream,
        "default_generators": (Generator.default,),
        "current_stream": lambda device=None: Stream.current,
        "device": lambda device: nullcontext(),
        "device_of": lambda tensor: nullcontext(),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "get_rng_state", lambda *_: torch.get_rng_state())
        monkeypatch.setattr(module, "set_rng_state", lambda state, *_: None)
    autocast_init = torch.autocast.__init__

    def init_on_cpu(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast_init(context, _autocast(device_type), *args, **kwargs)

    monkeypatch.setattr(torch.autocast, "__init__", init_on_cpu)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        query = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda kind="cuda", query=query: query(_autocast(kind)))
    monkeypatch.setattr(cuda_graphs, "_streams", {})
    # `compiled_parts` replaces only modules whose parameters have a known tensor class.
    monkeypatch.setattr(parts, "_PLAIN_TENSORS", (*parts._PLAIN_TENSORS, SimulatedTensor))
    run_backward = torch.autograd._engine_run_backward

    def run_in_device_mode(*args: Any, **kwargs: Any) -> Any:
        # torch suspends function modes while the caller waits for the backward pass.
        with _DeviceMode():
            return run_backward(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_in_device_mode)


def with_random_adapters(model: nn.Module) -> nn.Module:
    """Gives a LoRA model non-zero adapter weights."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return model
