"""Images: prompts that hold them, and images that tools return."""
