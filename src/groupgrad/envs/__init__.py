"""Environments and tools: what they look like to the model, and how they run."""
