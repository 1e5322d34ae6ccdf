"""Serves a model at an OpenAI-compatible address, sampled by the engine that a training would use."""
