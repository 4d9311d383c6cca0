"""Jobs that say how many GPUs are good for them, and grow and shrink by that."""
