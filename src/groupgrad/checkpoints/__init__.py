"""Atomic checkpoints: written to a temporary folder, listed in a manifest, renamed into place, verified when read."""
