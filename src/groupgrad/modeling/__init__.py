"""Models: loading, adapters, the reference model, and the log-probs of a batch."""
