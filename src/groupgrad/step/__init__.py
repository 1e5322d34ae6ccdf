"""From the micro-batches of an optimizer step to its gradient: what is computed, in which parts, and within memory."""
