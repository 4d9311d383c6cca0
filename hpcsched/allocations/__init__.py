"""What to ask the batch system for: its queue simulated, waits, candidates and what they come to."""
