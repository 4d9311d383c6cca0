"""What to ask a batch system for: allocations tried out on the simulator, and how long each would wait."""
