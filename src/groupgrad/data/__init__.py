"""Prompts, the order in which they come, and ragged batches made of their completions."""
