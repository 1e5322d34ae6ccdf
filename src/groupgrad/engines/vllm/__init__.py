"""Sampling with vLLM: on a server (`client`, `server`) or in this process (`colocate`), from weights that are pushed
to it and verified. vLLM itself is imported where an engine in this process or a server starts, nowhere else."""
