"""Memory, sharding, gradient averaging and deterministic sums of training passes."""
