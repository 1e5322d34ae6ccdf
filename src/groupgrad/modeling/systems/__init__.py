"""What a training pass needs of the machine: memory, sharding, gradient exchange, reproducible sums."""
