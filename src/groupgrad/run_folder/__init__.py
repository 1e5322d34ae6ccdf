"""Metrics, completions, progress, timings and the model card of a training run, and a reader of its folder."""
