"""Sampling engines: token ids in, token ids and log-probs out. They have no notion of text, messages or rewards."""
