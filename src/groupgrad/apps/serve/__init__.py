"""Serves a model at an address of OpenAI's and Anthropic's APIs, sampled by the engine that a training would use."""
