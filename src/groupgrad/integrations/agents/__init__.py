"""Programs that talk to an OpenAI-compatible address as agents: their tokens are recorded as they were sampled."""
