"""`groupgrad plan`: predicts the memory of a run from a model's configuration, before any weight is loaded."""
