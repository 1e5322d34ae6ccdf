"""From data-set rows to finished, scored rollouts."""
