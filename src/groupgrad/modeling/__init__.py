"""Everything that touches a model's weights: loading, adapters, the reference, and scoring a batch's tokens."""
