"""Sampling engines: token ids in, token ids and log-probs out. They know nothing of text, messages or rewards."""
