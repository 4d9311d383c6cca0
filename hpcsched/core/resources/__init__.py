"""What jobs hold or wait for: GPUs, background lanes, packs, CPU cores, the queue."""
