"""Engines over vLLM: on a server (`client`, `server`) or in the training process (`colocate`).

Weights are pushed to vLLM and verified. vLLM itself is imported only where it runs.
"""
