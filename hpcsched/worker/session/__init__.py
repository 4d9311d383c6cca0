"""What a training loop sees: `Session`, `Trainer`, the boundary between two steps, the sampler."""
