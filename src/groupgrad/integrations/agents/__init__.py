"""Programs as agents, over an address of OpenAI's and Anthropic's APIs: tokens are recorded as they were sampled."""
