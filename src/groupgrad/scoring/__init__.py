"""Log-probs and entropies of completion tokens under a model."""
