"""Environments and tools: their schemas for the model, and their execution."""
