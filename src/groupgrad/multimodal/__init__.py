"""Images in prompts and in tool replies."""
