"""Generation batches as they are planned, loaded, collated, packed and kept."""
