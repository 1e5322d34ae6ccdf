"""The native engine, which samples in the training process from the policy's own modules."""

from groupgrad.engines.native.engine import NativeEngine
from groupgrad.engines.native.sampling_params import unsupported

__all__ = ["NativeEngine", "unsupported"]
