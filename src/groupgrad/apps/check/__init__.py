"""`groupgrad check`: checks a run before it begins: its data, its settings, and one small round of training."""
