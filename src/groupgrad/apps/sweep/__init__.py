"""Many configurations trained in turns on one machine, compared on the same prompts; see docs/sweep.md."""
