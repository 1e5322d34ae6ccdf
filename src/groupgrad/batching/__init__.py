"""Plans, loads, collates, packs and stores generation batches."""
