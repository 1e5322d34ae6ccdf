"""Loading of models, adapters, the reference, and what is known of model families."""
