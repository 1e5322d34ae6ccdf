"""Metrics, completions, progress, timings, reward curves and the model card of a training run."""
