"""Serves run folders as a local page (`groupgrad view`). Imports neither torch nor the trainer."""

from pathlib import Path

STATIC = Path(__file__).parent / "static"
"""The files of the page."""
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that no other machine reaches."""
