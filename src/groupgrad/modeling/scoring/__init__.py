"""From tokens to log-probs and entropies."""
