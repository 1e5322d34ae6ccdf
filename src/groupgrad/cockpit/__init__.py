"""Reads and searches run folders, and serves them as a local page. Imports neither torch nor the trainer."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""The files of the page."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that no other machine reaches."""
