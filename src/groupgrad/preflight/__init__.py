"""Checks a run before it begins: its data, its settings, and one small round of sampling and training."""
