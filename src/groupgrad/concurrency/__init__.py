"""Threads and event loops that run users' functions: rewards, tools and environments."""
