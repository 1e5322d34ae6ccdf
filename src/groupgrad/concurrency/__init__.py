"""Threads and an event loop that reward functions, tools and environments run on."""
