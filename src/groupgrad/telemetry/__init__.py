"""Metrics, completions, progress, timings and the model card of a training run."""
