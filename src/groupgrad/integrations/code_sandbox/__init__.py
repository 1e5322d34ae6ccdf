"""Runs programs that a model wrote, and rewards those that pass their tests."""
