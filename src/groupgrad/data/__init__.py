"""Data sets: their rows, their images, and the prompts made of them."""
