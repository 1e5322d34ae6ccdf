"""Checkpoints that are whole or not there: written aside, listed in a manifest, renamed once, verified when read."""
