"""Measures a model on a data set, and compares two models on the same prompts; see docs/evaluation.md."""
