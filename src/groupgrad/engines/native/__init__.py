"""The native engine, which samples in process from the modules that train."""

from groupgrad.engines.native.engine import NativeEngine
from groupgrad.engines.native.sampling_params import unsupported

__all__ = ["NativeEngine", "unsupported"]
